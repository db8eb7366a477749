"""Reports: what a browser would load (nothing), what stands on top of a failed one, the index, and the progress display."""

from __future__ import annotations

import base64
import json
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch

from hsnb import figures, progress, report, session
from hsnb.errors import DumpError, ExtractError, ParamsError
from hsnb.progress import Progress
from hsnb.report.index import update_index
from hsnb.report.outcome import ERROR_MARKER_TAG, duration
from hsnb.report.page import WIDGET_VIEW
from hsnb.server import preflight
from hsnb.server.verdict import verdict
from tests.test_notebook_params import EXTRACT_CELL, make_project, notebook_of

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
new = nbformat.v4


def executed(*outputs, status="completed", code="x", **pm) -> nbformat.NotebookNode:
    """Return a notebook as papermill leaves it."""
    nb = notebook_of(EXTRACT_CELL, code, title="Extract `states`")
    nb.cells[-1].outputs = list(outputs)
    facts = {"start_time": "2026-01-02T03:04:05.678+00:00", "end_time": "2026-01-02T03:05:05+00:00", "duration": 75.2}
    nb.metadata["papermill"] = facts | {"parameters": {"shard": 4}} | pm
    return nb


def failure(error: Exception):
    name = type(error).__name__
    return new.new_output("error", ename=name, evalue=str(error), traceback=["\x1b[31m----\x1b[0m", f"{name}: {error}"])


def loads(page: str) -> list[str]:
    """Return what a browser would fetch for `page` from elsewhere."""
    tags = re.findall(r"<(?!a\b)[a-z][^>]*?\s(?:src|href|srcset|data|poster|xlink:href)\s*=\s*[\"']?\s*(?:https?:)?//[^>]*>", page, re.I)
    return tags + re.findall(r"@import|url\(\s*[\"']?\s*(?:https?:)?//[^)]*\)", page, re.I) + re.findall(r"<script|<link", page, re.I)


def test_the_checker_of_this_test_finds_what_would_be_loaded():
    assert len(loads('<img src="https://a/b.png"><script src="//x"></script><style>@import "x"; a {b: url(http://c)}</style>')) == 5


def test_a_report_loads_and_runs_nothing(tmp_path):
    (tmp_path / "fig.png").write_bytes(base64.b64decode(PIXEL))
    page = """<script src="https://cdn.example/x.js"></script><script>alert(1)</script><link rel="stylesheet" href="https://cdn.example/x.css">
    <style>@import url("https://cdn.example/f.css"); p { background: url('http://cdn.example/b.png'); color: red }</style>
    <p style="background: url(//cdn.example/c.png)" onclick="go()">kept text</p><iframe src="http://cdn.example/"></iframe>
    <img src="https://cdn.example/far.png"><img src="fig.png"><img srcset="a.png 1x, https://cdn.example/2x.png 2x">
    <svg><image href="https://cdn.example/s.png"/><image xlink:href="http://cdn.example/t.png"/></svg>
    <a href="https://docs.example/">a plain link</a>"""
    nb = executed(
        new.new_output("display_data", data={"text/html": page}),
        new.new_output("display_data", data={"image/png": PIXEL}),
        new.new_output("display_data", data={"application/javascript": "fetch('https://cdn.example')"}),
        new.new_output("display_data", data={WIDGET_VIEW: {"model_id": "1"}, "text/plain": "IntSlider(value=0)"}),
        new.new_output("stream", name="stdout", text="plain words"),
    )
    nb.cells[0].source += "\n\n$x^2$ ![far](https://cdn.example/md.png) ![near](fig.png)"
    nb.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    file = tmp_path / "03_extract.ipynb"
    nbformat.write(nb, file)
    html = report.render(file)
    text = html.read_text()
    assert html == tmp_path / "03_extract.html"
    assert loads(text) == []
    assert "cdn.example/x" not in text
    assert "alert(1)" not in text
    assert "onclick" not in text
    assert "IntSlider" not in text
    assert text.count(f"data:image/png;base64,{PIXEL}") == 3  # the output, the HTML's and the markdown's
    assert "not embedded: https://cdn.example/far.png" in text
    assert '<a href="https://docs.example/">a plain link</a>' in text
    assert "<title>Extract states</title>" in text
    assert "plain words" in text
    assert "prefers-color-scheme: dark" in text
    assert 'role="alert"' not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["03_extract.html", "03_extract.ipynb", "fig.png"]


