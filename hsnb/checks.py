"""Checks of one dump against what was asked for: the same for the probe (all of them shown) and the extraction (one fails, all stop)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from hsnb.dumps import Dump
from hsnb.errors import DumpError

_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}  # the bits of infinity; NaN is above
_BLOCK = 1 << 20  # bytes
Faults = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # bool [S, columns] each: not finite, zero, constant


@dataclass(frozen=True)
class Check:
    """One line of a verdict: what was measured, the bar and where it comes from, and what this check cannot see."""

    name: str
    value: str
    threshold: str
    ok: bool
    blind_to: str = ""
    source: str = ""  # of the threshold
    not_proved: bool = False  # not ok, and not wrong either: the noise hides what it would show

    @property
    def result(self) -> str:
        return "pass" if self.ok else "NOT PROVED" if self.not_proved else "FAIL"

    def as_dict(self) -> dict:
        return {**asdict(self), "result": self.result}


@dataclass(frozen=True)
class Asked:
    """What a request asked for: int token ids [S], the server's boundaries and final state, its width and dtype."""

    token_ids: torch.Tensor
    boundaries: tuple[int, ...]
    final: str
    hidden_size: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """S x (K + 1) x H x bytes a number."""
        return len(self.token_ids) * (len(self.boundaries) + 1) * self.hidden_size * getattr(torch, self.dtype).itemsize


def dump_checks(dump: Dump, asked: Asked) -> list[Check]:
    """Compare a dump with what was asked: labels, rows, width, dtype, bytes, token echo, and rows that cannot be states."""
    return [*label_checks(dump, asked), *row_checks(dump, row_faults(dump.states()))]


def label_checks(dump: Dump, asked: Asked) -> list[Check]:
    """Those of the checks that need no state."""
    checks = [
        _equal("boundaries", dump.describe(dump.boundaries), str(list(asked.boundaries)), "whether the tensor is the one the label says"),
        _equal("final state", dump.final, asked.final, "whether the norm was really applied"),
        _equal("rows", dump.num_tokens, len(asked.token_ids), "rows in another order"),
        _equal("columns", dump.columns, len(asked.boundaries) + 1),
        _equal("hidden size", dump.hidden_size, asked.hidden_size),
        _equal("dtype", str(dump.dtype).removeprefix("torch."), asked.dtype),
        _equal("bytes of states", dump.nbytes, asked.nbytes),
    ]
    ids = dump.token_ids
    same = ids is not None and torch.equal(ids, asked.token_ids.to(torch.int64))
    checks.append(
        Check("token echo", "equal" if same else "other ids", "the ids that were sent", same, "states of another request under these ids")
    )
    return checks


def row_checks(dump: Dump, faults: Faults) -> Iterable[Check]:
    """Count rows that no forward pass gives: NaN or infinite, all zero, constant over the width; as row_faults found them."""
    names = [*(f"B_{b}" for b in dump.boundaries), "final"] if not isinstance(dump.boundaries, str) else list(map(str, range(dump.columns)))
    for what, bad in zip(("finite rows", "rows not zero", "rows not constant"), faults, strict=True):
        where = bad.nonzero()
        value = f"{len(where)} bad" if not len(where) else f"{len(where)} bad, first: row {int(where[0, 0])} of {names[int(where[0, 1])]}"
        yield Check(what, value, "0 bad", not len(where), "plausible states of another place")


def row_faults(states: torch.Tensor) -> Faults:
    """Return which rows of [S, columns, H] are not finite, zero, or constant and neither: bool [S, columns] each."""
    if states.dtype not in _EXPONENTS:
        low, high = states.amin(-1), states.amax(-1)  # NaN is passed on
        wild = ~(torch.isfinite(low) & torch.isfinite(high))
        return wild, (low == 0) & (high == 0), (low == high) & (low != 0) & ~wild
    look = RowLook(*states.shape, states.dtype)
    look.add(memoryview(states.contiguous().view(torch.uint8).numpy().reshape(-1)))
    return look.faults()


