"""Carry rows from the device to the process that writes them (scribe.py), beside the forward: a copy stream, the ring, messages.

The forward's thread only queues copies: device to ring, on a stream of their own. One thread waits for each copy and tells the
writing process of it; another hears what became of the files. So a batch costs the forward's GIL two short wakes, however many
prompts are in it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from hsnb.patch.armed import ArmedFile
from hsnb.patch.batch import States
from hsnb.patch.large_pages import check_variable
from hsnb.patch.ring import Ring, Slot
from hsnb.patch.rows import Rows, cuts
from hsnb.patch.scribe import Begin, Failed, Given, GiveUp, Gone, Hello, Part, Piece
from hsnb.patch.spool import bits

log = logging.getLogger("sglang.hsnb")
THREADS = "SGLANG_HS_DUMP_THREADS"
_ENDED = "the process that writes dumps ended: the next prompt starts another"
_MOST_KEPT = 4  # batches on their way whose states are kept
_MOST_THREADS = 4  # docs/performance.md: 8 to 10 GB/s into /dev/shm


def writing_threads() -> int:
    """Return SGLANG_HS_DUMP_THREADS, or one for each core and at most four. Raises ValueError."""
    asked = os.environ.get(THREADS, "")
    if not asked:
        return min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"{THREADS} is {asked!r}, expected a whole number, 1 or more")
    return int(asked)


def start_process(connection: Connection, ring: int, armed: int) -> subprocess.Popen:
    """Start the process that writes, with three open files: a fresh Python, because CUDA, NCCL and torch's threads survive no fork."""
    files = (connection.fileno(), ring, armed)
    return subprocess.Popen([sys.executable, "-m", "hsnb.patch", *map(str, files)], pass_fds=files, stdin=subprocess.DEVNULL)


@dataclass(eq=False, slots=True)
class File:
    """One request's dump, as the scheduler sees it: it is written elsewhere."""

    begin: Begin
    seen: Any = None  # its owner's
    next_row: int = 0  # of what was handed over
    given_up: bool = False
    key: int = -1
    process: _Process | None = None  # with its first rows


@dataclass(eq=False)
class _Process:
    """One writing process and what it has of ours; all of it is lost when it ends."""

    connection: Connection
    popen: subprocess.Popen
    hearing: threading.Thread | None = None
    pieces: dict[int, Slot] = field(default_factory=dict)
    files: dict[int, File] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)  # given up, and still there
    dead: bool = False


