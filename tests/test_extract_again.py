"""A shard that is run again: the good run's notebook, report and numbers stay; and a kernel's progress on the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import pexpect
import pytest

from hsnb.keep import output_for, passed
from hsnb.progress import Progress, mirror
from hsnb.run import run_notebook
from hsnb.shard import ShardResult
from tests.test_notebook_params import make_project

BIN = Path(sys.executable).parent
# What the notebook does here is told by a file: work, nothing, or fail.
CODE = """\
import json, pathlib
from hsnb.shard import ShardResult
from hsnb.paths import run_dir
todo = pathlib.Path(run_dir(run), "todo").read_text()
assert todo != "fail", "the server is gone"
print(todo)
new = int(todo.split()[1]) if todo.startswith("work") else 0
ShardResult(run_dir(run), shard, num_shards, 5, 0, 0, 50, 500, 0, new, 1.0).save(run_dir(run));"""

RESULT = ShardResult(Path("data"), 4, 16, 10, 0, 0, 100, 1000, 0, 100, 2.0)


@pytest.fixture
def project(tmp_path, monkeypatch):
    root = make_project(tmp_path / "clone", CODE)
    monkeypatch.delenv("HSNB_ROOT", raising=False)
    monkeypatch.chdir(root / "notebooks")
    (root / "outputs" / "demo").mkdir()
    return root


def todo(root: Path, what: str) -> None:
    (root / "outputs" / "demo" / "todo").write_text(what)


def said(file: Path) -> str:
    return "".join(o.get("text", "") for c in nbformat.read(file, as_version=4).cells for o in c.get("outputs", [])).strip()


INDEX = {"index.html", "summary.json", ".index.lock"}  # of the run, brought up to date after every notebook


def names(root: Path) -> list[str]:
    """Return what lies in the run's folder, and see that the index has a row for each notebook of it."""
    found = {p.name for p in (root / "outputs" / "demo").iterdir()}
    if "summary.json" in found:
        rows = json.loads((root / "outputs" / "demo" / "summary.json").read_text())["notebooks"]
        assert {row["notebook"] for row in rows} == {n for n in found if n.endswith(".ipynb")}
        assert {row["html"] for row in rows} == {n for n in found if n.endswith(".html")} - INDEX
    return sorted(found - INDEX - {"todo"})


FIRST = ["03_extract-shard-0004.html", "03_extract-shard-0004.ipynb", "shard-0004.json"]
BOTH = ["03_extract-shard-0004.again.html", "03_extract-shard-0004.again.ipynb", *FIRST]


def test_a_result_that_did_nothing_or_failed_is_written_beside_a_whole_one(tmp_path):
    assert RESULT.save(tmp_path).name == "shard-0004.json"
    assert replace(RESULT, new_tokens=0, done_before=10).save(tmp_path).name == "shard-0004.again.json"
    assert replace(RESULT, failed={3: "NaN"}).save(tmp_path).name == "shard-0004.again.json"
    assert json.loads((tmp_path / "shard-0004.json").read_text())["new_tokens"] == 100
    assert replace(RESULT, new_tokens=7).save(tmp_path).name == "shard-0004.json"  # it mended something
    assert json.loads((tmp_path / "shard-0004.json").read_text())["new_tokens"] == 7


def test_a_result_that_failed_is_replaced_by_any_other(tmp_path):
    replace(RESULT, failed={3: "NaN"}).save(tmp_path)
    assert replace(RESULT, failed={3: "NaN"}, new_tokens=0).save(tmp_path).name == "shard-0004.json"
    assert RESULT.save(tmp_path).name == "shard-0004.json"


