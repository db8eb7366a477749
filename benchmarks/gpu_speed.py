"""Prefill with capture, drained by a client that verifies and publishes, against plain prefill: in turns, on a server that runs alone."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_checks import Context, Found
from benchmarks.gpu_results import Figure, figure
from benchmarks.speed_ceilings import DISK, disk_ceiling
from benchmarks.speed_load import LOADS, measure
from benchmarks.speed_results import Load

TURNS = 9
SHARE_OF_PLAIN = {"long": 0.95, "short": 0.90}  # what the project asks of itself
SHARE_OF_DISK = 0.9
TITLE = "Prefill captured and published, against plain"


def speed(ctx: Context) -> Found:
    """Measure long and short prompts published in memory, and long ones onto the disk."""
    server = ctx.fleet.get("deepseek wide")
    ctx.fleet.stop_all(but=("deepseek wide",))
    memory, disk = Path("/dev/shm"), Path(tempfile.mkdtemp(prefix="hsnb-speed-"))
    ceilings, loads = {DISK: disk_ceiling(disk)}, {}
    for name, prompts, output in (("long", "long", memory), ("short", "short", memory), ("long", "long", disk)):
        where = "memory" if output == memory else "disk"
        kind = LOADS[ctx.plan.device][prompts]
        loads[f"{name} to {where}"] = measure(server, kind, TURNS, time.monotonic() + 600, (where, output))
        ctx.tell(figures(loads, ceilings), [])
    return figures(loads, ceilings), []


def figures(loads: dict[str, Load], ceilings: dict[str, float]) -> list[Figure]:
    """Return long.ratio, short.ratio and disk.ratio, each with what it is made of."""
    found = []
    for name, bar in SHARE_OF_PLAIN.items():
        if load := loads.get(f"{name} to memory"):
            plain, captured = (statistics.median(t.whole for t in turns) for turns in (load.plain, load.captured))
            found += [
                figure(
                    f"{name}.ratio",
                    load.median("whole"),
                    "captured / plain",
                    "at least",
                    bar,
                    load.turns,
                    note=_spread(load.ratios("whole")),
                ),
                figure(f"{name}: plain", plain, "tokens/s", n=load.turns, note=load.prompts),
                figure(
                    f"{name}: captured, verified, published and freed",
                    captured,
                    "tokens/s",
                    n=load.turns,
                    note="spool and output in memory",
                ),
                figure(f"{name}: cores of the client", load.client_cores(), "cores for each GB/s", "at most", 1.0, load.turns),
                figure(f"{name}: memory grown, scheduler and writing process", load.memory_growth_mib, "MiB", n=load.turns),
            ]
    if (load := loads.get("long to disk")) and (ceiling := ceilings.get(DISK)):
        speeds = load.speeds()
        note = f"{_spread([s / ceiling for s in speeds])}; until the last file is synced, from the first request on"
        found += [
            figure(
                "disk.ratio",
                statistics.median(speeds) / ceiling,
                "of the disk's own speed",
                "at least",
                SHARE_OF_DISK,
                load.turns,
                note=note,
            ),
            figure("disk: published", statistics.median(speeds), "GB/s", n=load.turns, note="spool in memory, output on the disk"),
            figure("disk: its own speed, 4 threads, synced", ceiling, "GB/s"),
        ]
    return found


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
