"""The samples of one run that are owed: every server's worker pulls from here, and says here how each one ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence


class Work:
    """A queue of rows that threads pull from. Nothing is kept of a row that is done but the sums.

    This is all that a worker knows of where its work comes from: one that pulled from another machine would need no more.
    """

    def __init__(self, rows: Sequence[int], lengths: Sequence[int]):
        self._lock = threading.Lock()
        self._waiting, self._flying = deque(rows), 0
        self.lengths = lengths  # tokens of every row of the data set
        self.rows = len(self._waiting)
        self.asked_tokens = self.left_tokens = sum(lengths[r] for r in self._waiting)  # left: waiting or in flight
        self.tokens = self.bytes = self.done = self.failed = 0
        self._workers: set[str] = set()
        self.stopping = threading.Event()

    def take(self, in_flight: int) -> int | None:
        """Return the next row for a worker that has `in_flight` tokens; None when it should take nothing now.

        No worker takes more than its part of what is left, so that at a shard's end all of them have work.
        """
        with self._lock:
            if not self._waiting or self.stopping.is_set():
                return None
            share = self.left_tokens / max(1, len(self._workers))
            if len(self._workers) > 1 and in_flight and in_flight + self.lengths[self._waiting[0]] > share:
                return None
            self._flying += 1
            return self._waiting.popleft()

    def join(self, worker: str) -> None:
        """Say that a worker (its URL) pulls from here now."""
        with self._lock:
            self._workers.add(worker)

    def leave(self, worker: str) -> None:
        """Say that a worker has ended, or waits for its server to come back: the others share what is left."""
        with self._lock:
            self._workers.discard(worker)

    def put_back(self, row: int) -> None:
        """Return a row that its server could not do, to be taken next by whoever can."""
        with self._lock:
            self._flying -= 1
            self._waiting.appendleft(row)

    def settle(self, row: int, size: int) -> None:
        """Say that a row is published and entered, in `size` bytes; 0: it is owed."""
        with self._lock:
            self._flying -= 1
            self.left_tokens -= self.lengths[row]
            if size:
                self.done, self.tokens, self.bytes = self.done + 1, self.tokens + self.lengths[row], self.bytes + size
            else:
                self.failed += 1

    def again(self, rows: Sequence[int], size: int) -> None:
        """Take back rows that were done and are not to be trusted: they wait again. `size`: bytes of their files."""
        with self._lock:
            tokens = sum(self.lengths[r] for r in rows)
            self._waiting.extend(rows)
            self.left_tokens += tokens
            self.done, self.tokens, self.bytes = self.done - len(rows), self.tokens - tokens, self.bytes - size

    def snapshot(self) -> list[int]:
        """Return the rows that wait."""
        with self._lock:
            return list(self._waiting)

    @property
    def finished(self) -> bool:
        """True when nothing waits and nothing is in flight at any server, which could still come back."""
        with self._lock:
            return not self._waiting and not self._flying
