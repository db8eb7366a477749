"""The step `drafter`: what a mistake in the states costs an EAGLE-3 drafter, served on this GPU beside what was predicted.

SmolLM2's own greedy answers and the states to train on are taken from a server here; three drafters are trained on them by the
real speculators code (on the CPU: the same few steps as in notebooks/04_handoff, in three processes at once), and each is served by
SGLang's own EAGLE3. The servers start together at the beginning; those with a drafter wait for its weights before they load it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu_drafter_plan import NAMES, Bench, Sizes, texts
from benchmarks.gpu_results import Figure, Table, figure
from hsnb.drafter.accept import Acceptance, accept
from hsnb.drafter.convert import Converted, convert
from hsnb.drafter.handoff import LATE_BAR, NORM_BAR
from hsnb.drafter.served import check_served, count, serve_with
from hsnb.drafter.serving import BARS
from hsnb.drafter.states import Sample, StatesFolder, choose, greedy_answers, take, write_table
from hsnb.drafter.teacher import RIGHT_BAR, teacher_top1
from hsnb.drafter.train import Driver, Training, train, trainers_python
from hsnb.server import Server
from hsnb.server.flags import sglang_version


def drafter(ctx) -> tuple[list[Figure], list[Table]]:
    """Take states, train three drafters on them, predict what each will be accepted, serve each, and compare."""
    work = Path(tempfile.mkdtemp(prefix="hsnb-drafters-"))
    bench = Bench(Sizes.of(ctx.plan.device), ctx.plan.device, ctx.fleet.limit_s, ctx.fleet.logs / "drafter", work, ctx.tell)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        pool = stack.enter_context(ThreadPoolExecutor(8))
        _find_trainers(work)
        capturing = pool.submit(Server.start, bench.deployment(), log_dir=bench.logs / "capture")
        stack.callback(_stop, capturing)
        samples, prompts = texts(bench)
        drivers = {name: stack.enter_context(Driver(bench.logs / f"{_slug(name)}-trainer.log")) for name in NAMES}
        untrained = _untrained(bench, samples, drivers, pool)
        serving: dict[str, Future] = {}
        stack.callback(_end, untrained, serving)
        for name in NAMES:
            time.sleep(0.5)  # so that each picks a free port for itself
            serving[name] = pool.submit(_serve, bench, untrained[name], name)
        bench.add("texts are there, and the servers are starting")
        server = capturing.result()
        bench.add(
            "the capturing server answers", figure("capturing server: time to ready", server.startup_seconds, "s", note="beside others")
        )
        training, held_out = _states(bench, server, samples, prompts)
        server.stop()
        trained = {n: pool.submit(_train, bench, n, training, drivers[n], untrained[n]) for n in NAMES}
        predicted = {n: _predicted(bench, trained[n].result(), n, untrained[n], held_out) for n in NAMES}
        bench.add("predicted", *_gaps(predicted))
        for name in NAMES:
            _count(bench, name, serving[name].result(), untrained[name], held_out, predicted[name])
    return bench.figures, bench.tables()


def _find_trainers(work: Path) -> None:
    """Where speculators is installed beside hsnb, let the trainings use this interpreter, without the GPU; else their own environment."""
    if importlib.util.find_spec("speculators") and "HSNB_TRAINERS" not in os.environ:
        python = work / "trainers" / "bin" / "python"
        python.parent.mkdir(parents=True)
        path = shlex.quote(os.environ.get("PYTHONPATH", ""))
        python.write_text(f'#!/bin/sh\nCUDA_VISIBLE_DEVICES= PYTHONPATH={path} exec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        os.environ["HSNB_TRAINERS"] = str(work / "trainers")
    trainers_python()


def _untrained(bench: Bench, samples: Sequence[Sample], drivers: dict[str, Driver], pool) -> dict[str, Converted]:
    """Return a folder a drafter with the config.json that it will have, and no weights yet; every trainer is imported by this."""
    write_table(bench.work / "texts", samples)
    (bench.work / "texts" / "hidden_states").mkdir()
    words = StatesFolder(bench.work / "texts", bench.served, "pre", bench.layers, bench.target)
    none = replace(bench.sizes.recipe, steps=0)

    def make(name: str) -> Converted:
        made = train(words, bench.work / f"{_slug(name)}-untrained", none, driver=drivers[name])
        converted = _convert(bench, made.path, bench.work / f"{_slug(name)}-served")
        (converted.path / "model.safetensors").unlink()
        return converted

    return dict(zip(NAMES, pool.map(make, NAMES), strict=True))


def _convert(bench: Bench, trained: Path, out: Path) -> Converted:
    return convert(trained, out, target=bench.target, sglang=sglang_version(), dtype=bench.sizes.dtype)


def _serve(bench: Bench, converted: Converted, name: str) -> Server:
    report = bench.work / f"{_slug(name)}-report"
    return serve_with(bench.deployment(), converted.flags(), report, wait_s=bench.limit_s, log_dir=bench.logs / _slug(name))


def _states(bench: Bench, server: Server, samples: Sequence[Sample], prompts: Sequence[Sequence[int]]) -> tuple[StatesFolder, StatesFolder]:
    """Return (states to train on, states of the server's greedy answers to `prompts`)."""
    before = time.monotonic()
    answers = greedy_answers(server, prompts, max_new_tokens=bench.sizes.answer)
    held_out, training = take(server, answers, bench.work / "held-out"), take(server, samples, bench.work / "training")
    top1 = teacher_top1(held_out)
    bench.add(
        "the states are there",
        figure("boundaries captured for all three", str(list(training.boundaries)), "boundaries"),
        figure("states to train on", training.tokens, "tokens", n=len(samples)),
        figure("greedy answers to judge by", sum(len(s.answer) for s in answers), "tokens", n=len(answers)),
        figure(
            "teacher top-1 on them", top1.right, "share", "at least", RIGHT_BAR if bench.sizes.dtype == "float32" else 0.95, n=top1.total
        ),
        figure("answers and states took", time.monotonic() - before, "s"),
    )
    return training, held_out


def _train(bench: Bench, name: str, states: StatesFolder, driver: Driver, waiting: Converted) -> Training:
    """Train on what `name` stores, told that it is right: that is the mistake. Then let the server that waits have the weights."""
    aux, normed = bench.stored(name)
    chosen = replace(choose(states, bench.work / f"{_slug(name)}-data", aux, normed=normed), boundaries=bench.served)
    trained = train(chosen, bench.work / f"{_slug(name)}-trained", bench.sizes.recipe, driver=driver)
    made = _convert(bench, trained.path, bench.work / f"{_slug(name)}-converted")
    if (made.path / "config.json").read_bytes() != (waiting.path / "config.json").read_bytes():
        raise ValueError(f"{name}: trained with another config.json than its server was started with")
    os.replace(made.path / "model.safetensors", waiting.path / "model.safetensors")
    return trained


def _predicted(bench: Bench, trained: Training, name: str, converted: Converted, held_out: StatesFolder) -> Acceptance:
    got = accept(converted.path, held_out, boundaries=bench.served, sglang=converted.sglang)
    bench.row(name, got)
    aux, normed = bench.stored(name)
    stored = f"trained on {list(aux)} and {'the normed final' if normed else 'the final'}, told {list(bench.served)} and the final"
    bench.add(
        f"{name}: trained and predicted",
        figure(f"{name}: tokens trained on, repeats counted", trained.tokens, "tokens", n=len(trained.losses), note=stored),
        figure(f"{name}: training took", trained.seconds, "s", note=f"speculators {_speculators()}, on the CPU"),
        figure(f"{name}: last loss", trained.last_loss, "nats"),
        figure(f"{name}: position 0, predicted", got.at_position[0], "share"),
        figure(f"{name}: accept length, predicted", got.accept_length, "tokens/verification", n=got.verifications),
    )
    return got


def _gaps(predicted: dict[str, Acceptance]) -> list[Figure]:
    """Return what each mistake costs at position 0; a rehearsal trains too little for the bars to say anything."""
    first = {name: a.at_position[0] for name, a in predicted.items()}
    return [
        figure("position 0, right less wrong norm", first["right"] - first["wrong norm"], "share", "at least", NORM_BAR),
        figure("position 0, right less one late", first["right"] - first["one late"], "share", "at least", LATE_BAR),
    ]


def _count(bench: Bench, name: str, server: Server, converted: Converted, held_out: StatesFolder, predicted: Acceptance) -> None:
    """Read back what the server feeds its drafter, and count what it accepts."""
    checks = check_served(bench.work / f"{_slug(name)}-report", converted.path, converted.boundaries)
    fed, off = checks[0], [c.name for c in checks if not c.ok]
    got, same = count(server, held_out, in_flight=len(held_out.rows))
    bench.row(name, got)
    error = abs(predicted.accept_length - got.accept_length) / got.accept_length
    bench.add(
        f"{name}: served",
        figure(f"{name}: boundaries fed, read back", fed.value, "boundaries", "equal to", str(list(bench.served))),
        figure(
            f"{name}: drafter's options and weights not as in its folder",
            len(off),
            "checks",
            "equal to",
            0,
            n=len(checks),
            note=", ".join(off),
        ),
        figure(f"{name}: accept length, served", got.accept_length, "tokens/verification", n=got.verifications),
        figure(f"{name}: predicted against served", error, "relative", "at most", BARS[bench.sizes.dtype]),
        figure(f"{name}: answers equal to those without a drafter", same, "answers", n=got.samples, note="ties flip in half precision"),
    )


def _speculators() -> str:
    return version("speculators") if importlib.util.find_spec("speculators") else "of its own environment"


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _stop(starting: Future) -> None:
    """Stop a server once its start has ended; one that failed has nothing to stop, one that was stopped is left alone."""
    if not starting.exception():
        starting.result().stop()


def _end(waiting: dict[str, Converted], serving: dict[str, Future]) -> None:
    """Stop the servers with a drafter; one that still waits for its weights gets an empty file, which ends it."""
    for converted in waiting.values():
        (converted.path / "model.safetensors").touch()
    for starting in serving.values():
        _stop(starting)
