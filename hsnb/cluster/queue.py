"""The shards of one run: waiting, flying, done. A shard whose node is lost waits again, so often and no oftener."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

LOSSES = 4  # of one shard: after that it is the shard that takes nodes down, by its memory for example
PAUSE_S = 2.0  # before a lost shard is dealt again: a kernel that lost its node still holds the ledger for a moment


@dataclass
class Shards:
    """A queue that the driver deals from. `results`: {shard: what came of it}; `given_up`: {shard: why}."""

    shards: Sequence[int]
    clock: Callable[[], float] = time.monotonic
    results: dict[int, Any] = field(default_factory=dict)
    given_up: dict[int, str] = field(default_factory=dict)
    losses: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._waiting: deque[tuple[int, float]] = deque((s, 0.0) for s in self.shards)
        self._flying: set[int] = set()

    @property
    def left(self) -> int:
        """Return how many are neither done nor given up."""
        return len(self._waiting) + len(self._flying)

    def take(self) -> int | None:
        """Return the next shard that may be dealt now, None when there is none."""
        now = self.clock()
        for at, (shard, when) in enumerate(self._waiting):
            if when <= now:
                del self._waiting[at]
                self._flying.add(shard)
                return shard
        return None

    def settle(self, shard: int, result: Any) -> None:
        """Say that a shard ran to its end, whole or owed."""
        self._flying.remove(shard)
        self.results[shard] = result

    def lost(self, shard: int, why: str) -> bool:
        """Say that whoever ran a shard is gone; return whether it will be dealt again."""
        self._flying.remove(shard)
        self.losses[shard] += 1
        if self.losses[shard] >= LOSSES:
            self.given_up[shard] = f"lost {LOSSES} times, the last time: {why}"
            return False
        self._waiting.appendleft((shard, self.clock() + PAUSE_S))
        return True

    def drain(self, why: str) -> None:
        """Give up everything that is left."""
        for shard in [*self._flying, *(s for s, _ in self._waiting)]:
            self.given_up[shard] = why
        self._waiting.clear()
        self._flying.clear()
