"""Two parties on the same prompts: maps, offsets, noise beside the cost of a shift, the norm of the final, its logprobs."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

import torch

from hsnb.divergence import offsets as off
from hsnb.divergence.measure import Distances, distances, per_token, steps
from hsnb.divergence.pairs import Pair, bar, judge, partners
from hsnb.divergence.states import States
from hsnb.show import token
from hsnb.weights import Head

PLAIN = 10.0  # the norm state is found when the other one's logprobs are this many times further off


@dataclass(frozen=True)
class Final:
    """Whether a party's last state is before or after the norm, found from the logprobs that the head makes of it.

    `pre`, `post`: mean |rebuilt - given| log p in nats, taking the state to be before, or after, the norm. `witness`: whose
    logprobs were given.
    """

    party: str
    column: str
    pre: float
    post: float
    witness: str

    @property
    def state(self) -> str:
        """Return pre, post or undecided."""
        near, far = sorted((self.pre, self.post))
        return "undecided" if not far > PLAIN * near else "pre" if self.pre < self.post else "post"


@dataclass(frozen=True)
class Boundary:
    """One number that both parties have: their relative L2 on it (quartiles over tokens, the first ones apart), and what else it is beside.

    `noise`: of the numerics, as measured; `half_noise`: of bfloat16 (None where transformers does not fit); `shift`: what taking
    the nearest neighbour would cost.
    """

    number: int
    error: float
    low: float
    high: float
    first: float
    noise: float
    half_noise: float | None
    shift: float


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured. `offsets`: a's columns on b's; `witnessed`: {party: its columns on transformers'}.

    `alone`: a's columns whose number b has not, and that fit none of b's.
    """

    a: str
    b: str
    dtype: str
    found: Distances = field(repr=False)
    offsets: tuple[off.Offset, ...] = field(repr=False)
    witnessed: dict[str, tuple[off.Offset, ...]] = field(repr=False)
    boundaries: tuple[Boundary, ...] = field(repr=False)
    alone: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = field(default=(), repr=False)
    finals: tuple[Final, ...] = ()
    logprob_gap: tuple[float, float] | None = None  # mean and largest |a - b| of the next tokens' log p, nats
    tokens: tuple[dict, ...] = field(default=(), repr=False)

    @property
    def verdict(self) -> str:
        """Return one word for all pairs.

        "unrelated", "shifted", "norm" or "undecided" when one of them is; "found" when only one party has numbers; "apart" when
        the same boundaries differ by more than numerics explain; "mislabelled" when both hold the same, and transformers says
        that it is not what they say; else "agree".
        """
        verdicts = {p.verdict for p in self.pairs}
        if not verdicts:
            return "found" if any(o.verdict == "found" for o in self.offsets) else "unrelated"
        if found := next((v for v in ("unknown", "shifted", "norm", "undecided") if v in verdicts), ""):
            return "unrelated" if found == "unknown" else found
        if any(p.error > p.bar for p in self.pairs):
            return "apart"
        return "mislabelled" if any(o.verdict == "shifted" for found in self.witnessed.values() for o in found) else "agree"

    def _repr_html_(self) -> str:
        said = f"<p><b>{html.escape(self.a)}</b> on <b>{html.escape(self.b)}</b>, {self.dtype}, n = {self.found.tokens:,} tokens: {self.verdict}</p>"
        return said + self.offset_frame().to_html(index=False, border=0, float_format="{:.3g}".format)

    def frame(self):
        """Return a row for each boundary that both have."""
        import pandas as pd

        return pd.DataFrame([vars(b) for b in self.boundaries])

    def offset_frame(self):
        """Return a row for each of a's columns."""
        return off.frame(self.offsets)

    def token_frame(self):
        """Return where it hurts: the tokens with the largest difference and those with the largest norm."""
        import pandas as pd

        return pd.DataFrame([{**row, "token": token(row["token"])} for row in self.tokens])

    def plot(self, ax=None):
        """Draw numerics beside the cost of a shift."""
        from hsnb.divergence.plots import noise_and_shift

        return noise_and_shift(self, ax)

    def plot_map(self, metric: str = "relative L2", ax=None):
        """Draw the similarity map."""
        return self.found.plot(metric, ax)

    def plot_tokens(self, ax=None):
        """Draw the difference at every position."""
        from hsnb.divergence.plots import positions

        return positions(self, ax)

    def as_dict(self) -> dict:
        """Return everything as plain values."""
        return {
            "a": self.a,
            "b": self.b,
            "dtype": self.dtype,
            "verdict": self.verdict,
            "alone": list(self.alone),
            "pairs": [vars(p) for p in self.pairs],
            "offsets": [o.as_dict() for o in self.offsets],
            "witnessed": {name: [o.as_dict() for o in found] for name, found in self.witnessed.items()},
            "boundaries": [vars(b) for b in self.boundaries],
            "finals": [{**vars(f), "state": f.state} for f in self.finals],
            "logprob_gap": self.logprob_gap,
            "map": {"rows": self.found.rows, "columns": self.found.columns, "relative_l2": self.found.relative_l2.tolist()},
            "tokens": list(self.tokens),
        }


