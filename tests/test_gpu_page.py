"""The page of GPU results: rendered from its JSON and from nothing else, and the JSON is what the schema says."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks import gpu, gpu_site
from benchmarks.gpu_results import PUBLISHED, Figure, Results, Run, Step, Table, card_key, figure, without_paths
from benchmarks.gpu_speed import figures as speed_figures
from benchmarks.render_gpu import page, show_value
from benchmarks.speed_load import batch_ms
from benchmarks.speed_results import Load, Turn
from benchmarks.speed_results import Run as SpeedRun

PAGE = PUBLISHED.with_suffix(".md")


def made_up() -> Results:
    steps = {
        "probe": Step(
            title="The probe",
            state="off",
            date="2025-01-01T00:00:00+00:00",
            seconds=12.3,
            figures=[
                figure("mean error", 0.00123456789, "nats", "at most", 0.05, n=3000),
                figure("margin", 3.25, "ratio", "at least", 8.0),
                figure("verdict", "PASS", "verdict", "equal to", "PASS"),
                figure("prefill", 70123.4, "tokens/s", note="32 prompts"),
                figure("never finite", float("nan"), "relative L2", "at most", 1.0),
            ],
            tables=[Table(title="by boundary", columns=["state", "median"], units=["", "relative L2"], rows=[["B_2", 0.0125], ["a|b", 7]])],
        ),
        "speed": Step(title="Speed", state="failed", date="2025-01-01T00:00:00+00:00", seconds=1.0, error="ServerError: out of memory"),
    }
    about = {
        "date": "2025-01-01T00:00:00+00:00",
        "memory_mib": 143771,
        "driver": "580.1",
        "device": "cuda",
        "versions": {"sglang": "0.5.17"},
    }
    return Results(
        runs={
            "h200": Run(card="NVIDIA H200", gpus=1, steps=steps, **about),
            "h200x2": Run(card="NVIDIA H200", gpus=2, steps={"probe": steps["probe"]}, **about),
        }
    )


def test_every_figure_of_the_json_is_in_the_page_with_its_unit_and_bar():
    text = page(made_up())
    for run in made_up().runs.values():
        assert f"{run.gpus} x {run.card}" in text and run.driver in text
        for step in run.steps.values():
            assert step.title in text and step.error in text
            for f in step.figures:
                (line,) = {line for line in text.splitlines() if line.startswith(f"| {f.name}")}
                assert f"| {show_value(f.value)} | {f.unit} |" in line
                assert line.endswith("|  |" if not f.rule else "| pass |" if f.ok else "| OFF |")
            for table in step.tables:
                assert all(show_value(v).replace("|", "\\|") in text for row in table.rows for v in row)
    assert "| mean error | 0.00123 | nats | 3,000 | at most 0.05 | pass |" in text
    assert "| margin | 3.25 | ratio |  | at least 8 | OFF |" in text
    assert "| never finite | NaN | relative L2 |  | at most 1 | OFF |" in text
    assert "FAILED: ServerError: out of memory" in text


def test_the_page_changes_with_every_figure():
    tree = json.loads(made_up().model_dump_json())
    whole = page(Results.model_validate(tree))
    for n, _ in enumerate(tree["runs"]["h200"]["steps"]["probe"]["figures"]):
        other = json.loads(json.dumps(tree))
        other["runs"]["h200"]["steps"]["probe"]["figures"][n]["value"] = 123
        assert page(Results.model_validate(other)) != whole


def test_the_file_is_read_back_as_it_was_written(tmp_path):
    file = tmp_path / "gpu-results.json"
    made_up().write(file)
    assert Results.read(file) == made_up()
    assert "NaN" not in file.read_text().replace('"NaN"', "")
    assert Results.read(tmp_path / "none.json") == Results()


@pytest.mark.parametrize(
    ("where", "value"),
    [("card", None), ("surprise", 1), ("steps", {"x": {"title": "x"}}), ("device", "tpu")],
)
def test_a_file_of_another_schema_is_refused(where, value):
    tree = json.loads(made_up().model_dump_json())
    tree["runs"]["h200"][where] = value
    with pytest.raises(ValidationError, match=where):
        Results.model_validate(tree)


def test_a_figure_without_a_unit_is_refused():
    with pytest.raises(ValidationError, match="unit"):
        Figure(name="x", value=1, unit="")


def test_a_rehearsal_is_not_published():
    run = made_up().runs["h200"].model_copy(update={"device": "cpu"})
    with pytest.raises(ValueError, match="make gpu"):
        page(Results(runs={"rehearsal": run}))
    with pytest.raises(ValueError, match="make gpu"):
        page(Results())


def test_runs_of_two_machines_share_a_file_and_a_new_run_replaces_its_own():
    old, new = made_up(), made_up().runs["h200"].model_copy(update={"driver": "999"})
    merged = old.merged(Results(runs={"h200": new}))
    assert merged.runs["h200"].driver == "999" and merged.runs["h200x2"] == old.runs["h200x2"]
    step = new.steps["speed"].model_copy(update={"state": "ok", "error": ""})
    assert list(old.with_step("h200", new, "speed", step).runs["h200"].steps) == ["probe", "speed"]
    both = old.with_step("h200", new, "drafter", step)  # what is not part of a whole run outlives the next one
    assert list(both.begun_again("h200", but=gpu.ON_REQUEST).runs["h200"].steps) == ["drafter"]
    assert "h200" not in old.begun_again("h200", but=gpu.ON_REQUEST).runs and old.begun_again("b300", but=()) == old


def test_cards_have_short_keys():
    assert card_key("NVIDIA H200", 1) == "h200"
    assert card_key("NVIDIA H200", 2) == "h200x2"
    assert card_key("NVIDIA GeForce RTX 4090", 1) == "rtx-4090"
    assert card_key("NVIDIA RTX PRO 6000 Blackwell Server Edition", 8) == "rtx-pro-6000-blackwell-server-editionx8"


def test_errors_lose_the_paths_of_their_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HSNB_CACHE", "/data/cache")
    said = f"no {gpu_site.ROOT}/hsnb/x.py, /tmp/abc/server.log nor /data/cache/models/k"
    text = without_paths(f"{said} at http://127.0.0.1:3/health\nsee /home/someone/site/torch.py:7")
    assert text == "no (hsnb)/hsnb/x.py, (path) nor (cache)/models/k at http://127.0.0.1:3/health see (path):7"


def test_a_site_folder_makes_the_plug_in_findable(tmp_path):
    info = gpu_site.prepare(tmp_path)
    assert gpu_site.prepare(tmp_path) == info  # again, over what is there
    code = (
        "import importlib.metadata as m; (p,) = m.entry_points(group='sglang.srt.plugins'); print(p.name, p.load(), m.version('hsnb'));"
        "import hsnb; print(hsnb.__file__)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"}
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=env, check=True, cwd=tmp_path)
    first, second = done.stdout.splitlines()
    assert first.startswith("hsnb <function register") and first.endswith(info.name.removeprefix("hsnb-").removesuffix(".dist-info"))
    assert second.startswith(str(tmp_path))


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="no GPU run is published yet")
def test_the_published_page_is_what_its_json_gives():
    assert PAGE.read_text() == page(Results.read(PUBLISHED))
    assert str(Path.home()) not in PUBLISHED.read_text() and str(gpu_site.ROOT) not in PUBLISHED.read_text()


class _Fake:
    """Stands for a server: Server.start fails as often as `failures` says for a name."""

    startup_seconds = 1.0

    def __init__(self, name):
        self.name, self.stopped = name, False

    def stop(self):
        self.stopped = True


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    from benchmarks import gpu_servers
    from hsnb.errors import ServerError

    failures: dict[str, int] = {}

    def start(name, **options):
        if failures.get(name, 0):
            failures[name] -= 1
            raise ServerError(got="no memory", expected="some", likely="others", next="wait")
        return _Fake(name)

    plan = dataclasses.replace(gpu_servers.Plan.gpu(1), device="cpu")
    monkeypatch.setattr(gpu_servers.Plan, "deployment", lambda self, name, limit_s: name)
    monkeypatch.setattr(gpu_servers.Server, "start", start)
    monkeypatch.setattr(gpu_servers.time, "sleep", lambda s: None)
    made = gpu_servers.Fleet(plan, tmp_path)
    made.failures = failures
    return made


def test_a_start_that_fails_beside_others_is_tried_once_more(fleet):
    from hsnb.errors import ServerError

    fleet.failures.update({"llama float16": 1, "deepseek off": 5})
    fleet.begin()
    assert fleet.get("llama float16").name == "llama float16"
    for _ in range(3):
        with pytest.raises(ServerError, match="no memory"):
            fleet.get("deepseek off")
    wide, deepseek = fleet.get("deepseek wide"), fleet.get("deepseek")
    fleet.stop_all(but=("deepseek wide",))
    assert deepseek.stopped and not wide.stopped
    fleet.stop_all()
    assert wide.stopped
    assert [len(fleet.tries[n]) for n in ("deepseek", "deepseek off", "llama float16")] == [1, 2, 2]
    step = gpu.started(fleet)
    assert step.state == "off" and [f.name for f in step.figures if not f.ok] == ["deepseek off, start 2"]
    assert next(f.note for f in step.figures if f.name == "llama float16").startswith("ServerError: no memory")


def test_a_step_that_fails_is_recorded_and_so_is_one_that_had_no_time(capsys):
    def broken():
        raise RuntimeError(f"no kernel in {gpu_site.ROOT}/x.so")

    failed, late = gpu.guarded("A", broken, 10.0), gpu.guarded("B", broken, 0.0)
    assert (failed.state, failed.error) == ("failed", "RuntimeError: no kernel in (hsnb)/x.so")
    assert (late.state, late.error) == ("skipped", "the time was out")
    assert gpu.guarded("C", lambda: ([figure("x", 2, "ms", "at most", 1)], []), 1.0).state == "off"
    assert gpu.guarded("D", lambda: ([figure("x", 2, "ms")], []), 1.0).state == "ok"


def test_a_load_that_was_cut_takes_no_whole_ones_place_and_an_older_one_says_what_it_is_of():
    turn = Turn(tokens=10, answered_s=1.0, published_s=2.0, cpu_s=1.0, drained_s=4.0)
    slow = turn.model_copy(update={"drained_s": 8.0})

    def load(turns: int, source: str, captured: Turn = turn) -> Load:
        return Load(
            prompts="p",
            token_bytes=2,
            plain=[turn] * turns,
            captured=[captured] * turns,
            ring_full_ms=0,
            memory_growth_mib=0.0,
            source=source,
        )

    run = SpeedRun(date="d", device="cuda", card="c", cores=1, versions={"hsnb source": "new"}, ceilings={"disk": 2.0})
    (carried,) = run.with_load("x", load(1, "").model_copy(update={"alone_s": [1.0]})).carried().values()
    assert (carried.date, carried.source, carried.ceilings) == ("d", "new", {"disk": 2.0})
    assert run.with_load("x", load(1, "old")).carried()["x"].source == "old"
    run = run.with_load("long to memory", load(9, "old")).with_load("short to memory", load(9, "old"))
    run = run.with_load("long to memory", load(5, "new", slow))
    assert run.loads["long to memory"].turns == 5, "another source: the old one says nothing of this one"
    assert run.with_load("long to memory", load(4, "new")) == run
    assert run.with_load("long to memory", load(5, "new")).loads["long to memory"].ratios("whole") == [1.0] * 5
    notes = {f.name: f.note for f in speed_figures(run) if f.name.endswith("ratio")}
    assert notes == {"long.ratio": "0.50 to 0.50", "short.ratio": "1.00 to 1.00, hsnb source old"}


def test_the_time_of_a_batch_is_read_from_the_servers_log():
    """Lines of SGLang 0.5.17; the speed in one is of the tokens in the one before."""
    line = "[2026-12-01 01:34:39] Prefill batch, #new-seq: 4, #new-token: {}, #cached-token: 0, token usage: 0.06, input throughput (token/s): {}"
    lines = [(8192, 18097.96), (8192, 81920.0), (4096, 40960.0), (8192, 20480.0)]
    assert batch_ms("\n".join(line.format(*n) for n in lines)) == 200.0, "of 100, 200 and 200 ms"
    assert batch_ms(line.format(8192, 0.0)) is None and batch_ms("") is None
