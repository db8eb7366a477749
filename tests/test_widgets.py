"""The explorers without a browser: what they show for each choice, and how fast they open."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.explorers import Opened, write_samples
from hsnb import widgets
from hsnb.errors import DumpError
from hsnb.health import examine
from hsnb.ledger import Ledger
from hsnb.table import INDEX
from hsnb.widgets import browser
from hsnb.widgets.extraction import Seen, frame
from hsnb.widgets.samples import Samples
from tests.test_health import good, write_folder
from tests.test_ledger import entry

RECORD = {
    "comparison": {
        "a": "SGLang", "b": "vLLM", "dtype": "float32",
        "map": {"rows": ["B_0", "B_1"], "columns": ["id 0", "id 1", "id 2"], "relative_l2": [[1e-7, 1.0, 1.2], [1.0, 0.5, 1e-6]]},
        "boundaries": [{"number": k, "error": 1e-7, "low": 1e-8, "high": 1e-6, "first": 0.0, "noise": 1e-6, "half_noise": None, "shift": 0.4} for k in (0, 1)],
        "tokens": [{"prompt": "p", "position": k, "token": "x", "relative_l2": 1e-6, "largest": 1e-5, "norm_over_median": 20.0 - k} for k in range(12)],
    },
    "own_map": {"a": "SGLang", "b": "vLLM", "rows": ["id 1"], "columns": ["id 1", "id 2"], "relative_l2": [[0.7, 1e-6]], "tokens": 9},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("widgets") / "data"
    path.mkdir()
    write_folder(path, good(6))
    return path


def alts(explorer) -> list[str]:
    return re.findall(r'<img alt="([^"]*)"', explorer.html)


def test_the_browser_shows_what_is_chosen(folder):
    explorer = widgets.dumps(folder)
    controls = explorer.controls
    assert [name for name, _ in controls["boundary"].options] == ["B_2", "B_4", "B_6", "final (pre)"]
    assert controls["sample"].max == 5
    assert alts(explorer) == ["Norm by token, B_2. x: position (token); y: norm of the row. Shown: B_2 (n = 24)."]
    before = explorer.html
    controls["boundary"].value = 3
    assert explorer.html != before
    assert "Norm by token, final (pre)" in alts(explorer)[0]
    controls["sample"].value = 2
    controls["tokens"].value = (4, 9)
    assert "(n = 6)" in alts(explorer)[0]
    controls["view"].value = "neighbours"
    assert alts(explorer)[0].startswith("Cosine of each token with each other, final (pre) (n = 6).")
    controls["view"].value = "text"
    assert "<ins>⟦" in explorer.html
    controls["tokens"].value = (0, 23)
    controls["view"].value = "largest values"
    first = re.search(r"<tbody>\s*<tr>(.*?)</tr>", explorer.html, re.S)[1]
    assert re.findall(r"<td[^>]*>(.*?)</td>", first)[0::2][:2] == ["0", "5"]  # position and dimension of the massive activation


def test_the_tokens_end_at_the_chosen_samples_last_one(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.mkdir()
    write_folder(path, [good(1, tokens)[0] for tokens in (24, 9, 700, 1, 5)])
    (path / "hidden_states" / "hs_4.safetensors").write_bytes(b"half")
    explorer, drawn = widgets.dumps(path), []
    sample, slider = explorer.controls["sample"], explorer.controls["tokens"]
    monkeypatch.setattr(explorer, "_draw", lambda real=explorer._draw, **chosen: drawn.append(chosen["tokens"]) or real(**chosen))
    seen = [(slider.max, slider.value)]
    for row in (1, 2, 3, 2):
        sample.value = row
        seen.append((slider.max, slider.value))
    assert seen == [(23, (0, 23)), (8, (0, 8)), (699, (0, 511)), (0, (0, 0)), (699, (0, 511))]
    assert drawn == [value for _, value in seen[1:]]  # each choice is one picture
    slider.value = (100, 200)
    sample.value = 0
    assert (slider.max, slider.value) == (23, (23, 23))
    assert "(n = 1)" in alts(explorer)[0]
    sample.value = 4
    assert (slider.max, slider.value) == (23, (23, 23))
    assert "This cannot be shown:" in explorer.html and "hs_4.safetensors" in explorer.html


def test_cosines_are_those_of_torch():
    states = torch.randn(5, 8)
    expected = torch.cosine_similarity(states[:, None], states[None], dim=-1)
    assert torch.allclose(browser.cosines(states), expected, atol=1e-6)


def test_a_folder_of_100000_samples_is_opened_by_its_index(tmp_path):
    """A handful of files and no listing, whatever the number of samples; benchmarks/explorers.py has the seconds."""
    path = write_samples(tmp_path / "d", 100_000, files=3)
    opened = Opened(path).start()
    explorer = widgets.dumps(path)
    names = [Path(file).name for file in opened.files]
    opened.on = False
    assert opened.listed == []
    assert len(names) <= 8, names
    assert {n for n in names if n.startswith("hs_")} <= {"hs_0.safetensors"}
    assert explorer.controls["sample"].max == 99_999
    assert len(alts(explorer)) == 1
    opened.start()
    explorer.controls["sample"].value = 99_999
    opened.on = False
    assert len(opened.files) <= 4 and opened.listed == []
    assert "hs_99999.safetensors: no such file" in explorer.html
    assert "<dt>Next</dt><dd>hsnb redo" in explorer.html


def test_a_skipped_row_is_no_sample(tmp_path):
    path = write_samples(tmp_path / "d", 4)
    pq.write_table(pa.table({"length": [24] * 4, "masked": [12] * 4, "ok": np.arange(4) != 1}), path / INDEX)
    assert widgets.dumps(path).controls["sample"].max == 2
    assert Samples(path).name(1) == "hidden_states/hs_2.safetensors"


def test_the_health_explorer_has_the_figures_of_the_page(folder):
    result = examine(folder)
    explorer = widgets.health(result)
    assert "<b>PASS</b>" in explorer.html
    seen = {}
    for view in explorer.controls["view"].options:
        explorer.controls["view"].value = view
        seen[view] = explorer.html
    assert len(set(seen.values())) == 6
    assert [view for view, html in seen.items() if "<img" in html] == ["norms", "lengths", "loss mask"]


def test_the_divergence_explorer_reads_what_a_run_saved(tmp_path):
    (tmp_path / "divergence.json").write_text(json.dumps(RECORD))
    explorer = widgets.divergence(tmp_path)
    assert explorer.controls["pair"].options == ("through hsnb", "each by its own setting")
    explorer.controls["view"].value = "one boundary"
    explorer.controls["boundary"].value = "B_1"
    assert "best fit: id 2" in alts(explorer)[0]
    for view, words in (("map", "relative L2"), ("positions", "Where the two differ"), ("numerics and shift", "n = 11 tokens")):
        explorer.controls["view"].value = view
        assert words in alts(explorer)[0]
    explorer.controls["view"].value = "one boundary"
    explorer.controls["pair"].value = explorer.controls["pair"].options[1]
    assert "B_1 is not in this pair; it has id 1." in explorer.html
    with pytest.raises(DumpError, match="expected a comparison that 02_divergence saved"):
        widgets.divergence(tmp_path / "nowhere")


def running(data: Path, state: str = "running", done: int = 3) -> None:
    """Write what an extraction writes: a status file and a ledger."""
    (data / "ledger").mkdir(parents=True, exist_ok=True)
    server = {
        "url": "http://127.0.0.1:1",
        "published": done,
        "requests": 9,
        "restarts": 0,
        "canaries": 1,
        "paused": "",
        "idle_s": 0.0,
        "error": "",
    }
    status = {
        "state": state, "reason": "", "samples": 8, "published": done, "owed": 1, "tokens_left": 500, "tokens_per_s": 12.5, "eta_s": 3725,
        "disk": "disk full in 3 h", "servers": [server], "updated": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    (data / "ledger" / "shard-0000-of-0016.status.json").write_text(json.dumps(status))
    with Ledger(data / "ledger" / "shard-0000-of-0016.sqlite", {}) as ledger:
        ledger.enter([entry(k, tokens=100, bytes=5_000_000) for k in range(done)])


def test_the_monitor_follows_a_run_that_another_process_writes(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("hsnb.widgets.extraction.time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def look():
        running(tmp_path)
        explorer = widgets.monitor(tmp_path, seconds=0.05, quiet=60.0)
        first = explorer.html
        assert "<img" not in first and "tokens/s in the last minute" not in first  # one look is neither a curve nor a rate
        running(tmp_path, "running", 5)
        for _ in range(100):
            await asyncio.sleep(0.05)
            if explorer.html != first and "5 samples" in explorer.html:
                break
        later = explorer.html
        running(tmp_path, "whole", 5)
        await asyncio.sleep(0.3)
        assert not explorer._task.done()  # between two shards nothing runs
        running(tmp_path, "whole", 8)
        clock[0] += 61
        await asyncio.wait_for(explorer._task, 20)
        assert "8 samples" in explorer.html
        running(tmp_path, "done", 7)
        explorer.again.click()
        return first, later, explorer.html

    first, later, last = asyncio.run(look())
    assert "3 samples, 300 tokens, 0.01 GB published" in first
    assert "disk full in 3 h" in first
    assert "1:02 h" in first and ">0 of 16<" in first
    assert "5 samples, 500 tokens" in later and "tokens/s in the last minute" in later
    assert "Tokens published." in re.search(r'<img alt="([^"]*)"', later)[1]
    assert "8 samples, 800 tokens" in last and "7 of 8" in last


def test_the_monitor_shows_why_a_ledger_cannot_be_read(tmp_path):
    running(tmp_path)
    (tmp_path / "ledger" / "shard-0000-of-0016.sqlite").write_bytes(b"no database" * 100)
    explorer = widgets.monitor(tmp_path)
    assert "shard-0000-of-0016.sqlite: file is not a database" in explorer.html
    assert "<dt>Next</dt><dd>move it away: its samples are then extracted again" in explorer.html


def test_the_monitors_rate_and_what_is_elsewhere(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("hsnb.widgets.extraction.time.monotonic", lambda: clock[0])
    seen = Seen()
    assert seen.add(1000) == 0.0
    clock[0] += 10
    assert seen.add(1500) == 50.0
    clock[0] += 100
    assert seen.add(1500) == 0.0  # of the last minute only
    server = {"url": "http://h:1", "error": "lost"}
    status = {
        "name": "s", "state": "running", "published": 1, "samples": 2, "owed": 0, "tokens_per_s": 0.0, "eta_s": None, "servers": [server],
        "reason": "", "disk": "", "updated": "",
    }  # fmt: skip
    (row,) = frame([status], spool_bytes=lambda url: None).to_dict("records")
    assert (row["left"], row["in the spool"], row["told"]) == ("–", "elsewhere", "lost")
    (row,) = frame([status | {"state": "whole", "eta_s": 0, "servers": [server | {"error": ""}]}]).to_dict("records")
    assert (row["left"], row["in the spool"], row["told"]) == ("–", "–", "–")  # it has ended: nothing is left, and no server asked for
