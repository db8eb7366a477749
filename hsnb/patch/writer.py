"""Carry rows from the device into the spool beside the forward: a copy stream, the ring, and threads that write.

The forward's thread only queues copies: device to ring, on a stream of their own. A thread waits for a piece's copy and writes it
where it belongs; os.pwrite and posix_fallocate run without the GIL. One thread at a time works at a file, in the order in which
its pieces were handed over, so a file needs no lock (the kernel would make two writers of one file take turns anyway).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from hsnb.patch.ring import Ring, Slot
from hsnb.patch.rows import Rows, cuts
from hsnb.patch.spool import Request, bits

log = logging.getLogger("sglang.hsnb")
THREADS = "SGLANG_HS_DUMP_THREADS"
_MOST_THREADS = 4  # docs/performance.md: 8 to 10 GB/s into /dev/shm; each more takes the GIL from the scheduler more often


def writing_threads() -> int:
    """Return SGLANG_HS_DUMP_THREADS, or one for each core and at most four. Raises ValueError."""
    asked = os.environ.get(THREADS, "")
    if not asked:
        return min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"{THREADS} is {asked!r}, expected a whole number, 1 or more")
    return int(asked)


def side_by_side(columns: list[torch.Tensor]) -> torch.Tensor:
    """Return K + 1 columns [tokens, H] as one new tensor [tokens, K + 1, H]. Raises ValueError when they differ in shape or dtype."""
    if len(kinds := {(tuple(c.shape), c.dtype) for c in columns}) > 1:
        raise ValueError(f"states of different kinds: {sorted(f'{dtype}{list(shape)}' for shape, dtype in kinds)}")
    if columns[0].device.type != "cpu":
        return torch.stack(columns, dim=1)
    tokens, width = columns[0].shape
    made = torch.empty(tokens, len(columns), width, dtype=columns[0].dtype)
    for k, column in enumerate(columns):
        bits(made)[:, k] = bits(column)
    return made


@dataclass(eq=False)
class Copy:
    """A piece of a batch in the ring, there once `event` has happened; None: it is (CPU)."""

    slot: Slot
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until it is there."""
        if (event := self.event) is not None:  # another thread may have waited meanwhile
            event.synchronize()
            self.event = None


@dataclass(eq=False)
class Piece:
    """Rows of one request on their way: [n, K + 1, H] and int64 [n], views of the ring."""

    rows: Rows
    states: torch.Tensor
    token_ids: torch.Tensor
    copy: Copy


@dataclass(eq=False)
class File:
    """One request's dump between its first rows and its publication."""

    request: Request
    seen: Any = None  # its owner's
    next_row: int = 0  # of what was handed over; the request itself counts what is written
    given_up: bool = False
    begun: bool = False
    over: bool = False  # published, failed or removed: nothing is on the disk under its temporary name
    todo: deque[Piece | None] = field(default_factory=deque)  # None: remove what was begun
    queued: bool = False


