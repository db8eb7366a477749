"""Every column of one party against every column of the other: relative L2, cosine, largest difference, linear CKA."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hsnb.divergence.states import States, same_prompts

METRICS = {
    "relative L2": "median over tokens of |a - b| / |b|",
    "cosine": "median over tokens",
    "max abs": "largest difference of a single number",
    "linear CKA": "over all tokens at once, centred: 1 for the same up to rotation and scale",
}


BLOCK = 1 << 22  # numbers of differences that are held at once: 32 MB


@dataclass(frozen=True)
class Distances:
    """The measures of a's n columns (rows) against b's m columns: each [n, m], first tokens left out.

    `low`, `high`: the quartiles of the relative L2 over tokens. `first`: the relative L2 of the first tokens alone (median over
    prompts). `tokens`: how many tokens were compared.
    """

    a: str
    b: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    relative_l2: torch.Tensor = field(repr=False)
    low: torch.Tensor = field(repr=False)
    high: torch.Tensor = field(repr=False)
    cosine: torch.Tensor = field(repr=False)
    max_abs: torch.Tensor = field(repr=False)
    cka: torch.Tensor = field(repr=False)
    first: torch.Tensor = field(repr=False)
    tokens: int = 0

    def metric(self, name: str) -> torch.Tensor:
        """Return a matrix by its name in METRICS."""
        return {"relative L2": self.relative_l2, "cosine": self.cosine, "max abs": self.max_abs, "linear CKA": self.cka}[name]

    def frame(self):
        """Return every pair as one row of a table."""
        import pandas as pd

        pairs = [(i, j) for i in range(len(self.rows)) for j in range(len(self.columns))]
        values = {
            "relative_l2": self.relative_l2,
            "q25": self.low,
            "q75": self.high,
            "first_token": self.first,
            "cosine": self.cosine,
            "max_abs": self.max_abs,
            "linear_cka": self.cka,
        }
        rows = [{"a": self.rows[i], "b": self.columns[j], **{k: v[i, j].item() for k, v in values.items()}} for i, j in pairs]
        return pd.DataFrame(rows)

    def plot(self, metric: str = "relative L2", ax=None):
        """Draw the similarity map."""
        from hsnb.divergence.plots import similarity_map

        return similarity_map(self, metric, ax)


def distances(a: States, b: States) -> Distances:
    """Compare every column of `a` with every column of `b` on the same prompts. Raises DumpError when the ids differ."""
    same_prompts(a, b)
    x, y = a.stacked(first=False), b.stacked(first=False)  # [T, n, H], [T, m, H]
    x1, y1 = a.stacked(first=True), b.stacked(first=True)
    shape = (len(a.columns), len(b.columns))
    out = {k: torch.empty(shape, dtype=torch.float64) for k in ("relative_l2", "low", "high", "cosine", "max_abs", "first")}
    sizes = y.norm(dim=-1).clamp_min(1e-30)  # [T, m]
    firsts = y1.norm(dim=-1).clamp_min(1e-30)
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    block = max(1, BLOCK // (x.shape[0] * x.shape[2]))
    for i in range(shape[0]):
        for j in range(0, shape[1], block):
            at = slice(j, j + block)
            difference = x[:, i : i + 1] - y[:, at]  # [T, block, H]
            relative = difference.norm(dim=-1) / sizes[:, at]
            out["low"][i, at], out["relative_l2"][i, at], out["high"][i, at] = relative.quantile(quartiles, dim=0)
            out["cosine"][i, at] = torch.cosine_similarity(x[:, i : i + 1], y[:, at], dim=-1).median(dim=0).values
            out["max_abs"][i, at] = difference.abs().amax(dim=(0, 2))
            out["first"][i, at] = ((x1[:, i : i + 1] - y1[:, at]).norm(dim=-1) / firsts[:, at]).median(dim=0).values
    return Distances(a.name, b.name, a.columns, b.columns, cka=linear_cka(x, y), tokens=x.shape[0], **out)


def linear_cka(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the linear CKA [n, m] of the columns of x [T, n, H] and y [T, m, H] (Kornblith et al. 2019), by their Gram matrices.

    1: the same up to a rotation and a scale. It sees structure, not place: neighbouring boundaries are near 1 too.
    """

    def grams(z: torch.Tensor) -> torch.Tensor:
        z = (z - z.mean(dim=0)).transpose(0, 1)  # [n, T, H]
        flat = torch.bmm(z, z.transpose(1, 2)).flatten(1)  # [n, T * T]
        return flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-30)

    return grams(x) @ grams(y).T


def per_token(a: States, b: States, column_a: str, column_b: str) -> list[torch.Tensor]:
    """Return |a - b| / |b| of each token [S], first tokens included, of one pair of columns, a prompt each."""
    pairs = zip(a.column(column_a), b.column(column_b), strict=True)
    return [(x.double() - y.double()).norm(dim=-1) / y.double().norm(dim=-1).clamp_min(1e-30) for x, y in pairs]


def middle(parts: list[torch.Tensor]) -> float:
    """Return the median over all tokens but the first of each prompt."""
    return torch.cat([p[1:] for p in parts]).median().item()


def steps(states: States, found: Distances | None = None) -> dict[str, float]:
    """Return {column: relative L2 to the column that is nearest to it}: what a shift to the nearest neighbour costs."""
    matrix = (found or distances(states, states)).relative_l2.clone()
    matrix.fill_diagonal_(float("inf"))
    return dict(zip(states.columns, matrix.min(dim=0).values.tolist(), strict=True))