def test_a_failed_notebook_says_so_on_top_in_the_errors_own_line(tmp_path):
    error = DumpError(got="hidden is <bf16>[2047,7168]", expected="bf16[2048,7168]", likely="a chunk is missing", next="hsnb verify")
    nb = executed(failure(error))
    marker = new.new_markdown_cell("An Exception was encountered", metadata={"tags": [ERROR_MARKER_TAG]})
    nb.cells.insert(0, marker)  # papermill's
    text = report.write_html(nb, tmp_path / "x.html").read_text()
    parts = {
        "What came": "hidden is &lt;bf16&gt;[2047,7168]",
        "Expected": "bf16[2048,7168]",
        "Likely": "a chunk is missing",
        "Next": "hsnb verify",
    }
    assert all(f"<dt>{label}</dt><dd>{said}</dd>" in text for label, said in parts.items())
    assert '<details class="hsnb-code" open="">' in text  # the failed cell's code is not folded away, the others' is
    assert text.count('<details class="hsnb-code">') == 1
    assert text.index('role="alert"') < text.index("<h1")
    assert "An Exception was encountered" not in text
    assert f'href="#cell-id={nb.cells[-1].id}"' in text
    assert f'id="cell-id={nb.cells[-1].id}"' in text


def test_outcomes():
    assert report.Outcome.of(executed()).status == "passed"
    failed = report.Outcome.of(executed(failure(ZeroDivisionError("division by zero"))))
    assert (failed.status, failed.error, failed.seconds) == ("failed", "ZeroDivisionError: division by zero", 75.2)
    assert report.Outcome.of(executed(new.new_output("error", ename="SystemExit", evalue="0", traceback=[]))).status == "passed"
    killed = executed(end_time=None, duration=None)
    assert report.Outcome.of(killed).status == "unfinished"
    assert "is still running, or was killed" in report.to_html(killed, Path("."))
    dead = executed()
    dead.metadata["hsnb"] = {"error": "DeadKernelError: Kernel died"}
    assert report.Outcome.of(dead).error == "DeadKernelError: Kernel died"
    assert report.Outcome.of(notebook_of(EXTRACT_CELL)).status == "not run"


def test_the_index_of_a_run_has_the_failed_ones_first(tmp_path, monkeypatch):
    root = make_project(tmp_path)
    monkeypatch.setenv("HSNB_ROOT", str(root))
    folder = root / "outputs" / "demo"
    folder.mkdir()
    nbformat.write(executed(), folder / "01_probe.ipynb")
    nbformat.write(executed(end_time=None, duration=None), folder / "02_divergence.ipynb")
    nbformat.write(executed(failure(ValueError("a < b"))), folder / "03_extract-shard-0004.ipynb")
    result = report.report_run("demo")
    assert [row["notebook"] for row in result.rows] == ["03_extract-shard-0004.ipynb", "02_divergence.ipynb", "01_probe.ipynb"]
    text = result.index.read_text()
    assert result.index == folder / "index.html"
    assert loads(text) == []
    assert "3 notebooks: 1 failed, 1 unfinished, 1 passed." in text
    assert "ValueError: a &lt; b" in text
    assert "shard=4" in text
    assert "1 min 15 s" in text
    assert "2026-01-02 03:04:05" in text
    pages = {"01_probe.html", "02_divergence.html", "03_extract-shard-0004.html"}
    assert {f.name for f in folder.glob("*.html")} == pages | {"index.html"}
    assert set(re.findall(r'href="([^"]*)"', text)) == pages


