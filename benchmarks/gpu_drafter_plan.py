"""What the step `drafter` is made of: its sizes, the texts, and what it keeps while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_results import Figure, Table, plain
from benchmarks.gpu_servers import GPU_FLAGS, NO_MULTICAST
from hsnb.boundaries import late, telling_boundaries
from hsnb.demo import model_folder
from hsnb.drafter.accept import Acceptance
from hsnb.drafter.states import Sample
from hsnb.drafter.train import Recipe
from hsnb.params import Deployment, num_layers, read_config

NAMES = ("right", "one late", "wrong norm")
_ON_CPU = {"skip-tokenizer-init": True, "max-running-requests": 32}


@dataclass(frozen=True)
class Sizes:
    """`training` texts of at most `answer` tokens to train on, `held_out` greedy answers of as many to judge by."""

    target: str
    dtype: str
    training: int
    held_out: int
    answer: int
    recipe: Recipe
    max_total_tokens: int

    @classmethod
    def of(cls, device: str) -> Sizes:
        """Return a real run's sizes, or, on a CPU, a rehearsal's."""
        if device == "cuda":
            return cls("smollm2-bf16", "bfloat16", 256, 24, 96, Recipe(steps=100, seconds=30.0, threads=5), 32768)
        return cls("smollm2-fp32", "float32", 48, 4, 32, Recipe(steps=12, seconds=60.0, draft_vocab=512, threads=1), 8192)


@dataclass
class Bench:
    """What the parts of the step share. `found` grows, and `tell` keeps it after every part: a run that is cut has what it had."""

    sizes: Sizes
    device: str
    limit_s: float
    logs: Path
    work: Path
    tell: Callable[[list[Figure], list[Table]], None]
    begun: float = field(default_factory=time.monotonic)
    figures: list[Figure] = field(default_factory=list)
    rows: list[list] = field(default_factory=list)

    @property
    def target(self) -> Path:
        return model_folder(self.sizes.target)

    @property
    def layers(self) -> int:
        return num_layers(read_config(self.target))

    @property
    def served(self) -> tuple[int, ...]:
        """The boundaries that every drafter is fed at serving: those at which one late is plain to see."""
        return telling_boundaries(self.layers)

    def stored(self, name: str) -> tuple[tuple[int, ...], bool]:
        """Return what lies in the folder that `name` is trained on: (boundaries, whether the final is normed)."""
        return (late(self.served, self.layers) if name == "one late" else self.served), name == "wrong norm"

    def deployment(self) -> Deployment:
        """Return the target's deployment, with every boundary captured that is stored in one of the folders."""
        on_gpu = self.device == "cuda"
        server = {
            "device": self.device,
            "dtype": self.sizes.dtype,
            "context_length": 2048,
            "chunked_prefill_size": 2048,
            "max_total_tokens": self.sizes.max_total_tokens,
            "ready_timeout_s": max(self.limit_s, 1.0),
            "flags": {**GPU_FLAGS, "cuda-graph-backend-prefill": "disabled"} if on_gpu else _ON_CPU,
            "env": NO_MULTICAST if on_gpu else {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        }
        capture = {"boundaries": sorted({b for name in NAMES for b in self.stored(name)[0]})}
        tree = {"name": "drafter", "model": f"demo:{self.sizes.target}", "server": server, "capture": capture}
        return Deployment.parse(tree, origin="benchmarks/gpu_drafter_plan.py")

    def add(self, what: str, *figures: Figure) -> None:
        """Keep more figures, and say on the console how far the step is."""
        self.figures += figures
        print(f"  {time.monotonic() - self.begun:.0f} s: {what}", flush=True)
        self.tell(self.figures, self.tables())

    def tables(self) -> list[Table]:
        """Return what was accepted, predicted and served, one row each."""
        columns = [
            "drafter",
            "",
            "accept length",
            "verifications",
            *(f"{j} drafts right" for j in range(4)),
            *(f"draft {k}" for k in (1, 2, 3)),
        ]
        units = ["", "", "tokens/verification", *["verifications"] * 5, *["share accepted"] * 3]
        return [Table(title="What was accepted", columns=columns, units=units, rows=self.rows)] if self.rows else []

    def row(self, name: str, a: Acceptance) -> None:
        """Add a row of the table."""
        shares = [plain(p) for p in a.per_position]
        self.rows.append([name, "served" if a.served else "predicted", plain(a.accept_length), a.verifications, *a.histogram, *shares])


def texts(bench: Bench) -> tuple[list[Sample], list[tuple[int, ...]]]:
    """Return (samples to train on, prompts to judge by) out of the standard library's documentation, first turns only."""
    from transformers import AutoTokenizer

    from hsnb.chat import tokenise
    from hsnb.demo.stdlib_docs import conversations

    sizes = bench.sizes
    talks = [talk[:2] for talk in conversations(sizes.training + 2 * sizes.held_out)]
    found = []
    for ids, mask in tokenise(AutoTokenizer.from_pretrained(bench.target), talks, 0):
        begin = int(mask.argmax())
        end = min(begin + sizes.answer, begin + int(mask.sum()))
        found.append(Sample(tuple(ids[:begin]), tuple(ids[begin:end])))
    trained_on = {s.prompt for s in found[: sizes.training]}
    prompts = [s.prompt for s in found[sizes.training :] if s.prompt not in trained_on]
    return found[: sizes.training], prompts[: sizes.held_out]
