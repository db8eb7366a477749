"""The health of a data set as a result: shown in a notebook, printed, saved, and drawn, all from the same numbers."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hsnb.health.findings import Finding
from hsnb.health.measure import POSITIONS, Sums
from hsnb.health.text import Text
from hsnb.paths import write_json

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Norms:
    """Norms of rows: `of_columns` [C, 3] over all positions but the first, `of_positions` [C, bins, 3] (5 %, median, 95 %)."""

    columns: tuple[str, ...]
    of_columns: np.ndarray
    of_positions: np.ndarray
    starts: tuple[int, ...]  # first position of each bin

    @classmethod
    def of(cls, sums: Sums, columns: tuple[str, ...]) -> Norms:
        used = [p for p in range(POSITIONS) if sums.counts[:, p].any()]
        over = np.array([sums.quantiles(c, slice(1, None), QUANTILES) for c in range(sums.columns)]).reshape(-1, 3)
        at = np.array([[sums.quantiles(c, p, QUANTILES) for p in used] for c in range(sums.columns)]).reshape(sums.columns, -1, 3)
        return cls(columns, over, at, tuple(0 if p == 0 else 2 ** (p - 1) for p in used))


@dataclass(frozen=True)
class Health:
    """What was found in a data set. `looked`: samples whose states were read; `lengths` and `trained` tokens: of those and more."""

    folder: Path
    layout: str
    samples: int
    looked: int
    columns: tuple[str, ...]
    findings: tuple[Finding, ...]
    norms: Norms = field(repr=False)
    massive: tuple[dict[str, Any], ...] = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    trained: np.ndarray = field(repr=False)
    texts: tuple[Text, ...] = field(repr=False)
    note: str = ""

    @property
    def ok(self) -> bool:
        """True when nothing was found that no trainer should be given; what is only worth a look does not count."""
        return self.looked > 0 and not any(f.level == "FAIL" for f in self.findings)

    @property
    def verdict(self) -> str:
        return "FAIL" if not self.ok else "LOOK" if self.findings else "PASS"

    def frame(self):
        """Return the findings as a table; one row that says so when there is none."""
        import pandas as pd

        rows = [{"result": f.level, "finding": f.what, "where": "; ".join(f.where)} for f in self.findings]
        return pd.DataFrame(rows or [{"result": "pass", "finding": "nothing found", "where": ""}])

    def norm_frame(self):
        """Return the norms of each column: quantiles over all positions but the first, and the median of the first token."""
        import pandas as pd

        first = self.norms.of_positions[:, 0, 1] if self.norms.starts[:1] == (0,) else np.full(len(self.columns), np.nan)
        low, middle, high = self.norms.of_columns.T if len(self.columns) else (np.array([]),) * 3
        return pd.DataFrame({"state": list(self.columns), "norm, 5 %": low, "median": middle, "95 %": high, "first token": first})

    def massive_frame(self):
        """Return the largest single values."""
        import pandas as pd

        return pd.DataFrame(list(self.massive))

    def plot(self, ax=None):
        """Draw the norms by position, a line a column."""
        from hsnb.health.plots import norms

        return norms(self, ax)

    def plot_lengths(self, ax=None):
        """Draw the lengths."""
        from hsnb.figures import lengths

        return lengths(self.lengths, ax=ax)

    def plot_mask(self, ax=None):
        """Draw how much of each sample is trained."""
        from hsnb.health.plots import coverage

        return coverage(self, ax)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for --json and the index."""
        return {
            "ok": self.ok, "verdict": self.verdict, "folder": str(self.folder), "layout": self.layout, "samples": self.samples,
            "looked": self.looked, "columns": list(self.columns), "findings": [asdict(f) for f in self.findings],
            "norms": self.norm_frame().astype(object).where(lambda t: t.notna(), None).to_dict("records"), "massive": list(self.massive),
            "tokens": int(self.lengths.sum()), "trained": int(self.trained.sum()), "note": self.note,
        }  # fmt: skip

    def save(self, folder: Path) -> Path:
        """Write health.json beside the run's notebooks."""
        return write_json(folder / "health.json", self.as_dict())

    @property
    def about(self) -> str:
        """Say what was looked at."""
        part = "all of them" if self.looked == self.samples else f"{self.looked:,} of them, spread evenly"
        masks = f"masks and lengths of {len(self.lengths):,}"
        return f"{self.folder}: layout {self.layout}, {self.samples:,} samples; states of {part}; {masks}"

    def text(self) -> str:
        """Return it in lines, for a terminal."""
        lines = [f"{f.level:5} {f.what}" + (f" ({'; '.join(f.where)})" if f.where else "") for f in self.findings]
        return "\n".join([f"{self.verdict}: {self.about}", *lines])

    def _repr_html_(self) -> str:
        return (
            f"<p><b>Verdict: {self.verdict}</b></p><p>{html.escape(self.about)}</p>"
            + self.frame().to_html(index=False, border=0)
            + self.norm_frame().to_html(index=False, border=0, float_format="{:.4g}".format)
        )