NESTED = DumpError(got="2047 rows", expected="2048", likely="a chunk", next="hsnb verify")
OWED = ExtractError(
    got=f"shard 5: 3 of 8 samples owed, first row 5: {NESTED}", expected="every sample published", likely="a <full> disk", next="hsnb redo"
)


def test_the_four_parts_are_told_apart_also_around_a_quoted_error():
    assert report.parts_of(str(OWED)) == {"name": "ExtractError", **OWED.as_dict()}
    assert report.parts_of(str(NESTED)) == {"name": "DumpError", **NESTED.as_dict()}
    assert report.parts_of("ZeroDivisionError: division by zero") is None


def shard_run(folder: Path, shard: int, *outputs, **pm) -> None:
    nb = executed(*outputs, parameters={"shard": shard, "num_shards": 16}, **pm)
    nbformat.write(nb, folder / f"03_extract-shard-{shard:04d}.ipynb")
    failed = {shard: str(NESTED)} if outputs else {}
    tree = {"shard": shard, "num_shards": 16, "samples": 128, "tokens": 30000, "bytes": 10**8, "tokens_per_s": 900.0, "failed": failed}
    (folder / f"shard-{shard:04d}.json").write_text(json.dumps({**tree, "ok": not failed}))


def test_sixteen_shards_two_of_them_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("HSNB_ROOT", str(make_project(tmp_path)))
    folder = tmp_path / "outputs" / "demo"
    folder.mkdir()
    for shard in range(14):
        shard_run(folder, shard, *([failure(OWED)] if shard in (5, 11) else []))
    result = report.report_run("demo")
    assert [row["notebook"] for row in result.rows[:3]] == [f"03_extract-shard-{k:04d}.ipynb" for k in (5, 11, 0)]
    text = result.index.read_text()
    first, second = re.findall(r'<div class="hsnb-error".*?</div>', text, re.S)
    assert 'href="03_extract-shard-0005.html"' in first
    assert 'href="03_extract-shard-0011.html"' in second
    for label, said in {
        "What came": "shard 5: 3 of 8",
        "Expected": "every sample published",
        "Likely": "a &lt;full&gt; disk",
        "Next": "hsnb redo",
    }.items():
        assert f"<dt>{label}</dt><dd>{said}" in first
    assert text.index(second) < text.index('class="grid"') < text.index("<table")
    cells = re.findall(r'<li class="(\w+)">.*?<b>(\d+)</b>.*?<br>(\S) ([a-z ]+)', text)
    assert [int(c[1]) for c in cells] == list(range(16))
    assert {c[1]: c[3] for c in cells if c[0] != "passed"} == {"5": "failed", "11": "failed", "14": "not run", "15": "not run"}
    assert cells[5][2] == "✗"  # a mark and a word, not a colour alone
    assert loads(text) == []
    tree = json.loads(result.summary.read_text())
    assert (tree["ok"], tree["counts"]) == (False, {"failed": 2, "passed": 12})
    assert tree["notebooks"][0]["parts"]["next"] == "hsnb redo"
    assert tree["extracted"] == {"samples": 14 * 128, "tokens": 14 * 30000, "bytes": 14 * 10**8}
    assert [s["status"] for s in tree["shards"]].count("passed") == 12
    assert tree["notebooks"][0]["verdict"] == "1 of 128 samples owed"
    assert tree["notebooks"][2]["verdict"] == "whole: 128 samples"


def test_a_notebook_that_did_not_change_is_not_read_again(tmp_path, monkeypatch):
    folder = make_project(tmp_path) / "outputs" / "demo"
    folder.mkdir()
    for shard in range(3):
        shard_run(folder, shard)
    update_index(folder)
    read = []
    monkeypatch.setattr(nbformat, "from_dict", lambda tree, real=nbformat.from_dict: read.append(1) or real(tree))
    shard_run(folder, 2, failure(OWED))
    rows = update_index(folder).rows
    assert len(read) == 1
    assert [row["status"] for row in rows] == ["failed", "passed", "passed"]


