"""What the capture does to the forward, without a model: when its memory is overwritten, and what its thread and its small calls lose."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.gpu_checks import Context, Found
from benchmarks.gpu_results import Figure, Table, figure, plain
from benchmarks.parts import Req
from hsnb.dumps import list_dumps, open_dump
from hsnb.patch.armed import Armed, ArmedFile
from hsnb.patch.bodies import Body
from hsnb.patch.capture import Capture
from hsnb.patch.settings import Settings

PROMPTS, TOKENS, BATCHES, OPS, TURNS = 4, 2048, 12, 400, 15
BOUNDARIES = (0, 1, 2)
COLUMNS = (*BOUNDARIES, "final")


def kept(ctx: Context) -> Found:
    """Hand batches over and overwrite their memory at once, as a model's next batch does; time small calls while a copy is on its way."""
    device = ctx.plan.device
    hidden = 7168 if device == "cuda" else 8
    wrong = _wrong(device, hidden, lambda capture: None)
    figures = [figure("dumps with rows of a later batch", wrong, "dumps", "equal to", 0, n=PROMPTS * BATCHES)]
    if device == "cuda":
        bad = _wrong(device, hidden, _forget)
        figures.append(figure("the same, when what is copied from is not kept", bad, "dumps", "at least", 1, n=PROMPTS * BATCHES))
        ways = {"no copy": None, "kept until it is copied": lambda capture: None, "record_stream, in place of that": _record}
        with _captures(device, hidden, ways) as captures:
            taken = {way: [] for way in ways}
            for turn in range(TURNS + 1):
                for way, capture in captures.items():
                    us = _small_calls(capture, device, hidden)
                    if turn:
                        taken[way].append(us)
        figures += [
            figure(f"a small call of torch, {way}", statistics.median(us), "us", n=TURNS, note=f"{min(us):.1f} to {max(us):.1f}")
            for way, us in taken.items()
        ]
    own, table = _own(device, hidden)
    if device == "cuda":
        torch.cuda.empty_cache()
    return [*figures, *own], [table]


def _own(device: str, hidden: int) -> tuple[list[Figure], Table]:
    """Return the milliseconds of the forward's thread for a batch of few and of many prompts, and what it spends those of the few on."""
    figures, spent, a = [], {}, torch.ones(64, device=device)
    with _captures(device, hidden, {"": lambda capture: None}) as captures:
        capture = captures[""]
        for prompts, tokens, watched in ((PROMPTS, TOKENS, False), (64, 128, False), (PROMPTS, TOKENS, True)):
            taken = []
            if watched:
                _watch(capture, spent)
            for turn in range(TURNS + 1):
                batch = _batch(device, hidden, 0, prompts, tokens)
                for _ in range(2000):  # between two batches a model has other code and other data in the processor's caches
                    torch.add(a, a)
                began = time.perf_counter()
                _take(capture, *batch)
                if turn:
                    taken.append((time.perf_counter() - began) * 1e3)
                del batch
                capture.writer.settle()
                for path in list_dumps(capture.settings.spool):
                    path.unlink()
            if not watched:
                name, spread = f"the forward's own time for a batch of {prompts} prompts", f"{min(taken):.2f} to {max(taken):.2f}"
                figures.append(figure(name, statistics.median(taken), "ms", n=TURNS, note=spread))
    rows = [[name, plain(len(ms) / (TURNS + 1)), plain(statistics.median(ms)), plain(max(ms))] for name, ms in spent.items() if ms]
    columns, units = ["call, with those in it", "times a batch", "median", "longest"], ["", "", "ms", "ms"]
    return figures, Table(title=f"What the forward's thread does for {PROMPTS} prompts", columns=columns, units=units, rows=rows)


def _watch(capture: Capture, spent: dict[str, list[float]]) -> None:
    """Time calls by hand: from Python 3.12 on a profiler watches every thread."""
    writer = capture.writer
    watched = {capture: ("note_lengths", "wanted", "store", "file_of"), writer: ("follow", "add", "_copy"), writer.ring: ("take", "view")}
    for owner, names in watched.items():
        for name in names:
            setattr(owner, name, _timed(getattr(owner, name), spent.setdefault(name, [])))


def _timed(call, taken: list[float]):
    def timed(*args):
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            taken.append((time.perf_counter() - began) * 1e3)

    return timed