class Writer:
    """Write the pieces of many requests; `put`, `publish` and `failed` are called in the threads that write."""

    def __init__(
        self,
        spool: Path,
        ring: Ring,
        *,
        put: Callable[[Request, Rows, torch.Tensor, torch.Tensor], None],
        publish: Callable[[Request], None],
        failed: Callable[[File, str], None],
        threads: int = 0,
    ):
        self.spool, self.ring = spool, ring
        self.put, self.publish, self.failed = put, publish, failed
        self.threads = threads or writing_threads()
        self._ready: SimpleQueue[File] = SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished = 0  # jobs queued or running
        self._started = 0
        self._stream: torch.cuda.Stream | None = None

    # -- the forward's thread ------------------------------------------------------------------------------------

    def follow(self, *tensors: torch.Tensor) -> None:
        """Let the copies wait for what the current stream has queued, and keep `tensors` until they are done. CPU: nothing to do."""
        if tensors[0].is_cuda:
            self._stream = self._stream or torch.cuda.Stream(tensors[0].device)
            self._stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def rows_at_once(self, states: torch.Tensor) -> int:
        """Return how many rows of [n, K + 1, H] a piece holds, with their ids. Raises ValueError when not one fits."""
        most = (self.ring.largest - 7) // (states[0].numel() * states.element_size() + 8)  # 7: the ids begin at a multiple of 8
        if most < 1:
            self.ring.take(states[0].numel() * states.element_size() + 8)  # says how large a ring is needed
        return most

    def add(self, files: list[tuple[File, Rows]], states: torch.Tensor, token_ids: torch.Tensor) -> float:
        """Queue the copies and the writing of a batch [tokens, K + 1, H] and int64 [tokens], of which `files` want their rows.

        Return the seconds waited because the ring was full. Raises what kept a piece from being copied: it and those after it
        are not queued.
        """
        self._start()
        waited, rows = 0.0, [r for _, r in files]
        for first, end, wanted in cuts(rows, self.rows_at_once(states)):
            nbytes = (end - first) * states[0].numel() * states.element_size()
            ids_at = -(-nbytes // 8) * 8
            slot, seconds = self.ring.take(ids_at + 8 * (end - first), users=len(wanted))
            waited += seconds
            try:
                here = self.ring.view(slot, 0, (end - first, *states.shape[1:]), states.dtype)
                ids = self.ring.view(slot, ids_at, (end - first,), torch.int64)
                copy = Copy(slot, self._copy(here, states[first:end], ids, token_ids[first:end]))
            except BaseException:
                for _ in wanted:  # a piece that nobody gives back would fill the ring for good
                    self.ring.give(slot)
                raise
            mine = [rows[k].within(first, end) for k in wanted]
            lengths = [r.n for r in mine]
            for k, r, part, own in zip(wanted, mine, here.split(lengths), ids.split(lengths), strict=True):
                files[k][0].next_row = r.start + r.n
                self._queue(files[k][0], Piece(r, part, own, copy))
        return waited

    def _copy(self, here: torch.Tensor, states: torch.Tensor, ids: torch.Tensor, token_ids: torch.Tensor) -> torch.cuda.Event | None:
        if not states.is_cuda:
            bits(here)[:] = bits(states)
            bits(ids)[:] = bits(token_ids)
            return None
        with torch.cuda.stream(self._stream):
            here.copy_(states, non_blocking=True)
            ids.copy_(token_ids, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # the thread sleeps: a spinning one would take a core
            event.record()
        return event

    def give_up(self, file: File) -> None:
        """Write nothing more of a file, and remove it as soon as the thread that is at it has finished its piece."""
        file.given_up = True
        self._queue(file, None)

    def settle(self) -> None:
        """Wait until everything that was handed over is written, published or removed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)

    def _start(self) -> None:
        """Start the threads; not earlier than the first rows: a server that captures nothing has no thread of ours.

        Raises RuntimeError when not one can be started.
        """
        for n in range(self._started, self.threads):
            try:
                threading.Thread(target=self._work, name=f"hsnb-writer-{n}", daemon=True).start()
            except RuntimeError:  # a limit of the system; fewer write more slowly, and the next rows try again
                if not self._started:
                    raise
                return
            self._started += 1

    def _queue(self, file: File, piece: Piece | None) -> None:
        with self._changed:
            self._unfinished += 1
            file.todo.append(piece)
            if file.queued:
                return
            file.queued = True
        self._ready.put(file)

    # -- the threads that write ----------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            file = self._ready.get()
            piece = file.todo.popleft()
            try:
                self._act(file, piece)
            except Exception:  # of what tells the client; the thread goes on for the others
                log.exception("hsnb: request %s: its end could not be told", file.request.request_id)
            finally:
                if piece is not None:
                    self.ring.give(piece.copy.slot)
                with self._changed:
                    self._unfinished -= 1
                    file.queued = bool(file.todo)
                    again = file.queued
                    if not self._unfinished:
                        self._changed.notify_all()
                if again:
                    self._ready.put(file)
                del file, piece  # an idle thread keeps nobody's rows

    def _act(self, file: File, piece: Piece | None) -> None:
        """Write one piece, and publish when it was the last; or remove what was begun."""
        request = file.request
        try:
            if piece is not None:
                piece.copy.wait()  # also for one that is not wanted any more: its bytes are still being filled
            if file.over:
                return
            if piece is None or file.given_up:
                self._remove(file)
                return
            if not file.begun:
                request.begin(self.spool)
                file.begun = True
            self.put(request, piece.rows, piece.states, piece.token_ids)
            if not request.whole:
                return
            self.publish(request)
            file.over = True
        except Exception as error:
            log.exception("hsnb: request %s failed", request.request_id)
            try:
                self._remove(file)
            finally:  # told even when the disk does not even take a removal
                if not file.given_up:  # of one that was given up the reason is told, or it starts again
                    self.failed(file, f"{type(error).__name__}: {error}")

    @staticmethod
    def _remove(file: File) -> None:
        file.over = True
        if file.begun:
            file.request.discard()
