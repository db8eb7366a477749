"""JupyterLab itself, in headless Chromium: the notebooks by Run All, and an explorer whose widgets are moved.

HSNB_TEST_BROWSER=all opens every notebook with a server of its own, vLLM and the training included (half an hour on two cores).
Else the servers' starts are saved: 00_server has one of its own, 01 to 03 use the shared one, and 04_handoff is left to `all`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from benchmarks.browser import CHROMIUM, REASON, browser
from benchmarks.lab import jupyterlab
from tests.conftest import SETTINGS
from tests.project import ROOT, make_project, tiny_params
from tests.test_health import good, write_folder

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(CHROMIUM is None, reason=REASON),
]
ALL = os.environ.get("HSNB_TEST_BROWSER") == "all"
SHARED = {"params": "params/shared.yaml", "run": "lab"}
# notebook: (its parameters here, those with HSNB_TEST_BROWSER=all, seconds allowed); URL is the shared server's
TINY = {"params": "params/tiny.yaml", "run": "lab"}
RUNS = {
    "00_server": (TINY, TINY, 300),
    "01_probe": (SHARED | {"server_url": "URL"}, TINY, 300),
    "02_divergence": (SHARED | {"a": "URL", "b": "transformers", "ids": [2, 4, 6]}, TINY | {"ids": [2, 4, 6]}, 900),
    "03_extract": (SHARED | {"server_url": "URL", "num_shards": 2}, {"run": "demo", "limit": 96, "params": "params/patient.yaml"}, 900),
    "04_handoff": (None, {"run": "demo", "minutes": 9.5, "params": "params/patient.yaml"}, 2000),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    project = make_project(folder / "project")
    tiny_params(project, 12, 24)
    tree = SETTINGS["tiny"] | {"data": {"source": str(project / "tiny.jsonl")}}
    (project / "params" / "shared.yaml").write_text(yaml.safe_dump(tree))
    demo = yaml.safe_load((project / "params" / "demo.yaml").read_text())
    demo["server"]["ready_timeout_s"] = 900  # other work shares the cores
    (project / "params" / "patient.yaml").write_text(yaml.safe_dump(demo))
    trainers = ROOT / ".venv-trainers"
    if trainers.exists():
        (project / trainers.name).symlink_to(trainers.resolve())
    with browser(folder / "chromium") as page, jupyterlab(project / "notebooks", folder, page) as started:
        yield started


@pytest.fixture
def tab(lab):
    """A JupyterLab whose last notebook's kernel was ended."""
    lab.page.asked.clear()
    lab.page.said.clear()
    yield lab
    lab.close_kernel()


def failures(nb) -> list[str]:
    return [f"{o.ename}: {o.evalue}" for c in nb.cells for o in c.get("outputs", []) if o.output_type == "error"]


def from_elsewhere(tab) -> list[str]:
    return [u for u in tab.page.asked if not u.startswith((tab.url, tab.url.replace("http", "ws"), "data:", "blob:"))]


def test_the_table_has_every_notebook():
    assert sorted(RUNS) == sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.engine("tiny")
@pytest.mark.parametrize("name", RUNS)
def test_run_all_ends_without_an_error(name, tab, engine, engine_starts):
    here, everything, seconds = RUNS[name]
    given = everything if ALL else here
    if given is None:
        pytest.skip("a training of minutes: HSNB_TEST_BROWSER=all runs it")
    if ALL or "URL" not in given.values():
        engine.stop()
    given = {k: engine("tiny").url if v == "URL" else v for k, v in given.items()}
    file = tab.folder / f"{name}.ipynb"
    nbformat.write(parameterize_notebook(load_notebook_node(str(ROOT / "notebooks" / file.name)), given), file)
    tab.open(file.name)
    nb = tab.run_all(seconds)
    assert failures(nb) == []
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert all(c.execution_count for c in code)
    shown = [o for c in code for o in c.outputs if o.output_type in ("display_data", "execute_result")]
    assert sum("text/html" in o.data for o in shown) >= 2 and any("erdict" in c.source for c in nb.cells if c.cell_type == "markdown")
    assert from_elsewhere(tab) == [] and tab.page.said == []
    assert tab.servers() == []  # a server of its own ended with its last cell
    if name == "00_server":
        engine_starts.note(
            "00_server in JupyterLab", "0.5." + text_of(nb).split("<th style='text-align:left'>sglang</th><td>0.5.")[1].split("<")[0]
        )
    if name == "03_extract" and not ALL:
        run = tab.folder.parent / "outputs" / "lab"
        assert json.loads((run / "shard-0000.json").read_text())["samples"] == 6
    pictures = tab.page.js("[...document.querySelectorAll('.jp-OutputArea img')].map(i => [i.naturalWidth, i.alt])")
    wanted = {"00_server": 0, "01_probe": 1, "02_divergence": 3, "03_extract": 1, "04_handoff": 3}[name]
    assert len(pictures) >= wanted and all(width > 0 for width, _ in pictures)


def text_of(nb) -> str:
    return "\n".join("".join(o.data.get("text/html", "")) for c in nb.cells for o in c.get("outputs", []) if "data" in o)


EXPLORE = ["import sys\nfrom hsnb import widgets\nprint(sys.prefix)", 'widgets.dumps("../outputs/look/data")']
PICTURE = "document.querySelector('.jupyter-widgets img')"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_widget_is_moved_and_the_figure_changes(tab, dark):
    data = tab.folder.parent / "outputs" / "look" / "data"
    if not data.exists():
        data.mkdir(parents=True)
        write_folder(data, good(6))
    v4 = nbformat.v4
    kernel = nbformat.read(ROOT / "notebooks" / "01_probe.ipynb", as_version=4).metadata
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(code) for code in EXPLORE], metadata=kernel), tab.folder / "explore.ipynb")
    tab.open("explore.ipynb", dark=dark)
    nb = tab.run_all(240)
    assert failures(nb) == []
    assert Path(nb.cells[0].outputs[0].text.strip()).resolve() == Path(sys.prefix).resolve()  # the kernel of this environment
    page = tab.page
    assert page.wait(f"{PICTURE}?.naturalWidth", 60) > 300
    assert page.js(f"{PICTURE}.alt").startswith("Norm by token, B_2.")
    first = page.js(f"{PICTURE}.src")

    page.click(".jupyter-widgets select")  # opens the list, as a reader does
    page.key("ArrowDown", 40)
    page.key("Enter", 13)
    second = page.wait(f"{PICTURE}.src != {json.dumps(first)} && {PICTURE}.src", 60, "another boundary, another figure")
    assert page.js(f"{PICTURE}.alt").startswith("Norm by token, B_4.")

    page.js("document.querySelectorAll('.jupyter-widgets .noUi-handle')[0].focus()")
    page.key("ArrowRight", 39)
    page.wait(f"{PICTURE}.src != {json.dumps(second)}", 60, "other tokens, another figure")
    assert "n = 23" in page.js(f"{PICTURE}.alt")  # of 24: from position 1 on
    assert from_elsewhere(tab) == [] and page.said == []
