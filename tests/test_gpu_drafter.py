"""The GPU run's step `drafter`, without servers: what it stores for each drafter, what it keeps when it is cut, and how a server waits."""

import threading
import types

import pytest

from benchmarks import gpu, gpu_drafter, gpu_drafter_plan
from benchmarks.gpu_checks import Context
from benchmarks.gpu_results import Results, Run, Step, figure
from benchmarks.gpu_servers import Plan
from benchmarks.render_gpu import page
from hsnb.drafter.accept import Acceptance
from hsnb.drafter.inside import _wait_for_weights
from tests.drafter_files import make_target

GAPS = {"right": 0.30, "one late": 0.20, "wrong norm": 0.10}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    target = make_target(tmp_path / "target")
    monkeypatch.setattr(gpu_drafter_plan, "model_folder", lambda name: target)
    told = []
    made = gpu_drafter_plan.Bench(
        gpu_drafter_plan.Sizes.of("cuda"), "cuda", 100.0, tmp_path, tmp_path, lambda figures, tables: told.append((list(figures), tables))
    )
    made.told = told
    return made


def accepted(share, served=False):
    hits = round(1000 * share)
    return Acceptance((1000 - hits, hits, 0, 0), 24, 99, (1, 5, 7), () if served else (share, 0.0, 0.0), served=served)


def test_the_step_runs_only_when_it_is_named():
    assert "drafter" in gpu.steps(Plan.gpu(1)) and "drafter" in gpu.ON_REQUEST
    assert "drafter" not in gpu.steps(Plan.gpu(2))


def test_each_drafter_is_trained_on_its_mistake_and_served_the_same(bench):
    layers = bench.served[-1] + 1
    assert bench.stored("right") == (bench.served, False) and bench.stored("wrong norm") == (bench.served, True)
    assert bench.stored("one late") == (tuple(b + 1 for b in bench.served), False)
    captured = bench.deployment().capture
    assert captured.final == "pre" and captured.boundaries == sorted({*bench.served, *(b + 1 for b in bench.served)})
    assert captured.boundaries[-1] == layers  # B_L is what one late takes for the last


def test_what_a_mistake_costs_is_judged(bench):
    norm, late = gpu_drafter._gaps({name: accepted(share) for name, share in GAPS.items()})
    assert (norm.value, norm.rule, norm.bar, norm.ok) == (0.2, "at least", 0.10, True)
    assert (late.value, late.bar, late.ok) == (0.1, 0.04, True)
    assert not gpu_drafter._gaps({**{name: accepted(0.3) for name in GAPS}})[0].ok


def test_the_page_has_predicted_beside_served(bench):
    for name, share in GAPS.items():
        bench.row(name, accepted(share))
        bench.row(name, accepted(share + 0.01, served=True))
    bench.add("served", figure("right: accept length, served", 1.31, "tokens/verification", n=1000))
    (figures, tables), *_ = bench.told
    step = Step(title="Drafters", state="ok", date="2025-01-01T00:00:00+00:00", seconds=1, figures=figures, tables=tables)
    about = {"date": "x", "memory_mib": 1, "driver": "1", "device": "cuda", "versions": {}}
    text = page(Results(runs={"h200": Run(card="NVIDIA H200", gpus=1, steps={"drafter": step}, **about)}))
    assert "| right | predicted | 1.3 | 1,000 | 700 | 300 | 0 | 0 | 0.3 | 0 | 0 |" in text
    assert "| wrong norm | served | 1.11 | 1,000 | 890 | 110 | 0 | 0 | 0.11 | 0 | 0 |" in text
    assert "| right: accept length, served | 1.31 | tokens/verification | 1,000 |" in text


def test_a_step_that_is_cut_or_fails_has_what_it_found(tmp_path):
    kept = []
    context = Context(Plan.tiny(1), None, keep=lambda figures, tables: kept.append(figures))

    def breaks():
        context.tell([figure("a", 1, "s")], [])
        raise RuntimeError("no more")

    step = gpu.guarded("A", breaks, 10.0, context.take_found)
    assert (step.state, step.error, [f.name for f in step.figures]) == ("failed", "RuntimeError: no more", ["a"])
    assert [[f.name for f in figures] for figures in kept] == [["a"]] and context.take_found() == ([], [])
    seen = []
    gpu.so_far(lambda name, step, quiet: seen.append((name, step, quiet)), "drafter", "A", 0.0, tmp_path, tmp_path, step.figures, [])
    (name, cut, quiet), *_ = seen
    assert (name, cut.state, cut.error, quiet) == ("drafter", "failed", "cut before its end", True) and cut.figures == step.figures


def runner(folder, draft=True):
    return types.SimpleNamespace(is_draft_worker=draft, model_config=types.SimpleNamespace(model_path=str(folder)))


def test_a_server_waits_for_its_drafters_weights(tmp_path):
    _wait_for_weights(runner(tmp_path, draft=False), 0.0)  # the target is not waited for
    with pytest.raises(TimeoutError, match="SGLANG_HS_DRAFTER_WAIT"):
        _wait_for_weights(runner(tmp_path), 0.2)
    waiting = threading.Thread(target=_wait_for_weights, args=(runner(tmp_path), 30.0))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    (tmp_path / "model.safetensors").touch()
    waiting.join(5)
    assert not waiting.is_alive()
