"""The command line: its registry, its exit statuses, and that --json prints one object and nothing else."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest

from hsnb import cli
from hsnb.errors import ServerError
from tests.test_notebook_params import EXTRACT_CELL, make_project, notebook_of

HSNB = str(Path(sys.executable).with_name("hsnb"))
REPO = Path(__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path, monkeypatch):
    root = make_project(tmp_path / "clone", "print('shard', shard)\nassert shard != 1, 'one is bad'")
    monkeypatch.setenv("HSNB_ROOT", str(root))
    return root


@pytest.fixture
def fake(monkeypatch):
    """A subcommand as another module would add it."""
    module = types.ModuleType("hsnb_fake")
    sys.modules["hsnb_fake"] = module
    monkeypatch.setitem(cli.COMMANDS, "fake", ("do nothing", "hsnb_fake:command"))

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=0)

    def run(args: argparse.Namespace) -> dict:
        print("a library that prints")
        if args.port == 1:
            raise ServerError(got="port 1 is taken", expected="a free one", likely="another server", next="--port 0")
        return {"ok": args.port != 2, "port": args.port, "path": Path("x")}

    module.command = cli.Command(add, run, lambda result: f"port {result['port']}")
    yield module
    del sys.modules["hsnb_fake"]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_names_every_command_and_loads_none_of_them():
    code = """import sys
from hsnb.cli import main
try:
    main(["--help"])
except SystemExit as done:
    assert done.code == 0
print([m for m in ("torch", "papermill", "nbconvert", "pandas", "pydantic", "hsnb.run", "hsnb.report") if m in sys.modules])"""
    out = python(code)
    assert out.splitlines()[-1] == "[]"
    for name, (help, _) in cli.COMMANDS.items():
        assert name in out
        assert help in " ".join(out.split())


def test_a_command_loads_its_own_module_only():
    code = """import sys
from hsnb.cli import parse
parse(["report", "demo"])
print([m for m in ("torch", "papermill", "nbconvert", "hsnb.run", "hsnb.report") if m in sys.modules])"""
    assert python(code).strip() == "['hsnb.report']"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_of_the_table_has_its_functions(name):
    impl = cli.load(cli.COMMANDS[name][1])
    impl.add(argparse.ArgumentParser())
    assert callable(impl.run)


def test_the_answer_is_text_or_one_json_object(fake, capsys):
    assert cli.main(["fake", "--port", "5"]) == 0
    assert capsys.readouterr().out == "a library that prints\nport 5\n"
    for argv in (["fake", "--port", "5", "--json"], ["--json", "fake", "--port", "5"]):
        assert cli.main(argv) == 0
        out, err = capsys.readouterr()
        assert json.loads(out) == {"ok": True, "port": 5, "path": "x"}
        assert out.count("\n") == 1
        assert err == "a library that prints\n"


def test_not_ok_is_exit_status_1(fake, capsys):
    assert cli.main(["fake", "--port", "2"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "port 2"


def test_an_error_is_one_line_or_its_four_parts(fake, capsys):
    assert cli.main(["fake", "--port", "1"]) == 2
    out, err = capsys.readouterr()
    assert err == "ServerError: port 1 is taken, expected a free one. Likely: another server. Next: --port 0\n"
    assert out == "a library that prints\n"
    assert cli.main(["fake", "--port", "1", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "error": {"type": "ServerError", "got": "port 1 is taken", "expected": "a free one", "likely": "another server", "next": "--port 0"}
    }


def test_an_interrupt_is_exit_status_130(fake, capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    fake.command = cli.Command(fake.command.add, interrupted)
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["reprot", "demo"], "ParamsError: unknown command 'reprot', expected one of: {commands}. Likely: a typo for 'report'. Next: hsnb report"),
        (["zzz"], "ParamsError: unknown command 'zzz', expected one of: {commands}. Likely: a command of another version. Next: hsnb --help"),
        (["report"], "ParamsError: the following arguments are required: RUN, expected hsnb report [-h] [--json] [--health] [--samples N] RUN. "
         "Likely: a typo, or an argument left out. Next: hsnb report --help"),
        (["fake", "--port", "x"], "ParamsError: argument --port: invalid int value: 'x', expected hsnb fake [-h] [--json] [--port PORT]. "
         "Likely: a typo, or an argument left out. Next: hsnb fake --help"),
        (["fake", "--por", "3"], "ParamsError: unrecognized arguments: --por 3, expected hsnb [-h] [--json] COMMAND .... "
         "Likely: a typo, or an argument left out. Next: hsnb --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_usage_errors_have_four_parts_too(fake, capsys, argv, line):
    assert cli.main(argv) == 2
    assert capsys.readouterr().err == line.format(commands=", ".join(cli.COMMANDS)) + "\n"


@pytest.mark.parametrize(
    ("argv", "got", "next"),
    [
        (["run", "03_extract", "-p", "shard", "16"], "shard is 16", "-p shard 15, or -p num_shards 17 or more"),
        (["run", "03_extract", "--p", "shrad", "4"], "unknown parameter 'shrad'", "-p shard 4"),
        (["run", "03_extract", "--shards", "0-"], "--shards 0-: '0-' is no shard", "--shards 0-15"),
        (["run", "03_extract", "-f", "params/demo.yaml"], "unknown parameter 'name'", "-p params FILE"),
        (["run", "03_extrac"], "unknown notebook '03_extrac'", "name 03_extract.ipynb"),
        (["run", "03_extract", "--ray", "auto"], "--ray auto without --shards", "--shards 0-15"),
    ],
)
def test_hsnb_run_refuses_before_anything_is_written(project, capsys, monkeypatch, argv, got, next):
    monkeypatch.chdir(project)
    assert cli.main([*argv, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["got"], error["next"]) == ("ParamsError", got, next)
    assert not list((project / "outputs").iterdir())


def test_hsnb_report_prints_the_index(project, capsys):
    folder = project / "outputs" / "demo"
    folder.mkdir()
    nbformat.write(notebook_of(EXTRACT_CELL, "1"), folder / "03_extract.ipynb")
    assert cli.main(["report", "demo"]) == 0
    assert capsys.readouterr().out == f"{folder}/index.html\n"
    assert cli.main(["report", "demo", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["index"] == f"{folder}/index.html"
    assert [(row["notebook"], row["html"], row["status"]) for row in answer["notebooks"]] == [
        ("03_extract.ipynb", "03_extract.html", "not run")
    ]
    assert cli.main(["report", "dmeo"]) == 2
    assert "no run 'dmeo'" in capsys.readouterr().err


@pytest.mark.notebook
def test_hsnb_run_goes_on_after_a_failed_shard_and_names_it(project):
    argv = [HSNB, "run", "03_extract", "--shards", "0-2", "--p", "run", "x"]
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert (answer["ok"], answer["failed"]) == (False, ["03_extract-shard-0001"])
    assert [(row["ok"], row["error"]) for row in answer["notebooks"]] == [(True, ""), (False, "AssertionError: one is bad"), (True, "")]
    pages = [*(f"03_extract-shard-000{n}.html" for n in range(3)), "index.html"]
    assert sorted(p.name for p in (project / "outputs" / "x").glob("*.html")) == pages
    assert "one is bad" in (project / "outputs" / "x" / "index.html").read_text()
    assert "shard 1: AssertionError: one is bad" in done.stderr


@pytest.mark.notebook
def test_hsnb_run_prints_the_reports_path(project):
    done = subprocess.run([HSNB, "run", "03_extract.ipynb", "-p", "shard", "2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{project}/outputs/demo/03_extract-shard-0002.html  ")
