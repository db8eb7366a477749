"""The parameter table of the notebooks: what is in it, and the words of each refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from hsnb import notebook
from hsnb.errors import ParamsError

REPO = Path(__file__).resolve().parents[1]
COMMON = {"params": "params/demo.yaml", "run": "demo", "server_url": "", "spool": ""}
TABLE = {
    "00_server": {"keep": False},
    "01_probe": {"prompts": [], "repeat": 1},
    "02_divergence": {"a": "sglang", "b": "vllm", "ids": [], "dtype": "float32"},
    "03_extract": {
        "shard": 0,
        "num_shards": 16,
        "max_length": 512,
        "too_long": "error",
        "layout": "speculators",
        "in_flight_tokens": 0,
        "limit": 0,
    },
    "04_handoff": {"data": "", "trainer": "speculators", "minutes": 3, "seeds": 1},
}
EXTRACT_CELL = """params: str = "params/demo.yaml"  # the deployment
run: str = "demo"
server_url: str = ""
spool: str = ""
shard: int = 0  # which of num_shards
num_shards: int = 16
max_length: int = 512
too_long: str = "error"
layout: str = "speculators"
in_flight_tokens: int = 0
limit: int = 0"""
SERVER_CELL = """params: str = "params/demo.yaml"
run: str = "demo"
server_url: str = ""
spool: str = ""
keep: bool = False"""


def notebook_of(cell: str, *code: str, title: str = "Extract") -> nbformat.NotebookNode:
    """Return a notebook with a title, a parameters cell and code cells."""
    new = nbformat.v4
    cells = [new.new_markdown_cell(f"# {title}\n\nIs it so?"), new.new_code_cell(cell, metadata={"tags": ["parameters"]})]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new.new_notebook(cells=cells + [new.new_code_cell(c) for c in code], metadata={"kernelspec": kernel})


def make_project(root: Path, *code: str, cell: str = EXTRACT_CELL, name: str = "03_extract") -> Path:
    """Lay out a project with one notebook and return its root."""
    for folder in ("notebooks", "params", "outputs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "params" / "demo.yaml").write_text("name: demo\nmodel: demo:smollm2-fp32\ncapture: {boundaries: [2, 15, 27]}\n")
    nbformat.write(notebook_of(cell, *code), root / "notebooks" / f"{name}.ipynb")
    return root


@pytest.fixture
def project(tmp_path, monkeypatch):
    root = make_project(tmp_path / "clone")
    monkeypatch.setenv("HSNB_ROOT", str(root))
    return root


def refusal(name: str, given: dict) -> str:
    with pytest.raises(ParamsError) as error:
        notebook.check(name, given)
    return str(error.value)


def test_the_table_is_the_specification():
    assert {name: notebook.declared(name) for name in notebook.TABLE} == {name: COMMON | own for name, own in TABLE.items()}


def test_given_values_are_returned_and_the_run_folder_is_made(project):
    p = notebook.check("03_extract.ipynb", {"shard": 4, "run": "kimi", "too_long": "skip"})
    assert (p.shard, p.num_shards, p.run, p.too_long, p.params) == (4, 16, "kimi", "skip", "params/demo.yaml")
    assert (project / "outputs" / "kimi").is_dir()
    assert notebook.check("04_handoff", {"minutes": 2}).minutes == 2
    assert notebook.check("02_divergence", {"ids": [1, 5]}).ids == [1, 5]


# notebook, given, then the four parts of the error
EXTRACT_NAMES = "params, run, server_url, spool, shard, num_shards, max_length, too_long, layout, in_flight_tokens, limit"
SHARDS = "a whole number, 0..15 (16 shards)"
REFUSALS = [
    ("03_extract", {"shrad": 4}, "unknown parameter 'shrad'", f"one of: {EXTRACT_NAMES}", "a typo for 'shard'", "-p shard 4"),
    (
        "00_server",
        {"shard": 4},
        "unknown parameter 'shard'",
        "one of: params, run, server_url, spool, keep",
        "a parameter of 03_extract",
        "leave shard out, or run 03_extract.ipynb",
    ),
    (
        "00_server",
        {"name": "demo", "model": "m"},
        "unknown parameter 'name'",
        "one of: params, run, server_url, spool, keep",
        "a deployment was given with -f, which takes the notebook's own parameters",
        "-p params FILE",
    ),
    (
        "03_extract",
        {"shard": 99},
        "shard is 99",
        "0..15 (16 shards)",
        "a typo, or another num_shards was meant",
        "-p shard 15, or -p num_shards 100 or more",
    ),
    (
        "03_extract",
        {"shard": 16},
        "shard is 16",
        "0..15 (16 shards)",
        "shards are counted from 0",
        "-p shard 15, or -p num_shards 17 or more",
    ),
    ("03_extract", {"shard": -1}, "shard is -1", SHARDS, "a value out of range", "-p shard 0"),
    (
        "03_extract",
        {"shard": "four", "num_shards": 8},
        "shard is 'four'",
        "a whole number, 0..7 (8 shards)",
        "a word where a number belongs",
        "-p shard 0",
    ),
    ("03_extract", {"shard": "4"}, "shard is '4'", SHARDS, "quotes or -r, which keep digits as text", "-p shard 4"),
    ("03_extract", {"shard": True}, "shard is True", SHARDS, "a bool where a number belongs", "-p shard 0"),
    (
        "03_extract",
        {"max_length": 512.5},
        "max_length is 512.5",
        "a whole number of tokens from 1",
        "a fraction where a whole number belongs",
        "-p max_length 512",
    ),
    (
        "03_extract",
        {"too_long": "truncat"},
        "too_long is 'truncat'",
        "error, skip or truncate",
        "a typo for 'truncate'",
        "-p too_long truncate",
    ),
    ("00_server", {"keep": "true"}, "keep is 'true'", "True or False", "-p knows True and False, with a capital", "-p keep True"),
    (
        "00_server",
        {"run": 2024},
        "run is 2024",
        "a plain folder name below outputs/",
        "-p turns digits, True, False and None into values",
        "-r run 2024 (taken as it is written)",
    ),
    ("00_server", {"run": "../x"}, "run is '../x'", "a plain folder name below outputs/", "a path was given for a name", "-p run my-run"),
    (
        "00_server",
        {"server_url": "localhost:30000"},
        "server_url is 'localhost:30000'",
        "http://HOST:PORT, or empty for a server of its own",
        "http:// was left out",
        "-p server_url http://localhost:30000",
    ),
    (
        "01_probe",
        {"prompts": "hello you"},
        "prompts is 'hello you'",
        "a list of texts (besides the two fixed ones)",
        "-p gives one word, not a list",
        "-y 'prompts: [\"hello you\"]'",
    ),
    ("02_divergence", {"ids": [1, True]}, "ids is [1, True]", "a list of whole numbers", "an item of the wrong type", "-y 'ids: [1, 2]'"),
    ("04_handoff", {"minutes": 0}, "minutes is 0", "a number of minutes above 0", "a value out of range", "-p minutes 3"),
    (
        "03_extrakt",
        {},
        "unknown notebook '03_extrakt'",
        "one of: 00_server, 01_probe, 02_divergence, 03_extract, 04_handoff",
        "a typo for '03_extract'",
        "name 03_extract.ipynb",
    ),
]


@pytest.mark.parametrize(("name", "given", "got", "expected", "likely", "next"), REFUSALS, ids=[str(r[1]) for r in REFUSALS])
def test_refusals_say_what_to_do_and_write_nothing(project, name, given, got, expected, likely, next):
    assert refusal(name, given) == f"ParamsError: {got}, expected {expected}. Likely: {likely}. Next: {next}"
    assert not list((project / "outputs").iterdir())


def test_the_params_file_must_exist_and_hold_known_names(project):
    assert "no such file" in refusal("03_extract", {"params": "params/dmeo.yaml"})
    assert "choose one of: params/demo.yaml" in refusal("03_extract", {"params": "params/dmeo.yaml"})
    (project / "params" / "bad.yaml").write_text("name: x\nmodel: y\ncapture: {boundaries: [1]}\nserver: {pory: 3}\n")
    assert "unknown name server.pory" in refusal("03_extract", {"params": "params/bad.yaml"})
    assert not list((project / "outputs").iterdir())


def test_validate_picks_the_parameters_out_of_a_notebooks_names(project):
    scope = {**notebook.declared("03_extract"), "shard": 4, "np": object(), "__name__": "__main__", "In": []}
    assert notebook.validate("03_extract", scope).shard == 4
    with pytest.raises(ParamsError, match="shard is 99"):
        notebook.validate("03_extract", scope | {"shard": 99})


def test_output_names():
    assert notebook.output_name("03_extract", {"shard": 4}) == "03_extract-shard-0004.ipynb"
    assert notebook.output_name("notebooks/03_extract.ipynb", {}) == "03_extract-shard-0000.ipynb"
    assert notebook.output_name("01_probe", {"repeat": 3}) == "01_probe.ipynb"


def test_a_parameters_cell_is_read_and_compared_with_the_table():
    good = notebook_of(EXTRACT_CELL)
    assert notebook.parameters_of_cell(good)["shard"] == ("int", 0)
    assert list(notebook.parameters_of_cell(good)) == list(COMMON | TABLE["03_extract"])
    notebook.check_cell(good, "03_extract")
    notebook.check_cell(notebook_of(SERVER_CELL), "00_server")
    edited = EXTRACT_CELL.replace("shard: int = 0", "shard: int = 4")
    assert notebook.cell_values(notebook_of(edited + '\nmine: str = "x"'), "03_extract")["shard"] == 4


@pytest.mark.parametrize(
    ("cell", "got", "expected"),
    [
        (EXTRACT_CELL.replace("limit: int = 0", "limit: int = 5"), "limit: int = 5", "limit: int = 0"),
        (EXTRACT_CELL.replace("limit: int = 0", "limit: float = 0"), "limit: float = 0", "limit: int = 0"),
        (EXTRACT_CELL.replace("limit: int = 0", "lmit: int = 0"), "lmit: int = 0; no limit", "limit: int = 0"),
        (EXTRACT_CELL + "\nimport os", "the parameters cell has import os", "lines of `name: type = literal`"),
        (EXTRACT_CELL + "\nx: int = f()", "malformed node", "lines of `name: type = literal`"),
        (EXTRACT_CELL + "\nx = 3", "the parameters cell has x = 3", "lines of `name: type = literal`"),
    ],
)
def test_a_parameters_cell_that_differs_is_refused(cell, got, expected):
    with pytest.raises(ParamsError) as error:
        notebook.check_cell(notebook_of(cell), "03_extract")
    assert got in error.value.got
    assert error.value.expected == expected


def test_a_list_may_be_typed_as_a_word_of_the_shell(project):
    assert notebook.check("01_probe", {"prompts": '["a text", [1, 2, 3]]'}).prompts == ["a text", [1, 2, 3]]
    assert notebook.check("02_divergence", {"ids": "[2, 30, 58]"}).ids == [2, 30, 58]
    assert "prompts is '[broken'" in refusal("01_probe", {"prompts": "[broken"})


def test_a_lost_tag_is_refused():
    nb = notebook_of(EXTRACT_CELL)
    nb.cells[1].metadata["tags"] = []
    with pytest.raises(ParamsError, match="0 cells tagged 'parameters', expected exactly one"):
        notebook.parameters_of_cell(nb)


def test_checking_loads_neither_torch_nor_papermill():
    code = "import sys, hsnb.notebook, hsnb.papermill_engine, hsnb.params; print([m for m in ('torch', 'papermill') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
