"""Send one load to a server, plain and captured in turns, and time it until the last dump is in the spool, and at the output."""

from __future__ import annotations

import itertools
import re
import statistics
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.gpu import now, versions
from benchmarks.gpu_probe import prompt_ids
from benchmarks.gpu_servers import Plan
from benchmarks.speed_ceilings import DIRECT, DISK, disk_alone
from benchmarks.speed_drain import Drain
from benchmarks.speed_results import Load, Turn
from hsnb.collect import free
from hsnb.dumps import list_dumps
from hsnb.params import Deployment
from hsnb.patch.armed import read_armed

_BATCH = re.compile(r"Prefill batch.*?#new-token: (\d+).*?input throughput \(token/s\): ([\d.]+)")  # the speed is of the batch before
VOCAB = 500  # token ids that every model here has; one beyond a model ends its server


@dataclass(frozen=True)
class Prompts:
    """`lengths` of the prompts, `times` over, in requests of at most `together` prompts each, all sent at once."""

    lengths: tuple[int, ...]
    times: int
    together: int = 64

    @property
    def words(self) -> str:
        """What the load is, for people."""
        return f"{len(self.lengths) * self.times} prompts of {', '.join(f'{n:,}' for n in self.lengths)} tokens at once"


_MIXED = (64, 128, 256, 512, 1024, 2048)
LOADS = {
    "cuda": {
        "long": Prompts((2048,), 64),
        "short": Prompts((128,), 1024, 256),
        "mixed": Prompts(_MIXED, 24, 24),
        "few": Prompts((2048,), 4),
    },
    "cpu": {"long": Prompts((512,), 1), "short": Prompts((128,), 4), "mixed": Prompts((32, 64, 128, 256), 1)},
}


def deployment(device: str, spool: Path | None, layout: str) -> Deployment:
    """Return Kimi's shape in bfloat16 on a GPU with chunks of 8,192 tokens, SmolLM2 in float32 on a CPU."""
    if device == "cuda":
        made = Plan.gpu(1).deployment("deepseek wide", 300)
    else:
        server = {"device": "cpu", "dtype": "float32", "chunked_prefill_size": 512}
        tree = {"name": "speed", "model": "demo:smollm2-fp32", "server": server, "capture": {"boundaries": [2, 15, 27]}}
        made = Deployment.parse(tree, origin="benchmarks/speed.py")
    server = made.server.model_copy(update={"spool": str(spool)}) if spool else made.server
    return made.model_copy(update={"server": server, "capture": made.capture.model_copy(update={"format": layout})})


