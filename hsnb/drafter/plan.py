"""What 04_handoff is going to do, settled before a server starts: the folder, the comparisons, the boundaries to capture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsnb.boundaries import default_boundaries
from hsnb.drafter.handoff import Variant, needed, variants
from hsnb.drafter.other import VLLM
from hsnb.drafter.states import Sample, StatesFolder, greedy_answers, open_states, take
from hsnb.drafter.texts import pick
from hsnb.drafter.train import trainers_python
from hsnb.errors import ParamsError
from hsnb.params import Deployment
from hsnb.paths import resolve, run_dir
from hsnb.server.command import resolve_device

TRAINING, HELD_OUT, ANSWER = 128, 24, 96  # samples, answers, tokens an answer
_ON_CPU = {"max-running-requests": 32}  # decoding 32 answers at once costs little more than one


@dataclass(frozen=True)
class Plan:
    """`deployment`: the run's, with every needed boundary captured; `serving`: the run's own. `variants`: the comparisons by name. `out`: where all goes."""

    out: Path
    extracted: StatesFolder
    variants: dict[str, Variant]
    deployment: Deployment
    serving: Deployment
    minutes: float
    seeds: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Return those of the run's own drafter."""
        return next(iter(self.variants.values())).served

    def frame(self) -> Any:
        """Return the plan as a table."""
        import pandas as pd

        rows = {
            "states extracted": f"{self.extracted.path}: {len(self.extracted.rows):,} rows",
            "boundaries of the drafter": list(self.boundaries),
            "captured for all comparisons": list(self.deployment.capture.boundaries),
            "comparisons": "; ".join(self.variants),
            "trainings": f"{len(self.variants) * self.seeds} in {self.minutes:g} minutes",
        }
        return pd.DataFrame({"value": pd.Series(rows, dtype=object)})

    def _repr_html_(self) -> str:
        return self.frame().to_html(header=False)

    def capture(self, server) -> tuple[StatesFolder, StatesFolder, list[Sample]]:
        """Return (states to train on, held-out states of the server's own greedy answers, the samples trained on)."""
        samples, prompts = pick(self.extracted, training=TRAINING, held_out=HELD_OUT, answer_tokens=ANSWER)
        answers = greedy_answers(server, prompts, max_new_tokens=ANSWER)
        held_out = take(server, answers, self.out / "held-out")
        return take(server, samples, self.out / "training"), held_out, samples


def plan(p, deployment: Deployment) -> Plan:
    """Settle what the notebook's parameters mean. `p.data`: a folder, or two joined by a comma, the second another engine's
    (or "vllm": taken from vLLM for the very samples that are trained on).

    Raises ParamsError for a trainer that cannot run here or is not installed, DataError for a folder that is no extraction,
    BoundaryError for boundaries that have no later ones.
    """
    if p.trainer != "speculators":
        raise ParamsError(
            got=f"trainer is {p.trainer!r}",
            expected="speculators",
            likely="SpecForge 0.2 trains on an accelerator only, and is not driven from here",
            next="-p trainer speculators; for SpecForge: hsnb training DIR prints its command, on a folder written with layout specforge",
        )
    trainers_python()
    ours, _, other = p.data.partition(",")
    extracted = open_states(resolve(ours) if ours else run_dir(p.run) / "data")
    real = extracted.boundaries or default_boundaries(extracted.num_layers)
    wanted = variants(extracted.num_layers, real, (VLLM if other == VLLM else str(resolve(other))) if other else "")
    capture = deployment.capture.model_copy(update={"boundaries": list(needed(wanted)), "final": "pre"})
    server = deployment.server
    if resolve_device(server.device) == "cpu":
        # Threads that spin while they wait make decoding ten times slower on a machine with other work.
        server = server.model_copy(update={"flags": {**_ON_CPU, **server.flags}, "env": {"OMP_WAIT_POLICY": "PASSIVE", **server.env}})
    serving = deployment.model_copy(update={"server": server})
    capturing = serving.model_copy(update={"capture": capture})
    return Plan(run_dir(p.run) / "handoff", extracted, wanted, capturing, serving, p.minutes, p.seeds)