class Writer:
    """Hand the rows of many requests to the process that writes; `failed` is called in a thread, with a file's failure."""

    def __init__(
        self,
        spool: Path,
        ring: Ring,
        armed: ArmedFile,
        *,
        layout: str,
        meta: dict[str, str],
        failed: Callable[[File, str], None],
        threads: int = 0,
    ):
        self.spool, self.ring, self.armed = spool, ring, armed
        self.layout, self.meta, self.failed = layout, meta, failed
        self.threads = threads or writing_threads()
        check_variable()  # here, where it can be told: the process that writes reads it
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._process: _Process | None = None
        self._to_send: SimpleQueue[tuple[_Process, torch.cuda.Event | None, tuple[torch.Tensor, ...], NamedTuple]] = SimpleQueue()
        self._sending = False
        self._events: deque[torch.cuda.Event] = deque()  # used again: one that a thread can sleep at is not made for nothing
        self._stream: torch.cuda.Stream | None = None

    # -- the forward's thread ------------------------------------------------------------------------------------

    def follow(self, device: torch.device) -> None:
        """Let the copies wait for what the current stream of a GPU has queued."""
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def rows_at_once(self, row_bytes: int) -> int:
        """Return how many rows of that size a piece holds, with their ids. Raises ValueError when not one fits."""
        most = (self.ring.largest - 7) // (row_bytes + 8)  # 7: the ids begin at a multiple of 8
        if most < 1:
            self.ring.take(row_bytes + 15)  # says how large a ring is needed
        return most

    def add(self, files: list[tuple[File, Rows]], states: States, token_ids: torch.Tensor) -> float:
        """Queue the copies and the writing of a batch's states and int64 [tokens], of which `files` want their rows.

        Return the seconds waited because the ring was full. Raises what kept a piece from being copied: it and those after it
        are not queued.
        """
        process = self._living()
        waited, rows = 0.0, [r for _, r in files]
        for first, end, wanted in cuts(rows, self.rows_at_once(states.row_bytes)):
            n = end - first
            ids_at = -(-n * states.row_bytes // 8) * 8
            slot, seconds = self.ring.take(ids_at + 8 * n)
            waited += seconds
            try:
                here = self.ring.view(slot, 0, (n, len(states.columns), states.hidden_size), states.dtype)
                ids = self.ring.view(slot, ids_at, (n,), torch.int64)
                event = self._copy(here, ids, states, token_ids, slice(first, end))
            except BaseException:
                self.ring.give(slot)  # a piece that nobody gives back would fill the ring for good
                raise
            with self._changed:
                if process.dead:
                    self.ring.give(slot)
                    raise RuntimeError(_ENDED)
                parts = []
                for file, r in ((files[k][0], rows[k].within(first, end)) for k in wanted):
                    begin, at = self._begin(file, process), r.offset - first
                    if file.process is process:  # not of one that has ended: its failure is told
                        places = slot.start + at * states.row_bytes, slot.start + ids_at + 8 * at
                        parts.append(Part(file.key, r.start, r.n, r.goes_on, *places, begin))
                    file.next_row = r.start + r.n
                if not parts:  # nobody would ever give it back
                    self.ring.give(slot)
                    continue
                number = next(self._numbers)
                process.pieces[number] = slot
            kept = self._kept(states.stacked, token_ids) if event else ()
            self._to_send.put((process, event, kept, Piece(number, parts)))
        return waited

    def _kept(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what is copied from, for the thread that waits: by record_stream torch asks the driver at each of the model's allocations."""
        if self._to_send.qsize() < _MOST_KEPT:
            return tensors
        for tensor in tensors:  # that thread hangs, e.g. on a process that was stopped: it must not keep the GPU's memory
            tensor.record_stream(self._stream)
        return ()

    def _begin(self, file: File, process: _Process) -> Begin | None:
        """Return what the process has to know of a file, the first time."""
        if file.process is not None:
            return None
        file.key, file.process = next(self._numbers), process
        process.files[file.key] = file
        return file.begin

    def _copy(self, here: torch.Tensor, ids: torch.Tensor, states: States, token_ids: torch.Tensor, part: slice) -> torch.cuda.Event | None:
        if not states.on_gpu:
            states.copy_to(here, part)
            bits(ids)[:] = bits(token_ids[part])
            return None
        with torch.cuda.stream(self._stream):
            states.copy_to(here, part)
            ids.copy_(token_ids[part], non_blocking=True)
            event = self._events.popleft() if self._events else torch.cuda.Event(blocking=True)  # a thread that spins would take a core
            event.record()
        return event

    def give_up(self, file: File) -> None:
        """Write nothing more of a file, and have what was begun removed."""
        with self._changed:
            file.given_up = True
            if (process := file.process) is None or process.dead:
                return
            process.leaving.add(file.key)
        self._to_send.put((process, None, (), GiveUp(file.key)))

    def settle(self) -> None:
        """Wait until everything that was handed over is written, published or removed."""
        with self._changed:
            self._changed.wait_for(lambda: self._process is None or not (self._process.pieces or self._process.leaving))

    def close(self) -> None:
        """End the process; what is not published is removed."""
        with self._changed:
            process, self._process = self._process, None
        if process is not None:
            with socket.socket(fileno=os.dup(process.connection.fileno())) as there:  # a thread reads from it: closing alone ends nothing
                there.shutdown(socket.SHUT_RDWR)
            process.hearing.join()
            process.connection.close()
        self.ring.close()

    # -- the writing process ---------------------------------------------------------------------------------------

    def _living(self) -> _Process:
        """Return the process; started with the first rows, and again when it has ended. Raises OSError or RuntimeError."""
        if (process := self._process) is not None and not process.dead:
            return process
        if not self._sending:
            threading.Thread(target=self._send, name="hsnb-sender", daemon=True).start()
            self._sending = True
        ours, its = Pipe()
        try:
            process = _Process(ours, start_process(its, self.ring.fd, self.armed.fd))
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        size = len(self.ring.memory)
        ours.send(Hello(str(self.spool), self.layout, self.meta, self.threads, size, self.armed.captured_at, os.getpid()))
        process.hearing = threading.Thread(target=self._hear, args=(process,), name="hsnb-hearer", daemon=True)
        process.hearing.start()
        self._process = process
        return process

    def _send(self) -> None:
        """Tell of each piece when its copy is there; a process that has ended is the other thread's to notice."""
        while True:
            process, event, kept, message = self._to_send.get()
            try:
                if event is not None:
                    event.synchronize()
                    self._events.append(event)
                kept = None  # the model has its memory again
                process.connection.send(message)
            except Exception as error:  # a copy that failed, or half a message: what follows may not be read
                if not process.dead:
                    log.error("hsnb: the process that writes dumps could not be told of one: %s", error)
                process.popen.kill()
            del process, event, kept, message  # an idle thread keeps nobody's rows

    def _hear(self, process: _Process) -> None:
        """Take what the process says until it ends; then everything it had is lost, and is told so."""
        while True:
            try:
                message = process.connection.recv()
            except (EOFError, OSError):
                break
            self._heard(process, message)
        process.popen.kill()
        status = process.popen.wait()
        with self._changed:
            process.dead = True  # from here on nothing is added
            lost = list(process.files.values())
        for path in self.spool.glob(f".*.{process.popen.pid}.*"):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_file() else shutil.rmtree(path)
        for file in lost:
            if not file.given_up:
                self.failed(file, f"RuntimeError: {_ENDED} (its status: {status})")
        with self._changed:
            for slot in process.pieces.values():
                self.ring.give(slot)
            process.files.clear()
            process.pieces.clear()
            process.leaving.clear()
            self._changed.notify_all()

    def _heard(self, process: _Process, message: Given | Failed | Gone) -> None:
        if isinstance(message, Failed):
            with self._changed:
                file = process.files.pop(message.key, None)
            if file is not None and not file.given_up:
                self.failed(file, message.why)
            return
        with self._changed:
            if isinstance(message, Gone):
                process.leaving.discard(message.key)
                process.files.pop(message.key, None)
            else:
                self.ring.give(process.pieces.pop(message.number))
                for key in message.ended:
                    process.files.pop(key, None)
            self._changed.notify_all()
