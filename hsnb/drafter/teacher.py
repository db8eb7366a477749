"""Teacher top-1: how often the final state, through the target's own norm and head, gives the token that follows.

On the target's greedy answers it is above 0.99 for the right final state, and falls to 0.3-0.6 for a normed one or a boundary early:
the sharpest test of a trainer's last column, without any training. On other texts it says how predictable they are, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsnb.checks import Check
from hsnb.drafter.states import StatesFolder
from hsnb.weights import Head

RIGHT_BAR, WRONG_BAR = 0.99, 0.60  # seen: 0.999 for B_L, 0.377 for norm(B_L) stored, 0.538 for B_{L-1} stored


@dataclass(frozen=True)
class TeacherTop1:
    """`shares[what]`: share of the tokens under the mask that are the teacher's first choice, when `what` is its last column."""

    shares: dict[str, float]
    total: int

    @property
    def right(self) -> float:
        """The share for the states as they are stored."""
        return next(iter(self.shares.values()))

    def checks(self) -> list[Check]:
        """Return one line a kind of final state: the stored one has to be right, the wrong ones have to show."""
        first, *others = self.shares
        checks = [Check(f"teacher top-1, {first}", f"{self.right:.4f}", f"above {RIGHT_BAR}", self.right > RIGHT_BAR)]
        for name in others:
            share = self.shares[name]
            checks.append(Check(f"teacher top-1, {name}", f"{share:.4f}", f"below {WRONG_BAR}: the mistake would show", share < WRONG_BAR))
        return checks

    def as_dict(self) -> dict:
        """Return plain values, for --json."""
        return {"shares": self.shares, "total": self.total}

    def _repr_html_(self) -> str:
        import pandas as pd

        frame = pd.DataFrame({"stored as the final state": list(self.shares), "teacher top-1": list(self.shares.values())})
        return f"<p>n = {self.total:,} tokens</p>" + frame.to_html(index=False, border=0, float_format="{:.4f}".format)


def teacher_top1(states: StatesFolder, *, limit: int = 0, wrong: bool = False) -> TeacherTop1:
    """Compare the teacher's first choice with the tokens under the mask, `limit` rows at most.

    The last column is taken as a trainer of the speculators layout takes it: for B_L, whatever is stored there. `wrong` adds what
    two mistakes would give: norm(B_L) stored there, and the boundary before L, where `states` has it.
    """
    head, total = Head.load(states.model), 0
    stored = {f"B_{states.num_layers}" if states.final == "pre" else f"norm(B_{states.num_layers})": lambda columns: columns[:, -1]}
    if wrong:
        stored[f"norm(B_{states.num_layers})"] = lambda columns: head.normed(columns[:, -1])
        inner = [b for b in states.boundaries if b < states.num_layers]
        stored[f"B_{inner[-1]}"] = lambda columns: columns[:, states.boundaries.index(inner[-1])]
    right = dict.fromkeys(stored, 0)
    for row in states.rows[: limit or None]:
        ids, mask, columns = states.read(row)
        under = mask[1:] == 1
        total += int(under.sum())
        for name, column in stored.items():
            chosen = head.top1(column(columns)[:-1][under], "pre")  # of row i: the guess at token i + 1
            right[name] += int((chosen == ids[1:][under]).sum())
    return TeacherTop1({name: n / max(1, total) for name, n in right.items()}, total)
