"""What results and figures show of themselves: all have a table and a figure, and nothing is told by a colour alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bs4 import BeautifulSoup

from hsnb import figures, show
from hsnb.divergence import plots
from hsnb.divergence.compare import Comparison
from hsnb.drafter import figures as drafters
from hsnb.dumps.dump import Dump
from hsnb.health import plots as health_plots
from hsnb.params import Deployment
from hsnb.patch.armed import RING_FULL, Armed, ArmedFile, read_armed
from hsnb.plan import Plan
from hsnb.probe.result import ProbeResult
from hsnb.report.outcome import MARKS
from hsnb.server import Server
from hsnb.shard import ShardResult
from tests.test_widgets import RECORD

HSNB = Path(figures.__file__).parent


@pytest.mark.parametrize("result", [Server, ProbeResult, Dump, Comparison, Plan, ShardResult], ids=lambda c: c.__name__)
def test_a_result_has_a_table_and_a_figure(result):
    assert callable(result._repr_html_) and callable(result.plot)


def test_nothing_to_say_is_said():
    """A setting that is not set, a token of spaces alone; and a large number is written whole."""
    page = show.pairs_html([("spool", ""), ("context", None), ("env", {}), ("port", 0), ("<k>", "<v>")])
    cells = [cell.text for cell in BeautifulSoup(page, "html.parser").select("td")]
    assert cells == ["(not set)", "(not set)", "(not set)", "0", "<v>"]
    assert [show.token(text) for text in (" the", "\n  ", "")] == [" the", "'\\n  '", "''"]
    assert [show.number(v) for v in (0.123456, 24731.2, -2500.0, 3.1e-7, 4e12)] == ["0.1235", "24,731", "-2,500", "3.1e-07", "4e+12"]
    assert Comparison.token_frame(SimpleNamespace(tokens=({"token": " ", "largest": 1.0},)))["token"].tolist() == ["' '"]


def test_no_table_of_a_result_has_colours_of_its_own():
    """JupyterLab's own stay, light or dark."""
    seen = 0
    for file in HSNB.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "_repr_html_":
                seen += 1
                said = " ".join(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
                assert not re.search(r"color|background", said), f"{file}: {said}"
    assert seen >= 15


def test_a_server_shows_what_its_schedulers_have_counted_by_now(tmp_path):
    files = [ArmedFile(tmp_path, Armed(state="armed", rank=rank, boundaries=[2], counts={"warmup": 1})) for rank in (0, 1)]
    server = Server("http://h:1", "h", 1, tmp_path, 7, None, {}, "0.5.23", 1.0, None, armed=read_armed(tmp_path))
    for _ in range(3):
        files[0].count("captured")
    files[0].count(RING_FULL, 5000)  # no requests
    files[1].fail("hsnb-a", "disk full")
    ax = server.plot()
    assert figures.alt_text(ax.figure) == "What the schedulers counted. x: requests. Shown: captured (3); warmup (2); failed (1)."
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    assert ax.get_xlim()[1] == 4.0
    for path in tmp_path.glob("armed-*.json"):  # the server has ended, and its spool with it
        path.unlink()
    assert "warmup (2)." in figures.alt_text(server.plot().figure)


def test_a_deployment_is_a_table():
    shown = Deployment.load(HSNB.parent / "params" / "demo.yaml")._repr_html_()
    assert "<th style='text-align:left'>capture.boundaries</th><td>[2, 15, 27]</td>" in shown


def accepted(share):
    return SimpleNamespace(per_position=[share, share / 2], accept_length=1.3, verifications=9)


COMPARISON = SimpleNamespace(
    a="a", b="b", dtype="float32", boundaries=[SimpleNamespace(**b) for b in RECORD["comparison"]["boundaries"]],
    tokens=[t | {"prompt": p} for p in ("x", "y") for t in RECORD["comparison"]["tokens"]], found=SimpleNamespace(tokens=9),
)  # fmt: skip
HEALTH = SimpleNamespace(
    columns=("B_2", "B_4", "B_6"), looked=4,
    norms=SimpleNamespace(starts=(0, 1), of_positions=np.ones((3, 2, 3))),
)  # fmt: skip
DRAWN = {
    "norms of states": lambda: figures.norms_of_states({name: np.ones(4) for name in "abc"}),
    "rebuilt logprobs": lambda: figures.logprob_errors(dict.fromkeys("abc", (0.1, 0.2)), 0.5),
    "lengths": lambda: figures.lengths([3, 40], [3], max_length=50, server_takes=45),
    "shares": lambda: figures.shares({"a": 1, "b": 2, "c": 3}, "samples", "t"),
    "requests": lambda: figures.requests({"rank 0": dict.fromkeys(("captured", "warmup", "health", "failed"), 2)}),
    "one boundary": lambda: figures.against_all([3.0, 1.0], ["id 0", "id 1"], "B_1", "b", "relative L2"),
    "noise and shift": lambda: plots.noise_and_shift(COMPARISON),
    "positions": lambda: plots.positions(COMPARISON),
    "losses": lambda: drafters.losses({name: np.arange(30.0) for name in "abcde"}),
    "acceptance": lambda: drafters.acceptance({"predicted": accepted(0.4), "served": accepted(0.3)}),
    "norms by position": lambda: health_plots.norms(HEALTH),
}


@pytest.mark.parametrize("name", DRAWN)
def test_no_two_series_differ_by_colour_alone(name):
    ax = DRAWN[name]()
    handles, labels = ax.get_legend_handles_labels()
    assert len(labels) >= 2
    looks = []
    for handle in handles:
        part = handle[0] if hasattr(handle, "__getitem__") else handle  # a histogram's or an error bar's own
        if hasattr(part, "get_marker"):
            looks.append(("line", part.get_marker(), part.get_linestyle()))
        else:
            looks.append(("area", part.get_hatch() or "", str(tuple(np.round(part.get_facecolor(), 2)) == (1, 1, 1, 1))))
    grey_told = [
        (look, round(_lightness(h), 1)) if look[0] == "area" and not look[1] else look for look, h in zip(looks, handles, strict=True)
    ]
    assert len(set(grey_told)) == len(labels), dict(zip(labels, grey_told, strict=True))


def _lightness(handle) -> float:
    """Return the lightness of an area's fill, which is seen without colours too."""
    part = handle[0] if hasattr(handle, "__getitem__") else handle
    red, green, blue, _ = part.get_facecolor()
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def told_by_colour(page: str) -> list[str]:
    """Return what a page colours by its state without a mark or a word for it."""
    soup = BeautifulSoup(page, "html.parser")
    coloured = soup.select(".failed, .passed, .unfinished, .look, .FAIL, .PASS")
    words = [*MARKS, "FAIL", "LOOK", "PASS", "look"]
    return [str(tag) for tag in coloured if not any(word in tag.get_text() for word in words)]


def test_states_are_marks_and_words_too(tmp_path):
    from hsnb.health import examine
    from hsnb.report.health import health_page
    from hsnb.report.index import update_index
    from tests.test_health import good, write_folder
    from tests.test_notebook_params import make_project
    from tests.test_report import OWED, failure, shard_run

    folder = make_project(tmp_path) / "outputs" / "demo"
    (folder / "data").mkdir(parents=True)
    for shard in range(3):
        shard_run(folder, shard, *([failure(OWED)] if shard == 1 else []))
    index = update_index(folder).index.read_text()
    assert index.count("✗ failed") >= 2 and index.count("✓ passed") >= 2
    assert told_by_colour(index) == []
    samples = good(4)
    samples[2][2][3, 1] = 0
    write_folder(folder / "data", samples)
    page = health_page(examine(folder / "data"))
    assert "✗ FAIL" in page and told_by_colour(page) == []
    assert told_by_colour('<span class="failed"></span>') != []
