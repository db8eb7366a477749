"""Prefill with and without capture on one server, in turns: requests that are captured, and requests that are not."""

from __future__ import annotations

import shutil
import statistics
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu_checks import Context, Found
from benchmarks.gpu_probe import clear, prompt_ids
from benchmarks.gpu_results import figure
from hsnb.demo.random_deepseek import VOCAB_SIZE
from hsnb.dumps import list_dumps

ROUNDS = 3


def speed(ctx: Context) -> Found:
    """Measure tokens a second of many prompts at once, three times each way, on a server that runs alone."""
    plan, server = ctx.plan, ctx.fleet.get("deepseek wide")
    ctx.fleet.stop_all(but=("deepseek wide",))
    first = server.armed[0]
    row = (len(first.boundaries) + 1) * first.hidden_size * (4 if first.dtype == "float32" else 2)
    free = shutil.disk_usage(server.spool).free
    prompts = max(1, min(plan.bench_prompts, int(free * 0.6) // (row * plan.bench_tokens)))
    ids = [prompt_ids(plan.bench_tokens, VOCAB_SIZE, seed=1000 + n) for n in range(prompts)]
    rates: dict[str, list[float]] = {"plain": [], "hsnb-bench": []}
    sizes = []
    with server.client() as client, ThreadPoolExecutor(prompts) as pool:
        for turn in range(ROUNDS + 1):  # the first is for warming up
            for kind, seen in rates.items():
                clear(server.spool)
                before = time.perf_counter()
                for reply in [pool.submit(client.generate, p, rid=f"{kind}-{uuid.uuid4().hex}") for p in ids]:
                    reply.result()
                seconds = time.perf_counter() - before
                if turn:
                    seen.append(prompts * plan.bench_tokens / seconds)
                if turn and kind == "hsnb-bench":
                    sizes.append(sum(p.stat().st_size for p in list_dumps(server.spool)))
    clear(server.spool)
    plain, captured = (statistics.median(v) for v in rates.values())
    states = prompts * plan.bench_tokens * row
    what = f"{prompts} prompts of {plan.bench_tokens:,} tokens at once"
    figures = [figure("GPUs", plan.gpus, "GPUs")]
    for name, values in (("without capture", rates["plain"]), ("captured", rates["hsnb-bench"])):
        figures.append(figure(f"prefill {name}, median", statistics.median(values), "tokens/s", n=ROUNDS, note=what))
        figures.append(figure(f"prefill {name}, slowest", min(values), "tokens/s", n=ROUNDS))
        figures.append(figure(f"prefill {name}, fastest", max(values), "tokens/s", n=ROUNDS))
    return [
        *figures,
        figure("captured against without capture", captured / plain, "ratio", n=ROUNDS, note="a rough one: three turns each"),
        figure("states written", captured * row / 1e9, "GB/s", n=ROUNDS, note="into the spool in memory; 1 GB = 1e9 bytes"),
        figure("states of one token, computed", row, "bytes"),
        figure("states of one turn, computed", states, "bytes"),
        figure("files of one turn beyond states and ids, largest", max(sizes) - states - 8 * prompts * plan.bench_tokens, "bytes",
               "at most", 8192 * prompts, n=len(sizes)),
    ], []  # fmt: skip
