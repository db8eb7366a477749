"""The accept length that greedy serving with a drafter will show, from a dump alone: no server, no logits, no final state.

For every position of the target's own greedy answers the drafter's next tokens are computed at once, and then the server's walk is
walked: verify at a root, accept the leading drafts that are the text's, go on behind them. Exact in float32 for chains (topk 1) at
temperature 0; plain averages over all positions come out 1-2 % higher, because a walk does not visit every position.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hsnb.drafter.config import fed, trained_on
from hsnb.drafter.model import Drafter, load_drafter
from hsnb.drafter.states import StatesFolder
from hsnb.errors import DataError

STEPS = 3  # drafts a verification: --speculative-num-steps


@dataclass(frozen=True)
class Acceptance:
    """What was accepted. `histogram[j]`: verifications in which j drafts were right; `served`: counted by a server, not predicted.

    `at_position[k]`: of all positions of the answers, the share at which drafts 0..k are all right (() when served).
    `coverage`: share of the answers' tokens that are in the draft vocabulary; the others can never be drafted.
    """

    histogram: tuple[int, ...]
    samples: int
    tokens: int  # of the answers
    boundaries: tuple[int, ...] = ()
    at_position: tuple[float, ...] = ()
    coverage: float = 0.0
    drafter: str = ""
    served: bool = False

    @property
    def verifications(self) -> int:
        return sum(self.histogram)

    @property
    def accept_length(self) -> float:
        """Tokens a verification: 1 + accepted drafts / verifications (the prefill's own token is not counted)."""
        return 1 + sum(j * n for j, n in enumerate(self.histogram)) / max(1, self.verifications)

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of verifications in which draft k was accepted."""
        return tuple(sum(self.histogram[k + 1 :]) / max(1, self.verifications) for k in range(len(self.histogram) - 1))

    def as_dict(self) -> dict:
        """Return everything as plain values, for --json."""
        more = {"verifications": self.verifications, "accept_length": self.accept_length, "per_position": list(self.per_position)}
        return {**asdict(self), **more}

    def frame(self):
        """Return one row a draft position."""
        import pandas as pd

        rows = {"draft": range(1, len(self.histogram)), "accepted, of verifications": self.per_position}
        if self.at_position:
            rows["right, of all positions"] = self.at_position
        return pd.DataFrame(rows)

    def plot(self, ax=None):
        """Draw the share accepted per draft position."""
        from hsnb.drafter.figures import acceptance

        return acceptance({Path(self.drafter).name or "drafter": self}, ax)

    def text(self) -> str:
        """Return the result in one line, for a terminal."""
        positions = ", ".join(f"{p:.3f}" for p in self.per_position)
        how = "served" if self.served else "predicted"
        return (
            f"accept length {self.accept_length:.3f} ({how}; accepted per draft {positions}; "
            f"{self.verifications:,} verifications, {self.samples} answers, {self.tokens:,} tokens)"
        )

    def _repr_html_(self) -> str:
        fed_with = f", fed with boundaries {list(self.boundaries)}" if self.boundaries else ""
        return f"<p>{html.escape(self.text() + fed_with)}</p>" + self.frame().to_html(index=False, border=0, float_format="{:.3f}".format)


def accept(
    drafter: str | Path | Drafter,
    states: StatesFolder,
    *,
    boundaries: Sequence[int] = (),
    steps: int = STEPS,
    limit: int = 0,
    sglang: str = "0.5.23",
) -> Acceptance:
    """Predict what a server will accept of this drafter on the answers under the mask of `states`, `limit` rows at most.

    An answer's last `steps` tokens are only looked at as what drafts have to hit, so that this is the walk of a request for
    max_new_tokens = its length - `steps` (a server's last drafts may go beyond what was asked for, and count).
    `boundaries`: what it is fed with; left out, what this SGLang would feed it by its config (a trainer's folder: what it was
    trained on). The answers have to be the target's own greedy ones (`hsnb.drafter.teacher` tells), else this is another number.
    Raises DataError where `states` has no column for a boundary, BoundaryError or ModelError for a drafter that cannot be run.
    """
    loaded = drafter if isinstance(drafter, Drafter) else load_drafter(Path(drafter), states.model)
    wanted = tuple(sorted(boundaries)) or _boundaries(loaded, states, sglang)
    if (missing := sorted(set(wanted) - set(states.boundaries))) or len(wanted) != loaded.num_aux:
        raise DataError(
            got=f"{states.path} with boundaries {list(states.boundaries)}",
            expected=f"boundaries {list(wanted)}, for a drafter of {loaded.num_aux} aux states",
            likely=f"boundary {missing[0]} was not captured" if missing else "another number of boundaries than the drafter's",
            next="capture these boundaries, or name the right ones",
        )
    columns = [states.boundaries.index(b) for b in wanted]
    histogram, right, positions = [0] * (steps + 1), [0] * steps, 0
    covered = answered = 0
    rows = states.rows[: limit or None]
    known = torch.zeros(len(loaded.embedding), dtype=torch.bool)
    known[loaded.tokens] = True
    for row in rows:
        ids, mask, columns_of = states.read(row)
        first = int(mask.argmax())
        answer = ids[first:]
        hits = _hits(loaded.drafts(ids, columns_of[:, columns], steps), ids)
        for j in _walk(hits, first - 1, len(ids) - steps - 2):
            histogram[j] += 1
        roots = hits[first - 1 : len(ids) - steps - 1]  # those that have `steps` tokens of the text to guess
        right = [n + int((roots > k).sum()) for k, n in enumerate(right)]
        positions += len(roots)
        covered, answered = covered + int(known[answer].sum()), answered + len(answer)
    share = tuple(n / max(1, positions) for n in right)
    return Acceptance(tuple(histogram), len(rows), answered, wanted, share, covered / max(1, answered), str(drafter_path(drafter)))


def drafter_path(drafter) -> str:
    """Return where a drafter came from, "" when that is not known."""
    if isinstance(drafter, Drafter):
        return str(drafter.config.path.parent) if drafter.config.path else ""
    return str(drafter)


def _boundaries(drafter: Drafter, states: StatesFolder, sglang: str) -> tuple[int, ...]:
    target = states.target_config()
    if drafter.config.kind == "speculators":
        said = trained_on(drafter.config, target_config=target)
        return said.boundaries if said else ()
    return fed(drafter.config, "sglang", sglang, target_config=target).boundaries


def _hits(drafts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return how many leading drafts of each root are the text's own tokens, int64 [S - 1]; beyond the text nothing is right."""
    roots, steps = drafts.shape
    padded = torch.cat([ids[2:], ids.new_full((steps,), -1)])
    text = padded.unfold(0, steps, 1)[:roots]  # [S - 1, steps]: tokens i+2, i+3, ...
    return (drafts == text).long().cumprod(1).sum(1)


def _walk(hits: torch.Tensor, root: int, end: int) -> list[int]:
    """Return the accepted drafts of every verification of one answer, from `root` on, as long as the root lies before `end`."""
    accepted = []
    while root < end:
        n = int(hits[root])
        accepted.append(n)
        root += n + 1
    return accepted