def test_a_result_of_an_earlier_run_is_not_this_ones_verdict(tmp_path):
    folder = make_project(tmp_path) / "outputs" / "demo"
    folder.mkdir()
    (folder / "probe.json").write_text(json.dumps({"verdict": "PASS"}))
    now = datetime.now(UTC)
    for seconds, said in ((-60, "PASS"), (60, "")):
        nbformat.write(executed(start_time=(now + timedelta(seconds=seconds)).isoformat()), folder / "01_probe.ipynb")
        assert update_index(folder).rows[0]["verdict"] == said


def test_half_a_notebook_is_unfinished_and_shards_without_notebooks_are_told(tmp_path):
    folder = make_project(tmp_path) / "outputs" / "demo"
    folder.mkdir()
    (folder / "01_probe.ipynb").write_text('{"cells": [')
    (folder / "shard-0001.json").write_text(
        json.dumps({"shard": 1, "num_shards": 2, "ok": False, "samples": 9, "failed": {"3": str(NESTED)}})
    )
    result = update_index(folder)
    assert result.rows[0]["status"] == "unfinished"
    assert [s["status"] for s in result.shards] == ["not run", "failed"]
    assert "shard 1: 1 samples owed" in result.index.read_text()


def by_hand(folder: Path, shard: int, cell: str = EXTRACT_CELL) -> None:
    """Write a shard's notebook without a word of papermill's, as a hand saves it."""
    nb = notebook_of(cell, "x")
    nb.cells[-1].execution_count = 1
    nbformat.write(nb, folder / f"03_extract-shard-{shard:04d}.ipynb")


def statuses(folder: Path) -> str:
    """Return the index's shards: p(assed), f(ailed), u(nfinished) or n(ot run) each."""
    return "".join(shard["status"][0] for shard in update_index(folder).shards)


def test_of_how_many_shards_a_run_is_it_says_itself(tmp_path):
    folder = make_project(tmp_path) / "outputs" / "demo"
    folder.mkdir()
    (folder / "03_extract-shard-0002.ipynb").write_text('{"cells": [')  # half a file: it says nothing
    assert statuses(folder) == "nnu"
    by_hand(folder, 1, "shard: int = 1")  # a cell without num_shards
    assert statuses(folder) == "npu"
    (folder / "data" / "ledger").mkdir(parents=True)
    (folder / "data" / "ledger" / "shard-0002-of-0005.sqlite").touch()
    assert statuses(folder) == "npunn"
    by_hand(folder, 1, EXTRACT_CELL.replace("= 16", "= 6"))  # a default edited in the notebook
    assert statuses(folder) == "npunnn"
    shard_run(folder, 0)  # papermill's num_shards
    assert statuses(folder) == "ppu" + 13 * "n"


def server_notebook(folder: Path, *outputs) -> dict:
    nb = executed(*outputs, start_time=(datetime.now(UTC) - timedelta(seconds=60)).isoformat())
    nbformat.write(nb, folder / "00_server.ipynb")
    return update_index(folder).rows[0]


def test_a_bring_up_has_its_verdict_in_the_index(tmp_path, monkeypatch):
    monkeypatch.setenv("HSNB_ROOT", str(make_project(tmp_path)))
    p = SimpleNamespace(run="demo")
    folder = tmp_path / "outputs" / "demo"
    rows = (preflight.Check("disk", "9 GiB", True), preflight.Check("port", "30000 is taken", False, "expected a free one"))
    session.note_server(p, preflight.Preflight(rows[:1]))
    assert server_notebook(folder, failure(ValueError("it died")))["verdict"] == "no server: preflight passed"
    checked = preflight.Preflight(rows)
    file = session.note_server(p, checked)
    assert (file, json.loads(file.read_text())["ok"]) == (folder / "server.json", False)
    assert server_notebook(folder)["verdict"] == "no server: preflight failed (port)"

    rank = SimpleNamespace(rank=0, tp_size=2, model_class="M", dtype="float32", boundaries=[2, 15], final="pre", counts={"failed": 0})
    server = SimpleNamespace(armed=[rank], attached=True, deployment=None, running=lambda: True)
    session.note_server(p, checked, server, verdict(server))  # attached to: this preflight was about another one
    assert server_notebook(folder)["verdict"] == "FAIL: ranks armed is 1 of 2"
    server.armed.append(rank)
    session.note_server(p, checked, server, verdict(server))
    assert server_notebook(folder)["verdict"] == "PASS: B_2, B_15 and final (pre) armed on 2 of 2 ranks"
    assert "PASS: B_2, B_15 and final (pre)" in (folder / "index.html").read_text()
    tree = json.loads(file.read_text())
    assert (tree["ok"], tree["preflight"]["ok"], len(tree["checks"])) == (True, False, 4)
    assert tree["armed"][1] == {"rank": 0, "model_class": "M", "dtype": "float32", "boundaries": [2, 15], "final": "pre"}


