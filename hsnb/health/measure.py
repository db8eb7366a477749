"""What is measured of one sample, and what is kept of all: sums of fixed size, however large the data set is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from hsnb.checks import row_faults
from hsnb.trainers import TrainingSample

MASSIVE = 10.0  # a row whose norm is so many times its sample's median is massive
PEAKS = 12  # places of the largest single values that are shown
OCTAVE, LOW, HIGH = 16, -24, 40  # the norms' histogram: bins an octave (4.4 % wide), from 2^-24 to 2^40
POSITIONS = 32  # bins: 0, 1, 2-3, 4-7, ...


@dataclass(frozen=True)
class Measured:
    """One sample: `norms` float32 [C, S]; `nan`, `zero`, `constant` bool [C, S]; `repeated` rows that equal an earlier one.

    `digest`: xxh3-128 of the states alone; `ids`: of the token ids. `peaks`: (value, column, position, dimension), a column each.
    """

    norms: np.ndarray
    nan: np.ndarray
    zero: np.ndarray
    constant: np.ndarray
    repeated: tuple[tuple[int, int], ...]
    digest: str
    ids: str
    peaks: tuple[tuple[float, int, int, int], ...]

    @property
    def medians(self) -> np.ndarray:
        """Median norm of each column [C], first token left out (it is a massive activation in most models); NaN rows too."""
        rest = self.norms[:, 1:] if self.norms.shape[1] > 1 else self.norms
        rest = np.where(np.isfinite(rest), rest, np.nan)
        return np.array([np.nanmedian(row) if np.isfinite(row).any() else np.nan for row in rest])


def measure(sample: TrainingSample) -> Measured:
    """Measure a sample's columns [S, H], one at a time in float32."""
    norms, flags, peaks, digest = [], [], [], xxhash.xxh3_128()
    rows = [xxhash.xxh3_64() for _ in range(sample.num_tokens)]
    for c, column in enumerate(sample.columns):
        raw = column.contiguous().view(torch.uint8).numpy()  # [S, H x bytes]
        digest.update(raw)
        for row, data in zip(rows, raw, strict=True):
            row.update(data)
        x = column.float()
        flags.append([fault[:, 0] for fault in row_faults(column.contiguous()[:, None])])
        norms.append(x.norm(dim=-1))
        size = torch.where(flags[-1][0], 0.0, x.abs().amax(-1))
        position = int(size.argmax())
        dimension = int(x[position].abs().argmax())
        peaks.append((float(x[position, dimension]), c, position, dimension))
    nan, zero, constant = (torch.stack(part).numpy() for part in zip(*flags, strict=True))
    odd = (nan | zero | constant).any(0)  # flagged already, and equal to each other
    seen: dict[int, int] = {}
    digests = [row.intdigest() for row in rows]
    repeated = tuple((s, first) for s, d in enumerate(digests) if not odd[s] and (first := seen.setdefault(d, s)) != s)
    ids = "" if sample.token_ids is None else xxhash.xxh3_128_hexdigest(sample.token_ids.numpy())
    return Measured(torch.stack(norms).numpy(), nan, zero, constant, repeated, digest.hexdigest(), ids, tuple(peaks))


def position_bins(positions: np.ndarray) -> np.ndarray:
    """Return 0 for position 0 and 1 + floor(log2 p) for p: single at the start, where the odd ones are."""
    return np.where(positions == 0, 0, 1 + np.floor(np.log2(np.maximum(positions, 1)))).astype(np.int64)


@dataclass
class Sums:
    """What is kept of the samples that were looked at; `columns` is C."""

    columns: int
    looked: int = 0
    counts: np.ndarray = field(init=False)  # int64 [C, POSITIONS, bins]: rows by norm
    medians: list[np.ndarray] = field(default_factory=list)  # [C] a sample
    names: list[str] = field(default_factory=list)
    massive: Counter = field(default_factory=Counter)  # (column, token id, is it position 0)
    peaks: dict[tuple, tuple] = field(default_factory=dict)  # {(column, dimension, token): (size, value, sample, position)}, the largest
    peak_counts: Counter = field(default_factory=Counter)  # samples that had their largest value there
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)  # of states: (sample, digest of ids)
    twins: list[tuple[str, str, bool]] = field(default_factory=list)  # (first, second, the same ids?)
    bad: dict[str, list[tuple[str, int, int]]] = field(default_factory=lambda: {k: [] for k in ("nan", "zero", "constant")})
    bad_rows: Counter = field(default_factory=Counter)
    repeated: list[tuple[str, int, int]] = field(default_factory=list)

    def __post_init__(self):
        self.counts = np.zeros((self.columns, POSITIONS, (HIGH - LOW) * OCTAVE), np.int64)

    def add(self, sample: TrainingSample, found: Measured) -> None:
        """Add one measured sample."""
        self.looked += 1
        self.names.append(sample.name)
        medians = found.medians
        self.medians.append(medians)
        at = position_bins(np.arange(sample.num_tokens))
        good = np.isfinite(found.norms) & (found.norms > 0)
        bins = np.clip((np.log2(np.where(good, found.norms, 1.0)) - LOW) * OCTAVE, 0, self.counts.shape[2] - 1).astype(np.int64)
        for c in range(self.columns):
            np.add.at(self.counts[c], (at[good[c]], bins[c][good[c]]), 1)
        token = sample.token_ids.tolist() if sample.token_ids is not None else [-1] * sample.num_tokens
        for c, s in zip(*np.nonzero(good & (found.norms > MASSIVE * medians[:, None])), strict=True):
            self.massive[int(c), token[s], bool(s == 0)] += 1
        for value, c, position, dimension in found.peaks:
            place = (c, dimension, token[position])
            self.peak_counts[place] += 1
            self.peaks[place] = max(self.peaks.get(place, (0.0,)), (abs(value), value, sample.name, position))
        for kind in self.bad:
            where = np.argwhere(getattr(found, kind))
            self.bad_rows[kind] += len(where)
            self.bad[kind] += [(sample.name, int(s), int(c)) for c, s in where[: max(0, 5 - len(self.bad[kind]))]]
        self.repeated += [(sample.name, *pair) for pair in found.repeated]
        first = self.digests.setdefault(found.digest, (sample.name, found.ids))
        if first[0] != sample.name:
            self.twins.append((first[0], sample.name, first[1] == found.ids))

    def quantiles(self, column: int, position: slice | int, at: tuple[float, ...]) -> list[float]:
        """Return the norms below which the shares `at` of the rows of `column` are, at these position bins; NaN for no row."""
        counts = self.counts[column, position]
        counts = counts.sum(0) if counts.ndim > 1 else counts
        total = counts.cumsum()
        if not total[-1]:
            return [float("nan")] * len(at)
        bins = [int(np.searchsorted(total, share * total[-1])) for share in at]
        return [float(2 ** (LOW + (b + 0.5) / OCTAVE)) for b in bins]
