"""Put prompts to a server by their ids, as hsnb's probe does, and turn its verdict into figures."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu_results import Figure, Table, figure
from hsnb.collect import collect
from hsnb.dumps import Dump, open_dump
from hsnb.probe import Prompt, gather, judge
from hsnb.probe.bars import LOGPROB_BARS


def prompt_ids(n: int, vocab: int, seed: int = 0) -> list[int]:
    """Return n token ids, the same on every machine; ids below 20 are left out (special tokens)."""
    return torch.randint(20, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def take(server, token_ids: list[int], client, rid: str = "") -> Dump:
    """Send one prompt and return its opened dump; it stays in the spool."""
    rid = rid or f"hsnb-bench-{uuid.uuid4().hex}"
    client.generate(token_ids, rid=rid)
    return open_dump(collect(server.spool, rid, server.armed[0].format, timeout_s=60))


def take_together(server, prompts: list[list[int]], occupy: list[int]) -> list[Dump]:
    """Send all prompts at once while the server still works on `occupy`, so that they wait and are batched."""
    with server.client() as client, ThreadPoolExecutor(len(prompts) + 1) as pool:
        first = pool.submit(client.generate, occupy, rid=f"plain-{uuid.uuid4().hex}")
        time.sleep(0.02)
        dumps = [d.result() for d in [pool.submit(take, server, p, client) for p in prompts]]
        first.result()
    return dumps


def clear(spool: Path) -> None:
    """Remove every dump, digest and tap from a spool; what the server armed stays."""
    for pattern in ("*.safetensors", "*.tap", "*.rank-*.json"):
        for path in spool.glob(pattern):
            path.unlink(missing_ok=True)


def probe_figures(
    server, name: str, model: Path, vocab: int, long: int, *, reference: bool, noisy: str = ""
) -> tuple[list[Figure], list[Table]]:
    """Probe with ids 1..10, 24 random ids (in the sentence's place) and one prompt of `long` tokens; no tokenizer is needed.

    `noisy`: why the noise may hide what the probe would prove; then no check may fail, and the verdict itself is only reported.
    """
    prompts = [
        Prompt("ids 1..10", tuple(range(1, 11)), text=False),
        Prompt("24 ids", tuple(prompt_ids(24, vocab))),
        Prompt(f"{long} ids", tuple(prompt_ids(long, vocab, seed=1))),
    ]
    evidence = gather(server, prompts)
    try:
        result = judge(evidence, model, reference=reference)
    finally:
        evidence.free()
        clear(server.spool)
    passes = ("", None) if noisy else ("equal to", "PASS")
    mean_bar, max_bar = LOGPROB_BARS[result.dtype]
    figures = [
        figure(f"{name}: verdict of the probe", result.verdict, "verdict", *passes, n=len(result.checks), note=noisy),
        figure(f"{name}: checks that failed", sum(not c.ok and not c.not_proved for c in result.checks), "checks", "equal to", 0),
        figure(f"{name}: checks not proved", sum(c.not_proved for c in result.checks), "checks"),
    ]
    for prompt, errors in result.logprob_errors.items():
        e, what = torch.tensor(errors, dtype=torch.float64), f"{name}, {prompt}: error of the rebuilt logprobs"
        mean, largest = (e.mean().item(), e.max().item()) if len(e) else (float("nan"), float("nan"))
        figures.append(figure(f"{what}, mean", mean, "nats", "at most", mean_bar, n=len(e)))
        figures.append(figure(f"{what}, largest", largest, "nats", "at most", max_bar, n=len(e)))
    rows = [[c.name, c.value, c.threshold, getattr(c, "result", "pass" if c.ok else "FAIL")] for c in result.checks]
    columns = ["check", "value", "threshold", "result"]
    return figures, [Table(title=f"{name}: every check of the probe", columns=columns, units=["", "", "", ""], rows=rows)]