def test_every_figure_has_a_text_and_nbconvert_has_nothing_to_warn_of(tmp_path, caplog):
    said = new.new_output("display_data", data={"image/png": PIXEL}, metadata={"image/png": {"alt": "Norms <by> boundary", "width": 7}})
    nb = executed(said, new.new_output("display_data", data={"image/png": PIXEL}))
    with caplog.at_level("WARNING"):
        text = report.to_html(nb, tmp_path)
    assert "Alternative text" not in caplog.text
    assert re.findall(r'<img alt="([^"]*)"', text) == [
        "Norms &lt;by&gt; boundary",
        "Figure 2, under the heading “Extract `states`”".replace("`", ""),
    ]
    assert 'width="7"' in text


def test_long_words_of_a_table_break_where_they_are_joined_and_numbers_do_not(tmp_path):
    cells = "<td>/home/me/models/smollm2 &lt;x&gt;</td><td>at most 1e-05</td><td>SGLANG_HS_DUMP_BOUNDARIES</td><td>short_word</td>"
    nb = executed(new.new_output("display_data", data={"text/html": f"<table><tr>{cells}</tr></table><p>/home/me/models/smollm2</p>"}))
    text = report.to_html(nb, tmp_path).replace("<wbr/>", "|")
    assert re.findall(r"<td.*?>(.*?)</td>", text) == [
        "/home/|me/|models/|smollm2 &lt;x&gt;",
        'at most <span class="hsnb-whole">1e-05</span>',
        "SGLANG_|HS_|DUMP_|BOUNDARIES",
        "short_word",
    ]
    assert '<td class="hsnb-whole">short_word</td>' in text
    assert "<p>/home/me/models/smollm2</p>" in text


def test_a_figure_says_what_it_shows():
    ax = figures.lengths([3, 4, 500], max_length=512)
    figures.lengths([1, 2], ax=None)
    assert figures.alt_text(ax.figure) == "Sample lengths. x: tokens a sample; y: samples. Shown: all (n = 3, 507 tokens); max_length 512."


def test_a_run_that_is_not_there_is_refused_and_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HSNB_ROOT", str(make_project(tmp_path)))
    with pytest.raises(ParamsError, match=r"no run 'dmeo' .* expected one of: none yet"):
        report.report_run("dmeo")
    with pytest.raises(ParamsError, match=r"no run '\.\.'"):
        report.report_run("..")
    assert not list((tmp_path / "outputs").iterdir())


def test_durations():
    assert [duration(s) for s in (None, 3.14, 75.2, 3675)] == ["", "3.1 s", "1 min 15 s", "1 h 01 min"]


