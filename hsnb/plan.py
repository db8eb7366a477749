"""A plan: what a run will be, before anything starts. Samples, tokens, bytes, room, and every reason not to begin."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hsnb.errors import DataError, HsnbError
from hsnb.limits import Limits
from hsnb.measure import Measured
from hsnb.sizes import both, bytes_per_token, decimal

ITEMSIZE = 2  # the layouts hold bfloat16


@dataclass(frozen=True)
class Room:
    """A folder's file system: bytes free, bytes needed there (still to be written), and what is to stay free of them."""

    path: Path
    free: int
    need: int
    floor: int = 0

    @property
    def enough(self) -> bool:
        return self.need <= self.free - self.floor


@dataclass(frozen=True)
class Plan:
    """A run's size and room. `samples` None: only a number of tokens was given. Displays itself; `require` raises the first refusal."""

    name: str
    source: str  # what the tokens were counted from
    tokens: int
    samples: int | None
    shard_tokens: tuple[int, ...]  # of every shard
    boundaries: tuple[int, ...]
    final: str
    hidden_size: int
    longest: int  # tokens of the longest sample to be extracted
    limits: Limits
    max_length: int
    output: Room
    spool: Room  # its need: the longest sample, in the engine's own dtype
    written: int  # bytes of this run that are there already
    too_long: int = 0
    skipped: int = 0
    truncated: int = 0
    unmasked: int = 0
    all_masked: int = 0
    masked_tokens: int | None = None
    refusals: tuple[HsnbError, ...] = ()
    hours: float | None = None
    measured: Measured | None = None
    lengths: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def columns(self) -> int:
        """Return the vectors a token: the boundaries and the final state."""
        return len(self.boundaries) + 1

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.columns, self.hidden_size, ITEMSIZE)

    @property
    def bytes(self) -> int:
        """Return the bytes of all states; files add their ids and headers (`output.need`)."""
        return self.tokens * self.bytes_per_token

    @property
    def ok(self) -> bool:
        return not self.refusals

    def require(self) -> Plan:
        """Raise the first refusal; return self when there is none."""
        for refusal in self.refusals:
            raise refusal
        return self

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (quantity, value, note) of everything that is known."""
        takes = self.limits.longest
        rows = [("counted from", self.source, "")]
        if self.samples is not None:
            rows += [
                ("samples", f"{self.samples:,}", f"{self.skipped:,} more are skipped" if self.skipped else ""),
                ("too long", f"{self.too_long:,}", self._handled()),
                ("tokens trained", f"{self.masked_tokens:,}", f"{self.masked_tokens / max(1, self.tokens):.0%} of the tokens"),
                ("mask of nothing but 0", f"{self.unmasked:,} samples", "CHECK: they train nothing" if self.unmasked else ""),
                ("mask of nothing but 1", f"{self.all_masked:,} samples", "CHECK: the prompt is trained too" if self.all_masked else ""),
                ("longest sample", f"{self.longest:,} tokens", f"{both(self.longest * self.bytes_per_token)} of states"),
            ]
        rows += [
            ("tokens", f"{self.tokens:,}", ""),
            ("the server takes", f"{takes:,} tokens a prompt" if takes else "not known yet", self.limits.words()),
            ("bytes a token", f"{self.bytes_per_token:,}", f"{self.columns} vectors x {self.hidden_size} x {ITEMSIZE} bytes"),
            ("states in all", both(self.bytes), f"B_{', B_'.join(map(str, self.boundaries))} and the final state, bfloat16"),
            ("the largest shard", both(max(self.shard_tokens) * self.bytes_per_token), f"of {len(self.shard_tokens)}"),
            (
                "output",
                f"{both(self.output.free)} free",
                f"{self.output.path}: {both(self.output.need)} to write, {both(self.output.floor)} stay free",
            ),
            ("written already", both(self.written), ""),
            ("spool", f"{both(self.spool.free)} free", f"{self.spool.path}: the longest sample takes {both(self.spool.need)}"),
            ("writing speed", f"{self.bytes_per_token * 1e4 / 1e9:.2f} GB/s", "for each 10,000 prefill tokens/s"),
        ]
        if self.hours:
            rate = self.tokens / self.hours / 3600
            rows.append((f"for {self.hours:g} h", f"{rate:,.0f} tokens/s", f"{decimal(rate * self.bytes_per_token)}/s to write"))
        return rows + (self.measured.rows(self.tokens, self.bytes) if self.measured else [])

    def _handled(self) -> str:
        what = [f"{n:,} {word}" for n, word in ((self.skipped, "skipped"), (self.truncated, "cut")) if n]
        return " and ".join(what) or (
            "refused" if self.too_long else f"none over {min(self.max_length, self.limits.longest or self.max_length):,}"
        )

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=["quantity", "value", "note"])

    def plot(self, ax: Any = None) -> Any:
        """Draw the length histogram. Raises DataError when only a number of tokens was given."""
        from hsnb import figures

        if self.lengths is None:
            raise DataError(
                got="a plan of a number of tokens", expected="samples", likely="--tokens was given", next="plan the data set itself"
            )
        return figures.lengths(self.lengths, max_length=self.max_length, server_takes=self.limits.longest, ax=ax)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for --json."""
        names = (
            "name", "source", "samples", "tokens", "masked_tokens", "too_long", "skipped", "truncated", "unmasked", "all_masked", "longest",
            "boundaries", "final", "hidden_size", "columns", "bytes_per_token", "bytes", "written", "max_length",
        )  # fmt: skip
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in names},
            "size": both(self.bytes),
            "shards": [{"tokens": tokens, "bytes": tokens * self.bytes_per_token} for tokens in self.shard_tokens],
            "server_takes": self.limits.longest,
            **{
                name: {"path": str(r.path), "free": r.free, "need": r.need, "floor": r.floor, "enough": r.enough}
                for name, r in (("output", self.output), ("spool", self.spool))
            },
            "tokens_per_s_needed": self.tokens / self.hours / 3600 if self.hours else None,
            "measured": self.measured.as_dict(self.tokens) if self.measured else None,
            "refusals": [{"type": type(e).__name__, **e.as_dict()} for e in self.refusals],
        }

    def text(self) -> str:
        """Return the rows for a terminal, and the refusals after them."""
        rows = self.rows()
        width = [max(len(row[at]) for row in rows) for at in (0, 1)]
        lines = [f"{what:{width[0]}}  {value:{width[1]}}  {note}".rstrip() for what, value, note in rows]
        return "\n".join([*lines, *map(str, self.refusals)])

    def _repr_html_(self) -> str:
        refused = "".join(f"<p><b>{html.escape(str(error))}</b></p>" for error in self.refusals)
        return (
            f"<p>Plan of {html.escape(self.name)}: {html.escape(both(self.bytes))}</p>"
            + self.frame().to_html(index=False, border=0)
            + refused
        )