def test_hsnb_run_keeps_the_good_runs_notebook(project):
    folder = project / "outputs" / "demo"
    todo(project, "work 10")
    assert run_notebook("03_extract", {"shard": 4}).ok
    assert names(project) == FIRST and said(folder / FIRST[1]) == "work 10"

    todo(project, "nothing")
    again = run_notebook("03_extract", {"shard": 4})
    assert (again.ok, again.notebook.name, again.html.name) == (True, BOTH[1], BOTH[0])
    assert said(folder / FIRST[1]) == "work 10" and said(again.notebook) == "nothing"
    assert names(project) == sorted([*BOTH, "shard-0004.again.json"])

    todo(project, "fail")
    failed = run_notebook("03_extract", {"shard": 4})
    assert (failed.ok, failed.notebook.name) == (False, BOTH[1])
    assert "the server is gone" in failed.html.read_text()
    assert said(folder / FIRST[1]) == "work 10" and "work 10" in (folder / FIRST[0]).read_text()

    todo(project, "work 20")
    mended = run_notebook("03_extract", {"shard": 4})
    assert (mended.notebook.name, mended.html.name) == (FIRST[1], FIRST[0])
    assert said(folder / FIRST[1]) == "work 20" and json.loads((folder / FIRST[2]).read_text())["new_tokens"] == 20
    assert not (folder / BOTH[1]).exists()


def test_the_users_own_line_keeps_it_too(project):
    folder = project / "outputs" / "demo"

    def papermill() -> int:
        line = [BIN / "papermill", "03_extract.ipynb", "--p", "shard", "4"]
        return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=120).returncode

    todo(project, "fail")
    assert papermill() == 1
    assert names(project) == FIRST[:2]
    todo(project, "work 10")
    assert papermill() == 0
    assert said(folder / FIRST[1]) == "work 10"
    todo(project, "fail")
    assert papermill() == 1
    assert said(folder / FIRST[1]) == "work 10" and names(project) == sorted(BOTH)
    todo(project, "work 30")
    assert papermill() == 0
    assert said(folder / FIRST[1]) == "work 30" and names(project) == FIRST


def test_half_a_notebook_is_not_a_good_run(tmp_path):
    target = tmp_path / "03_extract-shard-0004.ipynb"
    (tmp_path / "shard-0004.json").write_text('{"ok": true}')
    for content in ("", "{", "{}", '{"cells": []'):
        target.write_text(content)
        assert not passed(target) and output_for(target) == target
    assert output_for(tmp_path / "01_probe.ipynb") == tmp_path / "01_probe.ipynb"


LOOP = """\
import time
from hsnb.progress import Progress
with Progress(30, unit="tokens", desc="shard 4") as progress:
    for n in range(30):
        time.sleep(0.1)
        progress.advance(1, note=f"{n + 1} of 30 samples")"""


def test_a_cells_progress_is_on_the_terminal_too(tmp_path, monkeypatch):
    root = make_project(tmp_path / "clone", LOOP)
    monkeypatch.delenv("HSNB_ROOT", raising=False)
    output, status = pexpect.run(
        f"{BIN}/papermill 03_extract.ipynb --p shard 4", cwd=str(root / "notebooks"), withexitstatus=True, timeout=120, encoding="utf-8"
    )
    assert status == 0, output
    shown = [n for n in range(31) if f"{n} of 30 samples" in output]
    assert len(shown) >= 4 and shown[-1] == 30, output  # while the cell ran, not only at its end
    assert "shard 4" in output and "30/30" in output
    piped = subprocess.run(
        [BIN / "hsnb", "run", "03_extract", "-p", "shard", "5"], cwd=root, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )  # fmt: skip
    assert piped.returncode == 0 and "30 of 30 tokens" in piped.stderr and "30 of 30 samples" in piped.stderr


def test_a_loop_of_another_process_is_shown_here(capsys):
    with mirror():
        code = (
            "from hsnb.progress import _Mirror, Progress, ADDRESS\nimport os\n"
            "class M(_Mirror):\n    def __init__(s, a):\n        super().__init__(a); s.display = type('D', (), {'show': lambda *a, **k: None})()\n"
            "p = Progress(4, unit='tokens'); p.done = 4; M(os.environ[ADDRESS]).show(p, last=True)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
    assert "4 of 4 tokens" in capsys.readouterr().err


def test_nobody_listening_is_no_error(monkeypatch, tmp_path):
    from hsnb.progress import _Mirror

    shown = _Mirror(str(tmp_path / "nobody"))
    monkeypatch.setattr(shown.display, "show", lambda *args, **kwargs: None)
    with Progress(2) as progress:
        shown.show(progress, last=False)
        shown.show(progress, last=True)
