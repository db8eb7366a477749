"""What the capture knows of a request: where its rows lie in a batch and in its prompt, and what became of it so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
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

    def pieces(self, most: int) -> Iterator[Rows]:
        """Yield the rows in pieces of at most `most`."""
        for first in range(0, self.n, most):
            n = min(most, self.n - first)
            yield replace(self, offset=self.offset + first, start=self.start + first, n=n, goes_on=first > 0)


@dataclass
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