def test_progress_in_a_pipe_is_a_line_now_and_then_and_one_at_the_end(capsys, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress(100, unit="tokens", desc="shard 4") as p:
        assert p.eta_s is None
        for _ in range(25):
            clock[0] += 1
            p.advance(4, note="sample 7")
            if p.done == 48:
                assert (p.rate, p.eta_s) == (4.0, 13.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "shard 4: 40 of 100 tokens · 40 % · 4.00 tokens/s · 0:15 left · sample 7",
        "shard 4: 80 of 100 tokens · 80 % · 4.00 tokens/s · 0:05 left · sample 7",
        "shard 4: 100 of 100 tokens · 100 % · 4.00 tokens/s · took 0:25 · sample 7",
    ]


def test_the_rate_is_that_of_the_last_minute(capsys, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress(None, unit="samples") as p:
        for step in [100] + [1] * 120:
            clock[0] += step
            p.advance(10)
        assert 9.9 < p.rate <= 10.0
        assert p.eta_s is None
    assert p.rate == pytest.approx(1210 / 220)


def test_a_stopped_loop_shows_where_it_stopped(capsys):
    with pytest.raises(RuntimeError), Progress(10, unit="samples") as p:
        p.advance(3)
        raise RuntimeError
    assert "3 of 10 samples" in capsys.readouterr().err
    assert "stopped after 0:00" in str(p)


@pytest.mark.notebook
def test_a_loop_of_500_leaves_one_output_with_the_last_state():
    from nbclient import NotebookClient

    code = """import time
from hsnb.progress import Progress
with Progress(500, unit="tokens", desc="shard 4") as p:
    for i in range(500):
        p.advance(1, note=f"sample {i}")
        time.sleep(0.003)"""
    nb = new.new_notebook(cells=[new.new_code_cell(code)])
    start = time.monotonic()
    client = NotebookClient(nb, kernel_name="python3")
    updates = []
    process = client.process_message
    client.process_message = lambda msg, *a, **k: (updates.append(msg["msg_type"]), process(msg, *a, **k))[1]
    client.execute()
    seconds = time.monotonic() - start
    (output,) = nb.cells[0].outputs
    assert output.output_type == "display_data"
    text = output.data["text/plain"]
    assert text.startswith("shard 4: 500 of 500 tokens · 100 % ·")
    assert text.endswith("· sample 499")
    assert "500 of 500 tokens" in output.data["text/html"]
    assert 2 <= updates.count("update_display_data") <= 2 * seconds + 1


@pytest.mark.notebook
def test_a_figure_of_a_kernel_is_sharp_and_has_its_text(tmp_path):
    from nbclient import NotebookClient

    nb = new.new_notebook(cells=[new.new_code_cell("from hsnb import figures\nfigures.lengths([3, 4, 500], max_length=512);")])
    NotebookClient(nb, kernel_name="python3").execute()
    (output,) = nb.cells[0].outputs
    about = output.metadata["image/png"]
    assert about["alt"].startswith("Sample lengths. x: tokens a sample; y: samples.")
    pixels = int.from_bytes(base64.b64decode(output.data["image/png"])[16:20], "big")  # the PNG's width
    assert pixels == pytest.approx(2 * about["width"], rel=0.15)  # a tight box around the figure
    assert f'alt="{about["alt"]}"' in report.to_html(nb, tmp_path)


def test_results_show_themselves_without_colours_of_their_own(tmp_path):
    from hsnb.dumps.memory import MemoryDump
    from hsnb.shard import ShardResult

    result = ShardResult(tmp_path, 3, 16, 128, 20, 0, 900, 10**6, 0, 700, 2.0, failed={7: "lost"})
    assert figures.alt_text(result.plot().figure) == (
        "Shard 3 of 16. x: samples. Shown: done before (20); published by this run (107); owed (1)."
    )
    states = torch.ones(5, 3, 4)
    states[:, 1] = 2
    dump = MemoryDump(tmp_path / "d", torch.arange(5), states, (2, 4), "pre")
    ax = dump.plot()
    assert [line.get_ydata().tolist() for line in ax.lines] == [[2.0] * 5, [4.0] * 5, [2.0] * 5]
    assert [line.get_label() for line in ax.lines] == ["B_2 (n = 5)", "B_4 (n = 5)", "final (pre) (n = 5)"]
    for shown in (result._repr_html_(), dump._repr_html_()):
        assert not re.search(r"color|background", shown)  # JupyterLab's own, light or dark, stay readable
