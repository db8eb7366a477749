"""Which column of the other is it really? The best fit of each column, its offset, its margin, or that none can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hsnb.divergence.measure import Distances
from hsnb.divergence.states import States

CERTAIN = 3.0  # a margin under three times the noise decides nothing
KINSHIP = 0.5  # a fit that is further off than half the way to the nearest neighbour is none


@dataclass(frozen=True)
class Offset:
    """Where one column fits best among the other party's. `error`, `runner_up`, `distance` and `noise` are relative L2, medians.

    `said` and `fits_number` are the numbers that the two parties give the two columns; `distance` is the way from the column that
    it fits to that one's nearest neighbour.

    `verdict`: "right" (the same number), "shifted" (plainly another number), "found" (it has no number, and plainly fits), "undecided"
    (it fits, but the margin over the runner-up is under three times the noise) or "unknown" (it fits none: other tokens, another
    model, another norm).
    """

    column: str
    said: int | None
    fits: str
    fits_number: int | None
    error: float
    runner_up: str
    runner_up_error: float
    distance: float
    noise: float

    @property
    def offset(self) -> int | None:
        """Return how many boundaries late it is; None where one of the two has no number."""
        return None if self.said is None or self.fits_number is None else self.fits_number - self.said

    @property
    def margin(self) -> float:
        return self.runner_up_error - self.error

    @property
    def verdict(self) -> str:
        if not self.error <= max(KINSHIP * min(self.distance, 1.0), CERTAIN * self.noise):  # NaN fits nothing; a state of zeros is 1 away
            return "unknown"
        if self.margin < CERTAIN * self.noise:
            return "undecided"
        if self.said is None:
            return "found"
        return "right" if self.offset == 0 else "shifted"

    def as_dict(self) -> dict:
        names = ("column", "verdict", "fits", "offset", "error", "runner_up", "runner_up_error", "margin", "distance", "noise")
        return {name: getattr(self, name) for name in names}


def find_offsets(found: Distances, a: States, b: States, steps: dict[str, float], noise: dict[str, float]) -> tuple[Offset, ...]:
    """Return the best fit of every column of `a` among those of `b`.

    `found`: distances(a, b). `steps`, `noise`: {column of b: relative L2} to its nearest neighbour, and of the numerics.
    """
    result = []
    for i, (column, said) in enumerate(zip(a.columns, a.said, strict=True)):
        errors = [(e if math.isfinite(e) else math.inf, j) for j, e in enumerate(found.relative_l2[i].tolist())]
        (error, best), (second, other) = [*sorted(errors), (math.inf, -1)][:2]
        fits = b.columns[best]
        runner_up = b.columns[other] if other >= 0 else "none"
        result.append(Offset(column, said, fits, b.said[best], error, runner_up, second, steps[fits], noise[fits]))
    return tuple(result)


def frame(offsets: tuple[Offset, ...]):
    """Return the offsets as a table."""
    import pandas as pd

    return pd.DataFrame([o.as_dict() for o in offsets])