def _wrong(device: str, hidden: int, change) -> int:
    """Return how many dumps do not hold their own batch's numbers."""
    with _captures(device, hidden, {"": change}) as captures:
        capture = captures[""]
        for batch in range(BATCHES):
            _hand_over(capture, device, hidden, batch)
            for _ in range(4):  # the next batch's states, which the allocator gives what is free
                torch.full((PROMPTS * TOKENS, len(COLUMNS), hidden), -1.0, dtype=torch.bfloat16, device=device)
        capture.writer.settle()
        dumps = [open_dump(path) for path in list_dumps(capture.settings.spool)]
        if len(dumps) != PROMPTS * BATCHES:
            raise RuntimeError(f"{len(dumps)} dumps, expected {PROMPTS * BATCHES}: {capture.armed.armed.failures}")
        return sum(not _right(dump) for dump in dumps)


def _right(dump) -> bool:
    states, batch = dump.states(), int(dump.request_id.split("-")[1])
    return all(bool((states[:, c] == 4 * batch + c).all()) for c in range(len(COLUMNS)))


def _hand_over(capture: Capture, device: str, hidden: int, batch: int) -> None:
    """Give a batch of prompts to the capture; each state is filled with a number of its own, which bfloat16 holds."""
    _take(capture, *_batch(device, hidden, batch))


def _batch(device: str, hidden: int, batch: int, prompts: int = PROMPTS, tokens: int = TOKENS) -> tuple:
    reqs = [Req(f"hsnb-{batch}-{uuid.uuid4().hex}", tokens) for _ in range(prompts)]
    ids = torch.arange(prompts * tokens, device=device)
    lengths, none = [tokens] * prompts, [0] * prompts
    made = SimpleNamespace(rids=[r.rid for r in reqs], extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=none, input_ids=ids)
    shape = (prompts * tokens, hidden)
    states = {k: torch.full(shape, float(4 * batch + c), dtype=torch.bfloat16, device=device) for c, k in enumerate(COLUMNS)}
    return reqs, made, states


def _take(capture: Capture, reqs: list[Req], made: SimpleNamespace, states: dict) -> None:
    capture.note_lengths(reqs)
    capture.store(capture.wanted(made), states, made.input_ids)


def _small_calls(capture: Capture | None, device: str, hidden: int) -> float:
    """Return the microseconds of one small call that takes memory, while a batch is copied, unless there is no capture."""
    a = torch.ones(64, device=device)
    torch.cuda.synchronize()
    if capture:
        _hand_over(capture, device, hidden, 0)
    began = time.perf_counter()
    for _ in range(OPS):
        torch.add(a, a)
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    if capture:
        capture.writer.settle()
        for path in list_dumps(capture.settings.spool):
            path.unlink()
    return spent / OPS * 1e6


def _forget(capture: Capture) -> None:
    capture.writer._kept = lambda *tensors: ()


def _record(capture: Capture) -> None:
    def recorded(*tensors):
        for tensor in tensors:
            tensor.record_stream(capture.writer._stream)
        return ()

    capture.writer._kept = recorded


@contextmanager
def _captures(device: str, hidden: int, ways: dict) -> Iterator[dict[str, Capture | None]]:
    """Give a capture for each way, changed by it; None for None."""
    root = Path(tempfile.mkdtemp(prefix="hsnb-kept-", dir="/dev/shm"))
    made: dict[str, Capture | None] = {}
    try:
        for n, (way, change) in enumerate(ways.items()):
            made[way] = _capture(root / str(n), device, hidden) if change else None
            if change:
                change(made[way])
        yield made
    finally:
        for capture in filter(None, made.values()):
            capture.writer.close()
        shutil.rmtree(root)


def _capture(spool: Path, device: str, hidden: int) -> Capture:
    spool.mkdir()
    server_args = {"device": device, "chunked_prefill_size": PROMPTS * TOKENS}
    armed = Armed(state="armed", dtype="bfloat16", num_layers=3, hidden_size=hidden, boundaries=list(BOUNDARIES), server_args=server_args)
    settings = Settings(spool, BOUNDARIES, "pre", "safetensors", "hsnb-")
    return Capture(SimpleNamespace(forward=None), settings, ArmedFile(spool, armed), writes=True, warmup=False, spec=Body())
