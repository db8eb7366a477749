"""Prefill with capture, drained by a client that verifies and publishes, against plain prefill: in turns, on a server that runs alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.gpu import card, now, versions
from benchmarks.gpu_checks import Context, Found
from benchmarks.gpu_results import PUBLISHED, Figure, card_key, figure
from benchmarks.large_pages import no_large_pages, shm_in_large_pages
from benchmarks.speed_ceilings import ceilings, fastest
from benchmarks.speed_load import LOADS, measure
from benchmarks.speed_results import FILE, Load, Results, Run

SMALL, MOUNTED = ", in small pages", ", mounted for large pages"  # without them: large pages that the writer asks for
# What is measured, in this order, and in how many alternations: one turn differs from the next by a fifth, and so a median of nine by a twentieth.
LOADS_OF = {
    "long to memory": 36,
    "short to memory": 27,
    "long to disk": 9,
    f"short to memory{SMALL}": 9,
    f"short to memory{MOUNTED}": 9,
    "short to disk": 9,
}
KEYS = {"": "", SMALL: "small_pages.", MOUNTED: "mounted."}
SHARE_OF_PLAIN = {"long": 0.95, "short": 0.90}  # what the project asks of itself
SHARE_OF_DISK = 0.9
TITLE = "Prefill captured and published, against plain"


def speed(ctx: Context) -> Found:
    """Measure long and short prompts published in memory and onto the disk; every turn is kept in speed-results.json, too.

    A load that there was no time for keeps what was measured before.
    """
    server = ctx.fleet.get("deepseek wide")
    ctx.fleet.stop_all(but=("deepseek wide",))
    memory, disk = Path("/dev/shm"), Path(tempfile.mkdtemp(prefix="hsnb-speed-"))
    device, name = ctx.plan.device, card(ctx.plan.device)["card"]
    key, file = card_key(name, ctx.plan.gpus), ctx.out / FILE
    results = Results.read(file if file.is_file() or device == "cpu" else PUBLISHED.with_name(FILE))
    found = Run(date=now(), device=device, card=name, cores=len(os.sched_getaffinity(0)), versions=versions())
    before = results.runs[key].carried() if key in results.runs else {}
    found = found.model_copy(update={"ceilings": ceilings(device, memory, disk), "loads": before})
    try:
        for what, turns in LOADS_OF.items():
            prompts, _, where = what.removesuffix(MOUNTED).removesuffix(SMALL).partition(" to ")
            output, own = {"memory": (memory, None), "disk": (disk, found.ceilings)}[where]
            with pages_of(what) as so:
                if not so or time.monotonic() > ctx.ends:
                    continue
                load = measure(server, LOADS[device][prompts], turns, ctx.ends, (where, output), own)
            if load.turns:
                found = found.with_load(what, load)
                Results(runs={**results.runs, key: found}).write(file)
                ctx.tell(figures(found), [])
    finally:
        shutil.rmtree(disk)
    return figures(found), []


def pages_of(what: str) -> AbstractContextManager[bool]:
    """Return what gives a load its pages, and says whether it did."""
    if what.endswith(MOUNTED):
        return shm_in_large_pages()
    return no_large_pages() if what.endswith(SMALL) else contextlib.nullcontext(True)


def figures(run: Run) -> list[Figure]:
    """Return long.ratio and short.ratio, short.ratio in other pages as well, and disk.ratio, each with what it is made of."""
    loads, found = run.loads, []
    for (name, bar), pages in itertools.product(SHARE_OF_PLAIN.items(), ("", SMALL, MOUNTED)):
        if load := loads.get(f"{name} to memory{pages}"):
            plain, captured = (statistics.median(t.whole for t in turns) for turns in (load.plain, load.captured))
            found += [
                figure(
                    f"{name}.{KEYS[pages]}ratio",
                    load.median("whole"),
                    "captured / plain",
                    *(("", None) if pages else ("at least", bar)),
                    load.turns,
                    note=_spread(load.ratios("whole")) + load.of_another_source(run),
                ),
                figure(f"{name}{pages}: plain", plain, "tokens/s", n=load.turns, note=load.prompts),
                figure(
                    f"{name}{pages}: captured, verified, published and freed",
                    captured,
                    "tokens/s",
                    n=load.turns,
                    note="spool and output in memory",
                ),
                *_batches(f"{name}{pages}", load),
                figure(f"{name}{pages}: cores of the client", load.client_cores(), "cores for each GB/s", "at most", 1.0, load.turns),
                figure(f"{name}{pages}: memory grown, scheduler and writing process", load.memory_growth_mib, "MiB", n=load.turns),
            ]
    if (load := loads.get("long to disk")) and load.alone_s:
        shares, speeds = load.shares(), load.speeds()
        note = f"{_spread(shares)}{load.of_another_source(run)}; from the first request until the last file is synced, against the same files alone, in turns"
        best = load.ceilings
        way = fastest(best)
        found += [
            figure("disk.ratio", statistics.median(shares), "of the disk's own speed", "at least", SHARE_OF_DISK, load.turns, note=note),
            figure(
                "disk.ratio, of the best of three before",
                statistics.median(speeds) / best[way],
                "of the disk's own speed",
                "at least",
                SHARE_OF_DISK,
                load.turns,
                note=_spread([s / best[way] for s in speeds]),
            ),
            figure("disk: published", statistics.median(speeds), "GB/s", n=load.turns, note="spool in memory, output on the disk"),
            figure("disk: cores of the client", load.client_cores(), "cores for each GB/s", "at most", 1.0, load.turns),
            figure(f"disk: its own speed, {way}", best[way], "GB/s", note="best of three before, 1.9 GB each"),
        ]
    return found


def _batches(name: str, load: Load) -> list[Figure]:
    if not (both := load.batch_ms()):
        return []
    return [
        figure(
            f"{name}: {what} batch", ms, "ms", n=load.turns, note="from one to the next in the server's log, the median of turns' medians"
        )
        for what, ms in zip(("a plain", "a captured"), both, strict=True)
    ]


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
