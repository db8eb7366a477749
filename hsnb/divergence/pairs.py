"""Columns that two parties give one number: are they one boundary? Told by what each one is, not only by how near they are."""

from __future__ import annotations

from dataclasses import dataclass

from hsnb.divergence.offsets import Offset
from hsnb.divergence.states import States
from hsnb.probe.bars import FP32_BAR

TOLD = ("right", "shifted", "found")  # verdicts of a fit that names a column


@dataclass(frozen=True)
class Pair:
    """Two columns of one number (or, where neither party has numbers, of one place), and what each is.

    `a_is`, `b_is`: the known party's column that each fits ("B_3", "norm(B_30)"), or "unknown", "undecided". `verdict`: "right"
    (the same), "shifted" (two boundaries), "norm" (one boundary, before and after the norm), "undecided" or "unknown".
    """

    number: int | None
    a: str
    b: str
    a_is: str
    b_is: str
    error: float
    bar: float
    verdict: str


def bar(dtype: str, number: int | None, noise: float) -> float:
    """Return the relative L2 that numerics may make: in float32 1e-5 at 30 layers (rounding adds up over them), else three noises."""
    return FP32_BAR * max(1.0, (number or 0) / 30) if dtype == "float32" else 3 * noise


def partners(a: States, b: States) -> list[tuple[int | None, str, str]]:
    """Return (number, a's column, b's column) of those to be compared: by number and the finals; by place where neither has numbers."""
    if not (a.numbered() or b.numbered()):
        return [(None, x, y) for x, y in zip(a.columns, b.columns, strict=False)]
    theirs = b.numbered()
    found = [(k, x, theirs[k]) for k, x in a.numbered().items() if k in theirs]
    if a.final and b.final and a.final not in [x for _, x, _ in found] and a.numbered() and theirs:
        found.append((None, a.final, b.final))
    return found


def judge(a: Offset | None, b: Offset | None, direct: Offset, column_b: str, error: float, most: float, near: bool) -> tuple[str, str, str]:
    """Return (what a's column is, what b's is, verdict).

    `a`, `b`: their fits among transformers' columns, None without it. Then `direct`, a's fit among b's columns, is all there is:
    it can tell a shift only where b holds a neighbour (`near`), and without one the error itself must be that of numerics.
    """
    if a is not None and b is not None:
        names = tuple(o.fits if o.verdict in TOLD else o.verdict for o in (a, b))
        if "unknown" in names or "undecided" in names:
            return *names, "unknown" if "unknown" in names else "undecided"
        if names[0] == names[1]:
            return *names, "right"
        return *names, "norm" if _bare(names[0]) == _bare(names[1]) else "shifted"
    says = f"{direct.fits} of the other" if direct.verdict in TOLD else direct.verdict
    if direct.fits == column_b:
        if error <= most:
            return says, column_b, "right"
        return says, column_b, "right" if near and direct.verdict in TOLD else "undecided" if direct.verdict in TOLD else direct.verdict
    return says, column_b, direct.verdict if direct.verdict not in TOLD else "shifted"


def _bare(name: str) -> str:
    return name.removeprefix("norm(").removesuffix(")")
