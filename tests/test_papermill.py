"""The line people type, `papermill 03_extract.ipynb --p shard 4`: how it is completed, refused, run and reported."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pexpect
import pytest

from hsnb import papermill_engine as engine
from hsnb import run
from hsnb.errors import ParamsError
from hsnb.report import Outcome
from tests.test_notebook_params import EXTRACT_CELL, make_project, notebook_of

PAPERMILL = str(Path(sys.executable).with_name("papermill"))
SAY = "print('shard', shard, 'of', run)"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("HSNB_ROOT", raising=False)
    root = make_project(tmp_path / "clone", SAY)
    monkeypatch.chdir(root / "notebooks")
    return root


def papermill(*args: str, program=(PAPERMILL,), **kwargs) -> subprocess.CompletedProcess:
    kwargs.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([*program, *args], capture_output=True, text=True, timeout=120, **kwargs)


INDEX = {"index.html", "summary.json", ".index.lock"}  # of the run, which every run brings up to date


def outputs(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root / "outputs")) for p in (root / "outputs").rglob("*") if p.is_file() and p.name not in INDEX)


def said(file: Path) -> str:
    return "".join(o.get("text", "") for c in nbformat.read(file, as_version=4).cells for o in c.get("outputs", []))


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and that nobody waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- the line -------------------------------------------------------------------------------------------------------------


def test_the_table_of_options_is_papermills():
    from papermill.cli import papermill as command

    theirs = {}
    for option in command.params:
        if option.param_type_name == "option":
            takes = 0 if option.is_flag else option.nargs
            theirs |= dict.fromkeys([*option.opts, *option.secondary_opts], takes)
    assert {name: takes for name, takes in theirs.items() if takes} == {k: v for k, v in engine.ARITY.items() if k != "--p"}
    assert {"--prepare-only", "--help-notebook", "--no-progress-bar"} <= {name for name, takes in theirs.items() if not takes}


COMPLETED = [
    ("03_extract.ipynb --p shard 4", "demo/03_extract-shard-0004.ipynb", "03_extract.ipynb OUT -p shard 4"),
    ("--p shard 4 03_extract.ipynb", "demo/03_extract-shard-0004.ipynb", "-p shard 4 03_extract.ipynb OUT"),
    ("03_extract.ipynb", "demo/03_extract-shard-0000.ipynb", "03_extract.ipynb OUT"),
    ("03_extract.ipynb -p shard 12 -p run kimi", "kimi/03_extract-shard-0012.ipynb", "03_extract.ipynb OUT -p shard 12 -p run kimi"),
    ("-pshard 3 -- 03_extract.ipynb", "demo/03_extract-shard-0003.ipynb", "-pshard 3 -- 03_extract.ipynb OUT"),
    ("--parameters=shard 3 ./03_extract.ipynb", "demo/03_extract-shard-0003.ipynb", "--parameters=shard 3 ./03_extract.ipynb OUT"),
    ("-r run x -p run y 03_extract.ipynb", "x/03_extract-shard-0000.ipynb", "-r run x -p run y 03_extract.ipynb OUT"),
    ("-k python3 03_extract.ipynb --cwd /tmp", "demo/03_extract-shard-0000.ipynb", "-k python3 03_extract.ipynb OUT --cwd /tmp"),
    ("03_extract.ipynb out.ipynb --p shard 4", None, "03_extract.ipynb out.ipynb -p shard 4"),
    ("03_extract.ipynb - --p shard 4", None, "03_extract.ipynb - -p shard 4"),
    # invalid ones keep a safe name: the engine refuses them before anything is written
    ("03_extract.ipynb --p shard four --p run ../x", "demo/03_extract-shard-0000.ipynb", "03_extract.ipynb OUT -p shard four -p run ../x"),
    ("03_extract.ipynb -p shard -1", "demo/03_extract-shard-0000.ipynb", "03_extract.ipynb OUT -p shard -1"),
    ("03_extract.ipynb -f no-such.yaml -y [1]", "demo/03_extract-shard-0000.ipynb", "03_extract.ipynb OUT -f no-such.yaml -y [1]"),
    ("03_extract.ipynb -p shard", "demo/03_extract-shard-0000.ipynb", "03_extract.ipynb OUT -p shard"),
]


@pytest.mark.parametrize(("typed", "out", "becomes"), COMPLETED, ids=[c[0] for c in COMPLETED])
def test_a_line_of_ours_is_completed(project, typed, out, becomes):
    words = [str(project / "outputs" / out) if word == "OUT" else word for word in becomes.split()]
    line = engine.complete(typed.split())
    assert line == ["--engine", "hsnb", *words]
    assert engine.complete(line) == line
    assert not list((project / "outputs").iterdir())


def test_an_engine_that_was_named_stays(project):
    line = engine.complete(["--engine=nbclient", "03_extract.ipynb"])
    assert line == ["--engine=nbclient", "03_extract.ipynb", str(project / "outputs/demo/03_extract-shard-0000.ipynb")]


@pytest.mark.parametrize(
    "typed", ["", "--help", "--version", "mine.ipynb --p a 1", "- out.ipynb", "../03_extract.ipynb --p shard 4", "--p shard 4", "--bogus x"]
)
def test_any_other_line_is_left_alone(project, typed):
    (project / "notebooks" / "mine.ipynb").write_text("{}")
    assert engine.complete(typed.split()) == typed.split()


def test_run_and_shard_are_found_in_files_yaml_and_base64(project):
    (project / "p.yaml").write_text("run: file\nshard: 1\n")
    coded = base64.b64encode(b"run: b64\nnum_shards: 99").decode()
    words = ["-y", "shard: 2", "-f", "../p.yaml", "--parameters_base64", coded, "-p", "limit", "7"]
    assert engine.given_parameters(engine.read_line(words)) == {"run": "file", "shard": 2, "num_shards": 99, "limit": 7}


def test_a_default_edited_in_the_notebook_counts_for_the_name(project):
    nbformat.write(notebook_of(EXTRACT_CELL.replace('run: str = "demo"', 'run: str = "mine"')), "03_extract.ipynb")
    assert engine.complete(["03_extract.ipynb"])[-1] == str(project / "outputs/mine/03_extract-shard-0000.ipynb")


def test_braces_of_a_folder_are_not_papermills_to_fill_in(tmp_path, monkeypatch):
    root = make_project(tmp_path / "{clone}")
    monkeypatch.chdir(root / "notebooks")
    assert engine.complete(["03_extract.ipynb"])[-1].format() == str(root / "outputs/demo/03_extract-shard-0000.ipynb")


def test_hsnb_root_says_where_the_outputs_go(project, tmp_path, monkeypatch):
    monkeypatch.setenv("HSNB_ROOT", str(tmp_path / "elsewhere"))
    assert engine.complete(["03_extract.ipynb"])[-1] == str(tmp_path / "elsewhere/outputs/demo/03_extract-shard-0000.ipynb")


@pytest.mark.parametrize(
    ("argv", "orig", "expected"),
    [
        (["/x/bin/papermill", "a"], ["python", "/x/bin/papermill", "a"], True),
        (["-m", "a.ipynb"], ["python", "-X", "dev", "-m", "papermill", "a.ipynb"], True),
        (["-m", "a.ipynb"], ["python", "-mpapermill", "a.ipynb"], True),
        (["-m", "-m", "papermill"], ["python", "-m", "pytest", "-m", "papermill"], False),
        (["/x/papermill/__main__.py"], ["python", "-m", "papermill"], True),
        (["/x/bin/pytest"], ["python", "/x/bin/pytest"], False),
        ([""], ["python"], False),
    ],
)
def test_only_the_papermill_program_has_its_line_completed(argv, orig, expected):
    assert engine.is_papermill(argv, orig) is expected


# --- refusals of the real program: no kernel is started -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--p shrad 4", "ParamsError: unknown parameter 'shrad', expected one of: params, run, server_url, spool, shard, num_shards, "
         "max_length, too_long, layout, in_flight_tokens, limit. Likely: a typo for 'shard'. Next: -p shard 4"),
        ("-p shard 99", "ParamsError: shard is 99, expected 0..15 (16 shards). Likely: a typo, or another num_shards was meant. "
         "Next: -p shard 15, or -p num_shards 100 or more"),
    ],
)  # fmt: skip
def test_papermill_refuses_in_one_line_and_writes_nothing(project, words, error):
    done = papermill("03_extract.ipynb", *words.split())
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == error
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list((project / "outputs").iterdir())


def test_a_wrong_value_in_the_notebooks_own_cell_is_refused_too(project):
    nbformat.write(notebook_of(EXTRACT_CELL.replace("shard: int = 0", "shard: int = 16"), SAY), "03_extract.ipynb")
    done = papermill("03_extract.ipynb")
    assert done.returncode == 1
    assert "shard is 16, expected 0..15 (16 shards)" in done.stderr
    assert not list((project / "outputs").iterdir())


def test_prepare_only_makes_the_folder(project):
    assert papermill("03_extract.ipynb", "--p", "run", "x", "--prepare-only").returncode == 0
    assert outputs(project) == ["x/03_extract-shard-0000.ipynb"]


def test_a_foreign_notebook_gets_papermills_own_answer(project):
    done = papermill("mine.ipynb", "--p", "a", "1")
    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert "hsnb" not in done.stderr


# --- real runs ------------------------------------------------------------------------------------------------------------

EXPECTED = ["demo/03_extract-shard-0004.html", "demo/03_extract-shard-0004.ipynb"]
LINE = ["03_extract.ipynb", "--p", "shard", "4"]


def on_a_terminal() -> int:
    child = pexpect.spawn(PAPERMILL, LINE, timeout=120)
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


@pytest.mark.notebook
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(on_a_terminal, id="terminal"),
        pytest.param(lambda: papermill(*LINE).returncode, id="devnull"),
        pytest.param(lambda: papermill(*LINE, stdin=None, input="not a notebook").returncode, id="piped-stdin"),
        pytest.param(lambda: papermill(*LINE, program=(sys.executable, "-m", "papermill")).returncode, id="python-m"),
        pytest.param(lambda: subprocess.run(f"'{PAPERMILL}' {' '.join(LINE)} | cat", shell=True, timeout=120).returncode, id="cat"),
    ],
)
def test_the_line_works_the_same_on_a_terminal_and_in_a_pipe(project, how):
    source = Path("03_extract.ipynb").read_bytes()
    assert how() == 0
    assert outputs(project) == EXPECTED
    assert said(project / "outputs" / EXPECTED[1]) == "shard 4 of demo\n"
    assert Path("03_extract.ipynb").read_bytes() == source
    assert "<title>Extract</title>" in (project / "outputs" / EXPECTED[0]).read_text()
    assert 'href="03_extract-shard-0004.html"' in (project / "outputs" / "demo" / "index.html").read_text()


@pytest.mark.notebook
def test_an_output_that_was_named_is_used_and_reported_also_with_cwd(project, tmp_path):
    done = papermill("03_extract.ipynb", "mine.ipynb", "--p", "shard", "2", "--cwd", str(tmp_path), "--inject-paths")
    assert done.returncode == 0
    assert said(Path("mine.ipynb")) == "shard 2 of demo\n"
    assert Path("mine.html").is_file()
    assert not Path(tmp_path / "mine.html").exists()
    assert outputs(project) == []
    assert not Path("index.html").exists()  # that folder is no run's


@pytest.mark.notebook
def test_a_failed_notebook_leaves_a_report_with_the_error_on_top(project):
    code = "from hsnb.errors import DumpError\nraise DumpError(got='2047 rows', expected='2048', likely='a lost chunk', next='hsnb verify')"
    make_project(project, code)
    done = papermill(*LINE)
    assert done.returncode == 1
    html, ipynb = (project / "outputs" / name for name in EXPECTED)
    line = "DumpError: 2047 rows, expected 2048. Likely: a lost chunk. Next: hsnb verify"
    assert Outcome.of(nbformat.read(ipynb, as_version=4)).error == line
    assert "<dt>Likely</dt><dd>a lost chunk</dd>" in html.read_text()
    assert done.stderr.splitlines()[-1] == line
    assert "Traceback" not in done.stderr
    assert "<dt>Likely</dt><dd>a lost chunk</dd>" in html.with_name("index.html").read_text()


@pytest.mark.notebook
def test_a_kernel_that_dies_is_a_failure_in_the_file_too(project):
    make_project(project, "import os\nos._exit(1)")
    done = papermill(*LINE)
    assert done.returncode == 138  # papermill's status for it
    html, ipynb = (project / "outputs" / name for name in EXPECTED)
    outcome = Outcome.of(nbformat.read(ipynb, as_version=4))
    assert (outcome.status, outcome.error.split(":")[0]) == ("failed", "DeadKernelError")
    assert "DeadKernelError" in html.read_text()


@pytest.mark.notebook
def test_a_kernel_does_not_outlive_a_killed_papermill_and_an_old_report_is_gone(project):
    make_project(project, "import os, time\nopen('pid.part', 'w').write(str(os.getpid()))\nos.rename('pid.part', 'pid')\ntime.sleep(300)")
    (project / "outputs" / "demo").mkdir()
    (project / "outputs" / EXPECTED[0]).write_text("of an earlier run")
    process = subprocess.Popen([PAPERMILL, *LINE], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not Path("pid").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    kernel = int(Path("pid").read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    while alive(kernel) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(kernel)
    assert outputs(project) == EXPECTED[1:]
    assert Outcome.of(nbformat.read(project / "outputs" / EXPECTED[1], as_version=4)).status == "unfinished"


# --- hsnb.run -------------------------------------------------------------------------------------------------------------


def test_shards_are_parsed():
    assert run.parse_shards("0-15,20") == [*range(16), 20]
    assert run.parse_shards("7") == [7]
    assert run.parse_shards("3, 1-2") == [3, 1, 2]


@pytest.mark.parametrize(
    ("text", "got", "likely"),
    [
        ("0-", "'0-' is no shard", "a typo"),
        ("", "'' is no shard", "a typo"),
        ("a-3", "'a-3' is no shard", "a typo"),
        ("5-2", "'5-2' counts down", "the ends were swapped"),
        ("0-3,2-4", "2, 3 named twice", "ranges that overlap"),
    ],
)
def test_bad_shards_are_refused(text, got, likely):
    with pytest.raises(ParamsError) as error:
        run.parse_shards(text)
    assert error.value.as_dict() == {
        "got": f"--shards {text}: {got}",
        "expected": "ranges and numbers such as 0-15,20",
        "likely": likely,
        "next": "--shards 0-15",
    }


def test_parameters_are_read_as_papermill_reads_them(project):
    Path("p.yaml").write_text("run: file\nids: [1, 2]\nshard: 1\n")
    values = [("shard", "4"), ("keep", "True"), ("minutes", "2.5"), ("a", "http://x"), ("spool", "None")]
    assert run.merge(["p.yaml"], values, [("run", "2024")]) == {
        "run": "2024", "ids": [1, 2], "shard": 4, "keep": True, "minutes": 2.5, "a": "http://x", "spool": None,
    }  # fmt: skip
    Path("p.yaml").write_text("- 1\n")
    with pytest.raises(ParamsError, match=r"-f p\.yaml: a list, expected a YAML file of NAME: VALUE lines"):
        run.merge(["p.yaml"], [])
    with pytest.raises(ParamsError, match=r"-f q\.yaml: .*No such file"):
        run.merge(["q.yaml"], [])


def test_notebooks_are_found_by_name_and_by_path(project, monkeypatch):
    file = project / "notebooks" / "03_extract.ipynb"
    monkeypatch.setenv("HSNB_ROOT", str(project))
    monkeypatch.chdir(project.parent)
    assert [run.locate(name) for name in ("03_extract", "03_extract.ipynb", str(file), "clone/notebooks/03_extract.ipynb")] == [file] * 4
    with pytest.raises(ParamsError, match=r"no notebook nowhere/03_extract.ipynb, expected one of: 03_extract in "):
        run.locate("nowhere/03_extract.ipynb")
    with pytest.raises(ParamsError, match=r"no notebook .*/01_probe.ipynb"):
        run.locate("01_probe")


def test_shards_are_checked_before_the_first_is_run(project, monkeypatch):
    monkeypatch.setattr(run, "run_notebook", lambda *a: pytest.fail("a notebook was run"))
    with pytest.raises(ParamsError, match=r"shard is 16, expected 0\.\.15"):
        run.run_shards("03_extract", {}, [0, 16])
    with pytest.raises(ParamsError, match="--shards with -p shard"):
        run.run_shards("03_extract", {"shard": 1}, [0])
    with pytest.raises(ParamsError, match="--shards with 01_probe, expected 03_extract"):
        run.run_shards("01_probe", {}, [0])


@pytest.mark.notebook
def test_run_notebook_returns_what_it_left(project, tmp_path):
    make_project(project, "import os\nprint(os.getcwd(), os.environ['HSNB_ROOT'])\nassert shard != 1, 'one is bad'")
    good = run.run_notebook("03_extract.ipynb", {"shard": 0}, cwd=tmp_path)
    assert (good.ok, good.error) == (True, "")
    assert good.notebook == project / "outputs/demo/03_extract-shard-0000.ipynb"
    assert good.html == good.notebook.with_suffix(".html")
    assert good.html.is_file()
    assert 0 < good.seconds < 120
    assert said(good.notebook) == f"{tmp_path} {project}\n"
    assert "HSNB_ROOT" not in os.environ
    bad, after = run.run_shards("03_extract.ipynb", {}, [1, 2])
    assert (bad.ok, bad.error, bad.html.is_file()) == (False, "AssertionError: one is bad", True)
    assert after.ok
