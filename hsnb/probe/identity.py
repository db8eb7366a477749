"""Which layer is it? Each column against the second tap, and against transformers where the model fits."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from hsnb.checks import Check
from hsnb.dumps import Dump
from hsnb.probe.bars import compare, middle, relative_l2
from hsnb.weights import Head, layer_norms, rms_norm

_BLIND_TAP = "a factor common to a whole row: the norm divides it out"
_BLIND_HF = "what transformers and SGLang would both get wrong"


@dataclass(frozen=True)
class Tap:
    """What the second tap saw: {j: input of layer j's attention [S, H]}, and {L: the final norm's output}."""

    states: dict[int, torch.Tensor]

    @classmethod
    def load(cls, path: Path) -> Tap:
        with safe_open(path, "pt") as file:
            layers = json.loads(file.metadata()["layers"])
            rows = file.get_tensor("attention_inputs")
        return cls({j: rows[:, n] for n, j in enumerate(layers)})


def labelled(dump: Dump) -> dict[str, tuple[int, torch.Tensor, bool]]:
    """Return {name: (boundary, column [S, H], already normed)} of every column, the final included (it is boundary L)."""
    columns = {f"B_{b}": (b, dump.state(b), False) for b in dump.boundaries}
    return {**columns, "final": (-1, dump.state("final"), dump.final == "post")}


@dataclass(frozen=True)
class Fit:
    """How a column fits what was tapped: `own` and `nearest` (the best wrong one) are relative L2, medians; `best` fits best of all."""

    own: float
    nearest: float
    best: int
    best_error: float

    @property
    def distance(self) -> float:
        """How far right and wrong are apart: a column that is one layer off fits a neighbour, and its own label is as far away."""
        return max(self.own, self.nearest)


def tap_fits(dump: Dump, tap: Tap, head: Head, folder: Path, num_layers: int) -> dict[str, Fit]:
    """Normalise each column with layer j's own weight for every j that was tapped, and compare."""
    weights = {**layer_norms(folder, [j for j in tap.states if j < num_layers]), num_layers: head.norm}
    fits = {}
    for name, (boundary, column, normed) in labelled(dump).items():
        own = num_layers if boundary == -1 else boundary
        errors = {
            j: middle(relative_l2(column if normed else rms_norm(column, weights[j], head.eps), seen)) for j, seen in tap.states.items()
        }
        best = min(errors, key=lambda j: errors[j] if math.isfinite(errors[j]) else math.inf)
        nearest = min((e for j, e in errors.items() if j != own), default=math.inf)
        fits[name] = Fit(errors[own], nearest, best if errors[best] < errors[own] else own, errors[best])
    return fits


def tap_checks(fits: dict[str, Fit], dump: Dump, num_layers: int, dtype: str) -> list[Check]:
    """Judge the fits: each column must fit its own label, and no other.

    Tap and dump are of one forward pass, so what other batches do is no noise here: rounding is.
    """
    checks = []
    for name, (boundary, _, _) in labelled(dump).items():
        fit, own = fits[name], num_layers if boundary == -1 else boundary
        says = "" if fit.best == own else f", fits B_{fit.best} ({fit.best_error:.2g})"
        checks.append(compare(f"{name} by the second tap", fit.own, fit.distance, 0.0, dtype, says=says, blind_to=_BLIND_TAP))
    return checks


def reference_checks(dump: Dump, states: list[torch.Tensor], head: Head, noise: dict[str, float], dtype: str) -> list[Check]:
    """Compare each column with transformers' boundary of the same index, with the margin over k - 1 and k + 1."""
    last, checks = len(states) - 1, []
    for name, (boundary, column, normed) in labelled(dump).items():
        own = last if boundary == -1 else boundary
        right = head.normed(states[own]) if normed else states[own]
        near = [states[j] for j in (own - 1, own + 1) if 0 <= j <= last]
        distance = min(middle(relative_l2(head.normed(s) if normed else s, right)) for s in near)
        errors = {j: middle(relative_l2(column, states[j])) for j in range(last + 1)} if not normed else {}
        error = middle(relative_l2(column, right))
        best = min(errors, key=errors.get, default=own)
        says = "" if best == own or error <= errors[best] else f", fits B_{best} ({errors[best]:.2g})"
        checks.append(compare(f"{name} by transformers", error, distance, noise.get(name, 0.0), dtype, says=says, blind_to=_BLIND_HF))
    return checks
