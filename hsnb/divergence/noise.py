"""How far apart right states are: the unit that every margin is measured in."""

from __future__ import annotations

from pathlib import Path

from hsnb import reference as hf
from hsnb.divergence.capture import Prompts, through_transformers
from hsnb.divergence.measure import middle, per_token
from hsnb.divergence.states import States
from hsnb.probe.bars import ROUNDING


def of_dtype(model: Path, prompts: Prompts, reference: States, dtype: str) -> dict[str, float]:
    """Return {column: relative L2, median} of transformers in `dtype` against transformers in float32.

    It holds all that rounding does over the layers, flipped routes of a mixture of experts included. Empty where it does not fit.
    """
    if dtype == reference.dtype or not hf.fits(model, dtype):
        return {}
    rounded = through_transformers(model, prompts, dtype)
    return {c: middle(per_token(rounded, reference, c, c)) for c in reference.columns}


def floor(*dtypes: str) -> float:
    """Return the least noise that states of these dtypes can have: the coarsest one's rounding, relative."""
    return max(ROUNDING[d] for d in dtypes)


def by_number(noise: dict[str, float], reference: States) -> dict[int, float]:
    """Return {boundary: noise} of a reference's columns."""
    return {k: noise[name] for k, name in reference.numbered().items() if name in noise}


def combined(states: States, estimates: list[dict[int, float]], least: float) -> dict[str, float]:
    """Return {column of states: the largest of the estimates for its number, `least` at the least}.

    A column without a number (norm(B_L)) takes the largest of all numbers.
    """
    found = {k: max([least, *(e[k] for e in estimates if k in e)]) for k in {n for n in states.said if n is not None}}
    largest = max([least, *found.values()])
    return {name: largest if k is None else found[k] for name, k in zip(states.columns, states.said, strict=True)}
