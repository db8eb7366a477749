"""Measure the capture around a real forward without a server: SmolLM2's shape in float32, by transformers' layers, on this CPU.

    python -m benchmarks.bare [--out docs] [--turns 9]

For a machine whose cores are too busy for a server's 18 turns, and to see the capture's own share without SGLang's. The weights are
random: their values cost nothing. Plain and captured batches in turns; each ends when the last dump has its name. CPU seconds are
of the whole process. torch has one thread by default: beside other work its pool spins, and the CPU seconds of equal turns then
differ by a third. Results go to speed-results.json as "cpu, no server".
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch

from benchmarks.gpu import now, versions
from benchmarks.gpu_site import ROOT
from benchmarks.speed_results import FILE, Load, Results, Run, Turn
from hsnb.patch.armed import Armed, ArmedFile
from hsnb.patch.bodies import Body
from hsnb.patch.capture import Capture
from hsnb.patch.settings import Settings

WIDTH, LAYERS = 576, 30
LOADS = {"short": (128, 4), "long": (512, 1)}  # tokens of a prompt, prompts of a batch


class Forward(torch.nn.Module):
    """transformers' Llama layers in a loop like SGLang's, which keeps what layers_to_capture asks for."""

    def __init__(self):
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=1536,
            num_hidden_layers=LAYERS,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=512,
        )
        model = LlamaModel(config).eval()
        self.embed, self.layers, self.norm, self.rotary = model.embed_tokens, model.layers, model.norm, model.rotary_emb
        self.layers_to_capture: list[int] = []

    def forward(self, input_ids, positions, batch):
        """Return the normed states [tokens, H], and the kept ones with them when any were asked for."""
        x, kept = self.embed(input_ids.view(batch.batch_size, -1)), []  # [B, S, H]
        places = self.rotary(x, positions)
        for n, layer in enumerate(self.layers):
            if n in self.layers_to_capture:
                kept.append(x.flatten(0, 1).clone())
            x = layer(x, position_embeddings=places, attention_mask=None)
            x = x[0] if isinstance(x, tuple) else x
        x = self.norm(x.flatten(0, 1))
        return (x, kept) if kept else x


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, measure, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help=f"folder of {FILE} (default: docs/)")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    spool = Path(tempfile.mkdtemp(prefix="hsnb-bare-", dir="/dev/shm"))
    about = Armed(state="armed", dtype="float32", num_layers=LAYERS, hidden_size=WIDTH, server_args={"chunked_prefill_size": 512})
    settings = Settings(spool, (2, 15, 27), "pre", "safetensors", "hsnb-")
    capture = Capture(Forward(), settings, ArmedFile(spool, about), writes=True, warmup=False, spec=Body())
    found = Run(
        date=now(),
        device="cpu",
        card=f"no server, transformers' layers, torch's threads: {args.threads}",
        cores=len(os.sched_getaffinity(0)),
        versions=versions(),
    )
    try:
        with torch.inference_mode():
            for name, (tokens, prompts) in LOADS.items():
                found = found.model_copy(update={"loads": {**found.loads, name: measure(capture, tokens, prompts, args.turns)}})
                results = Results.read(args.out / FILE)
                Results(runs={**results.runs, "cpu, no server": found}).write(args.out / FILE)
                print(name, [round(r, 4) for r in found.loads[name].ratios("cpu_s")], flush=True)
    finally:
        shutil.rmtree(spool)
    return 0


def measure(capture: Capture, tokens: int, prompts: int, turns: int) -> Load:
    """Return `turns` alternations; which of the two comes first alternates as well."""
    found: dict[str, list[Turn]] = {"plain": [], "hsnb": []}
    for kind in found:
        one_turn(capture, tokens, prompts, kind)
    memory, waited = psutil.Process().memory_info().rss, capture.armed.armed.counts.get("ring_full_ms", 0)
    for n in range(turns):
        for kind in found if n % 2 == 0 else reversed(found):
            found[kind].append(one_turn(capture, tokens, prompts, kind))
    return Load(
        prompts=f"{prompts} prompts of {tokens:,} tokens in one batch",
        token_bytes=4 * WIDTH * 4,
        plain=found["plain"],
        captured=found["hsnb"],
        ring_full_ms=capture.armed.armed.counts.get("ring_full_ms", 0) - waited,
        memory_growth_mib=round((psutil.Process().memory_info().rss - memory) / 2**20, 1),
    )


def one_turn(capture: Capture, tokens: int, prompts: int, kind: str) -> Turn:
    """Run one batch. Raises RuntimeError when a prompt was not captured."""
    reqs = [Req(f"{kind}-{uuid.uuid4().hex}", tokens) for _ in range(prompts)]
    batch = SimpleNamespace(
        rids=[r.rid for r in reqs],
        batch_size=prompts,
        extend_seq_lens_cpu=[tokens] * prompts,
        extend_prefix_lens_cpu=[0] * prompts,
        forward_mode=SimpleNamespace(name="EXTEND", is_extend=lambda: True),
        input_ids=torch.arange(tokens * prompts) % 500,
    )
    before = capture.armed.captured.number
    cpu, began = time.process_time(), time.perf_counter()
    capture.note_lengths(reqs)
    capture(batch.input_ids, torch.arange(tokens)[None], batch)
    answered = time.perf_counter() - began
    capture.writer.settle()
    published, spent = time.perf_counter() - began, time.process_time() - cpu
    if capture.armed.captured.number - before != (prompts if kind == "hsnb" else 0):
        raise RuntimeError(f"not captured: {capture.armed.armed.failures}")
    for path in capture.settings.spool.glob("*.safetensors"):
        path.unlink()
    return Turn(tokens=tokens * prompts, answered_s=answered, published_s=published, cpu_s=spent)


class Req:
    """What the capture reads of SGLang's request."""

    def __init__(self, rid: str, tokens: int):
        self.rid, self.origin_input_ids, self.output_ids = rid, range(tokens), []
        self.to_finish = self.finished_reason = None


if __name__ == "__main__":
    sys.exit(main())