def measure(
    server, prompts: Prompts, turns: int, end: float, output: tuple[str, Path] | None = None, ceilings: dict[str, float] | None = None
) -> Load:
    """Return `turns` alternations, fewer when the time is out; which of the two comes first alternates as well.

    `output`: a name and a folder that a client publishes to meanwhile. `ceilings`: as speed_ceilings found them, when the folder is on
    a disk, which is then measured by itself after each alternation.
    """
    first = server.armed[0]
    width = (len(first.boundaries) + 1) * first.hidden_size * (4 if first.dtype == "float32" else 2)
    ids = [prompt_ids(n, VOCAB, seed=1000 + i) for i, n in enumerate(prompts.lengths * prompts.times)]
    found: dict[str, list[Turn]] = {"plain": [], "hsnb-bench": []}
    alone: list[float] = []
    drain = Drain(server, output[1]) if output else None
    try:
        for kind in found:  # warming up
            one_turn(server, ids, prompts.together, kind, drain)
        before, held = _counts(server), memory(server)
        for n in range(turns):
            if time.monotonic() > end:
                break
            for kind in found if n % 2 == 0 else reversed(found):
                found[kind].append(one_turn(server, ids, prompts.together, kind, drain))
            if ceilings:
                alone.append(round(disk_alone(output[1], sum(map(len, ids)) * width // len(ids), len(ids), ceilings), 5))
    finally:
        if drain:
            drain.close()
    return Load(
        prompts=prompts.words,
        token_bytes=width,
        plain=found["plain"],
        captured=found["hsnb-bench"],
        ring_full_ms=_counts(server).get("ring_full_ms", 0) - before.get("ring_full_ms", 0),
        memory_growth_mib=round((memory(server) - held) / 2**20, 1),
        output=output[0] if output else "",
        alone_s=alone,
        ceilings={way: speed for way, speed in (ceilings or {}).items() if way in (DISK, DIRECT)},
        date=now(),
        source=versions()["hsnb source"],
    )


def one_turn(server, ids: list[list[int]], together: int, kind: str, drain: Drain | None = None) -> Turn:
    """Send every prompt once. Raises RuntimeError when a prompt was not captured."""
    from concurrent.futures import ThreadPoolExecutor

    rids = [f"{kind}-{uuid.uuid4().hex}" for _ in ids]
    parts = [slice(i, i + together) for i in range(0, len(ids), together)]
    drain, logged = drain if kind == "hsnb-bench" else None, server.log.stat().st_size
    if drain:
        drain.begin(rids, ids)
    counts, cpu, own, sampling = _counts(server), _cpu(server), drain.cpu_s() if drain else 0.0, {"max_new_tokens": 1, "temperature": 0.0}
    wanted = counts.get("captured", 0) + (len(ids) if kind == "hsnb-bench" else 0)
    with server.client() as client, ThreadPoolExecutor(len(parts)) as pool:
        began = time.perf_counter()
        if drain:
            drain.start()
        asked = [
            pool.submit(client.request, "POST", "/generate", {"rid": rids[p], "input_ids": ids[p], "sampling_params": sampling})
            for p in parts
        ]
        for reply in asked:
            reply.result()
        answered = time.perf_counter() - began
        while (now := _counts(server)).get("captured", 0) < wanted:
            if now.get("failed", 0) > counts.get("failed", 0):
                raise RuntimeError(f"not captured: {read_armed(server.spool)[0].failures[-1]}")
            time.sleep(0.002)
        published, drained = time.perf_counter() - began, None
        if drain:
            drain.finish()
            drained = round(time.perf_counter() - began, 5)
    spent = [round(after - before, 3) for before, after in zip(cpu, _cpu(server), strict=True)]
    if drain:
        own = drain.cpu_s() - own
        drain.clear()
    for path in list_dumps(server.spool):
        free(path)
    return Turn(
        tokens=sum(map(len, ids)),
        answered_s=round(answered, 5),
        published_s=round(published, 5),
        cpu_s=spent[0],
        writer_cpu_s=spent[1],
        client_cpu_s=round(own, 3) if drain else 0.0,
        drained_s=drained,
        batch_ms=batch_ms(server.log.read_bytes()[logged:].decode(errors="replace")),
    )


def batch_ms(log: str) -> float | None:
    """Return the median milliseconds from one prefill batch to the next of what a server logged; None for fewer than three batches."""
    seen = [(int(n), float(speed)) for n, speed in _BATCH.findall(log)]
    times = [1e3 * tokens / speed for (tokens, _), (_, speed) in itertools.pairwise(seen) if speed > 0]
    return round(statistics.median(times), 3) if len(times) > 1 else None


def _counts(server) -> dict[str, int]:
    return read_armed(server.spool)[0].counts


def _cpu(server) -> tuple[float, float]:
    """Return the CPU seconds so far of the schedulers and of the writing processes, in ticks of 10 ms."""
    return tuple(sum(sum(p.cpu_times()[:2]) for p in some) for some in processes(server))


def memory(server) -> int:
    """Return the bytes that the schedulers and their writing processes hold."""
    return sum(p.memory_full_info().pss for some in processes(server) for p in some)  # the ring once, though two processes map it


def processes(server) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the schedulers, and their writing processes."""
    schedulers = [psutil.Process(a.pid) for a in server.armed]
    return schedulers, [p for s in schedulers for p in s.children() if p.cmdline()[1:3] == ["-m", "hsnb.patch"]]