class RowLook:
    """Look at the rows of [S, columns, H] as their bytes come, for `row_faults`; `dtype`: bfloat16, float16 or float32.

    By numpy and in blocks that stay in a core's cache: this is done to every byte that is extracted, by several threads, and
    torch's own threads and its slow minimum of 16-bit floats cost three times as much (docs/performance.md).
    """

    def __init__(self, rows: int, columns: int, width: int, dtype: torch.dtype):
        self.columns, self.width, self.dtype = columns, width, dtype
        self._signed = np.dtype(f"i{dtype.itemsize}")
        self._unsigned = np.dtype(f"u{dtype.itemsize}")
        self._most = np.empty((rows, columns), self._signed)
        self._most_negative = np.empty((rows, columns), self._unsigned)
        self._constant = np.empty((rows, columns), bool)
        self._seen = 0
        self._part = bytearray()  # of a row whose rest is to come
        self.row_bytes = columns * width * dtype.itemsize

    def add(self, data: memoryview) -> None:
        """Look at the next bytes, which may end within a row. Raises ValueError for more rows than there are to be, or rows of nothing."""
        if not self.row_bytes:
            raise ValueError("rows without a number")
        if self._part:
            missing = self.row_bytes - len(self._part)
            self._part += data[:missing]
            data = data[missing:]
            if len(self._part) < self.row_bytes:
                return
            self._add_rows(self._part)
            self._part = bytearray()
        whole = len(data) // self.row_bytes * self.row_bytes
        self._add_rows(data[:whole])
        self._part += data[whole:]

    def _add_rows(self, data) -> None:
        bits = np.frombuffer(data, self._signed).reshape(-1, self.columns, self.width)
        if self._seen + len(bits) > len(self._most):
            raise ValueError(f"more than {len(self._most)} rows")
        unsigned, step = bits.view(self._unsigned), max(1, _BLOCK // self.row_bytes)
        for first in range(0, len(bits), step):
            part = slice(first, first + step)
            there = slice(self._seen + first, self._seen + min(first + step, len(bits)))
            np.maximum.reduce(bits[part], -1, out=self._most[there])  # of the positive numbers the largest, where there are any
            np.maximum.reduce(unsigned[part], -1, out=self._most_negative[there])  # of the negative ones: their sign is the first bit
        ends, middle = bits[:, :, 0] == bits[:, :, -1], bits[:, :, 0] == bits[:, :, self.width // 2]
        self._constant[self._seen : self._seen + len(bits)] = False
        for row, column in np.argwhere(ends & middle):  # few: only they are looked at whole
            self._constant[self._seen + row, column] = (bits[row, column] == bits[row, column, 0]).all()
        self._seen += len(bits)

    def faults(self) -> Faults:
        """Return what row_faults does. Raises ValueError when there are rows to come."""
        if self._seen != len(self._most) or self._part:
            raise ValueError(f"{self._seen} of {len(self._most)} rows were looked at")
        infinite, sign = _EXPONENTS[self.dtype], 1 << (8 * self.dtype.itemsize - 1)
        wild = (self._most >= infinite) | (self._most_negative >= sign + infinite)
        zero = (self._most <= 0) & (self._most_negative <= sign)  # 0 and -0
        return tuple(torch.from_numpy(a) for a in (wild, zero, self._constant & ~zero & ~wild))


def require(checks: list[Check], what: str, next: str) -> None:
    """Raise DumpError naming the first check that failed. `what` is the thing checked, e.g. "sample 17"."""
    for check in checks:
        if not check.ok:
            raise DumpError(
                got=f"{what}: {check.name} is {check.value}",
                expected=check.threshold,
                likely="the dump is not the one asked for, or a chunk of the prefill is missing",
                next=next,
            )


def _equal(name: str, got, expected, blind_to: str = "") -> Check:
    shown = f"{got:,}" if isinstance(got, int) else str(got)
    return Check(name, shown, f"{expected:,}" if isinstance(expected, int) else str(expected), got == expected, blind_to)