def compare(
    a: States,
    b: States,
    noise: dict[str, float],
    *,
    reference: States | None = None,
    reference_noise: dict[str, float] | None = None,
    half_noise: dict[int, float] | None = None,
    head: Head | None = None,
    names: dict[int, tuple[str, list[str]]] | None = None,
) -> Comparison:
    """Compare two parties on the same token ids.

    `noise`: {column of b: relative L2}; `reference`, `reference_noise`: transformers and the noise of its columns; `half_noise`:
    {boundary: relative L2 of bfloat16}; `names`: {prompt number: (its name, its tokens as text)}. Raises DumpError when the token
    ids differ.
    """
    found = distances(a, b)
    cost = steps(b)
    witnessed, known = {}, steps(reference) if reference is not None else {}
    if reference is not None:
        for party in (a, b):
            if party.name != reference.name:
                witnessed[party.name] = off.find_offsets(distances(party, reference), party, reference, known, reference_noise or {})
    dtype = max(a.dtype, b.dtype, key=lambda d: ("float32", "float16", "bfloat16").index(d))
    common = {k: (name, b.numbered()[k]) for k, name in a.numbered().items() if k in b.numbered()}
    true_steps = {k: known[name] for k, name in reference.numbered().items()} if reference is not None else {}
    boundaries = []
    for k, (x, y) in common.items():
        i, j = a.columns.index(x), b.columns.index(y)
        spread = (found.relative_l2[i, j], found.low[i, j], found.high[i, j], found.first[i, j])
        shift = true_steps.get(k, cost[y])
        boundaries.append(Boundary(k, *(v.item() for v in spread), noise[y], (half_noise or {}).get(k), shift))
    offsets = off.find_offsets(found, a, b, cost, noise)
    alone = [o.column for o in offsets if o.verdict == "unknown" and o.said is not None and b.numbered() and o.said not in b.numbered()]
    pairs = []
    for number, x, y in partners(a, b):
        error, most = found.relative_l2[a.columns.index(x), b.columns.index(y)].item(), bar(dtype, number, noise[y])
        seen = [next((o for o in witnessed.get(p.name, ()) if o.column == c), _itself(p, c, reference)) for p, c in ((a, x), (b, y))]
        near = number is not None and bool({number - 1, number + 1} & set(b.numbered()))
        direct = next(o for o in offsets if o.column == x)
        a_is, b_is, verdict = judge(*seen, direct, y, error, most, near)
        pairs.append(Pair(number, x, y, a_is, b_is, error, most, verdict))
    finals = tuple(f for f in (_final(p, [a, b, reference], head) for p in (a, b)) if f) if head else ()
    return Comparison(
        a.name,
        b.name,
        dtype,
        found,
        tuple(o for o in offsets if o.column not in alone),
        witnessed,
        tuple(boundaries),
        tuple(alone),
        tuple(pairs),
        finals,
        _gap(a, b, finals, head),
        tuple(_where(a, b, common, names or {})),
    )


def _itself(party: States, column: str, reference: States | None) -> off.Offset | None:
    """Return the fit of transformers' own column, when it is a party itself: each is what it is called."""
    if reference is None or party.name != reference.name:
        return None
    return off.Offset(column, None, column, None, 0.0, "none", float("inf"), 1.0, 0.0)


def _final(party: States, parties: list[States | None], head: Head) -> Final | None:
    """Rebuild the next tokens' logprobs from the party's last state both ways; its own logprobs judge, else another's."""
    witness = next((p for p in [party, *parties] if p is not None and p.logprobs), None)
    if not party.final or witness is None:
        return None
    errors: dict[str, list[torch.Tensor]] = {"pre": [], "post": []}
    for ids, states, given in zip(party.token_ids, party.column(party.final), witness.logprobs, strict=True):
        for state, found in errors.items():
            found.append((head.logprobs(states[:-1], ids[1:], state).double() - given[: len(ids) - 1]).abs())
    means = {state: torch.cat(found).mean().item() for state, found in errors.items()}
    return Final(party.name, party.final, means["pre"], means["post"], witness.name)


def _gap(a: States, b: States, finals: tuple[Final, ...], head: Head | None) -> tuple[float, float] | None:
    states = {f.party: f.state for f in finals}
    if head is None or len(states) < 2 or "undecided" in states.values():
        return None
    gaps = []
    for ids, x, y in zip(a.token_ids, a.column(a.final), b.column(b.final), strict=True):
        one, other = (head.logprobs(s[:-1], ids[1:], states[p.name]) for s, p in ((x, a), (y, b)))
        gaps.append((one - other).abs())
    gap = torch.cat(gaps)
    return gap.mean().item(), gap.max().item()


def _where(a: States, b: States, common: dict[int, tuple[str, str]], names: dict[int, tuple[str, list[str]]]) -> list[dict]:
    """Return a row for every token: its relative L2 (median and largest over the common boundaries), and its norm among the others'."""
    if not common:
        return []
    errors = torch.stack([torch.cat(per_token(a, b, x, y)) for x, y in common.values()])  # [K, T]
    sizes = torch.stack([torch.cat([(n := s.double().norm(dim=-1)) / n.median() for s in b.column(y)]) for _, y in common.values()])
    worst, which = errors.max(dim=0)
    numbers, rows, at = list(common), [], 0
    for p, ids in enumerate(b.token_ids):
        name, words = names.get(p, (str(p), [str(i) for i in ids.tolist()]))
        for position, word in enumerate(words[: len(ids)]):
            t = at + position
            rows.append(
                {
                    "prompt": name,
                    "position": position,
                    "token": word,
                    "relative_l2": errors[:, t].median().item(),
                    "largest": worst[t].item(),
                    "at_boundary": numbers[int(which[t])],
                    "norm_over_median": sizes[:, t].max().item(),
                }
            )
        at += len(ids)
    return rows
