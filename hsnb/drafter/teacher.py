"""Teacher top-1: how often the final state, through the target's own norm and head, gives the token that follows.

On the target's greedy answers it is above 0.99 for the right final state, and falls to 0.3-0.6 for a normed one or a boundary early:
the sharpest test of a trainer's last column, without any training. On other texts it says how predictable they are, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsnb.drafter.states import StatesFolder
from hsnb.weights import Head


@dataclass(frozen=True)
class TeacherTop1:
    """`right` of `total` tokens under the mask are the teacher's first choice."""

    right: int
    total: int
    stored: str  # what the last column was taken for

    @property
    def share(self) -> float:
        return self.right / max(1, self.total)

    def as_dict(self) -> dict:
        """Return plain values, for --json."""
        return {"right": self.right, "total": self.total, "share": self.share, "stored": self.stored}

    def _repr_html_(self) -> str:
        return f"<p>teacher top-1: {self.share:.4f} ({self.right:,} of {self.total:,} tokens under the mask)</p>"


def teacher_top1(states: StatesFolder, *, limit: int = 0, column: int = -1, state: str = "pre") -> TeacherTop1:
    """Compare the teacher's first choice with the tokens under the mask, `limit` rows at most.

    `column` of the stored states is taken for the final one, in `state`: a trainer of the speculators layout takes the last one
    for B_L ("pre"), whatever is stored there.
    """
    head, right, total = Head.load(states.model), 0, 0
    for row in states.rows[: limit or None]:
        ids, mask, columns = states.read(row)
        chosen = head.top1(columns[:, column], state)  # of row i: the guess at token i + 1
        under = mask[1:] == 1
        right += int((chosen[:-1] == ids[1:])[under].sum())
        total += int(under.sum())
    return TeacherTop1(right, total, f"column {column} as {state}")
