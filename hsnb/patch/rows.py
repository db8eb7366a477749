"""What the capture knows of a request: where its rows lie in a batch and in its prompt, and what became of it so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Rows:
    """`offset` in the batch, `start` in the prompt, `n` of them; `goes_on`: the rows before them are of the same chunk."""

    request_id: str
    offset: int
    start: int
    n: int
    kind: str
    goes_on: bool = False

    @property
    def part(self) -> slice:
        """The rows in the batch."""
        return slice(self.offset, self.offset + self.n)

    def within(self, first: int, end: int) -> Rows:
        """Return those of the rows that lie between rows `first` and `end` of the batch."""
        if first <= self.offset and self.offset + self.n <= end:
            return self
        a, b = max(self.offset, first), min(self.offset + self.n, end)
        return replace(self, offset=a, start=self.start + a - self.offset, n=b - a, goes_on=a > self.offset)


def cuts(rows: list[Rows], most: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (first, end, indices of `rows` in it) of pieces of a batch: at most `most` rows each, none between two wanted ones left out.

    One piece has the rows of many short prompts, so that a batch costs a few copies, however many prompts are in it.
    """
    i = 0
    while i < len(rows):
        j = i
        while j + 1 < len(rows) and rows[j + 1].offset == rows[j].offset + rows[j].n:
            j += 1
        end = rows[j].offset + rows[j].n
        for first in range(rows[i].offset, end, most):
            last = min(first + most, end)
            yield first, last, [k for k in range(i, j + 1) if rows[k].offset < last and rows[k].offset + rows[k].n > first]
        i = j + 1


@dataclass(slots=True)
class Seen:
    """What is known of one request object of SGLang's over all its batches; a new one with an old id starts afresh."""

    req: Callable  # a weak reference
    counted: bool = False
    prefilled: bool = False  # every row of the prompt ran; the same on all ranks, for it decides who takes part in the gathers
    given_up: bool = False  # its failure is told, once
    refused: str = ""  # why its prompt is none to capture


class Known(NamedTuple):
    """What ForwardBatch.init_new said of a request: a batch holds only the chunk that it runs."""

    tokens: int  # of the whole prompt
    answered: int  # tokens answered so far
    aborted: bool  # SGLang gave it up, and runs one token in its place
    seen: Seen
