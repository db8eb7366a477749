"""The process that writes the spool: the scheduler's rows lie in memory that both see, what to do with them comes as messages.

It is a process because of the GIL: a file takes some ten short steps of Python, and as threads of the scheduler they took it from
the forward at each of them (docs/performance.md). It imports neither torch nor SGLang, and ends when its scheduler does.

One thread at a time works at a file, in the order in which its parts came, so a file needs no lock (the kernel would make two
writers of one file take turns anyway).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from hsnb.patch.armed import Captured
from hsnb.patch.spool import LAYOUTS, Request

log = logging.getLogger("sglang.hsnb")
_LAST_S = 10.0  # for the last removals
_LOOKS_S = 1.0  # between two looks at whether the scheduler lives: its end of the connection may have been inherited


# -- what the scheduler says ---------------------------------------------------------------------------------------


class Hello(NamedTuple):
    """The first message."""

    spool: str
    layout: str
    meta: dict[str, str]  # what every dump of this server says of itself
    threads: int
    ring_bytes: int
    captured_at: int  # where in the armed file the count of dumps is
    scheduler: int  # pid


class Begin(NamedTuple):
    """A request whose first rows come: the fields of spool.Request."""

    request_id: str
    num_tokens: int
    kind: str
    columns: int
    hidden_size: int
    dtype: str


class Part(NamedTuple):
    """Rows start..start+n of file `key`, at two places in the ring; `begin` with its first ones."""

    key: int
    start: int
    n: int
    goes_on: bool
    states_at: int
    ids_at: int
    begin: Begin | None


class Piece(NamedTuple):
    """Parts of many files that came with one copy."""

    number: int
    parts: list[Part]


class GiveUp(NamedTuple):
    """Write nothing more of a file, and remove it."""

    key: int


# -- what it is answered -------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """Every part of a piece is done with; the files in `ended` were published."""

    number: int
    ended: list[int]


class Failed(NamedTuple):
    """A file is not captured, and why."""

    key: int
    why: str


class Gone(NamedTuple):
    """A file that was given up is not there any more."""

    key: int


# -- the work ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Held:
    """A piece of the ring until all its `users` are done with it."""

    number: int
    users: int
    ended: list[int] = field(default_factory=list)


@dataclass(eq=False)
class File:
    """One request's dump between its first rows and its publication."""

    key: int
    request: Request
    begun: bool = False
    over: bool = False  # published, failed or removed: nothing is on the disk under its temporary name
    given_up: bool = False
    todo: deque[tuple[Part, _Held] | None] = field(default_factory=deque)  # None: remove what was begun
    queued: bool = False


class Scribe:
    """Write the parts of many requests; `reply` is called in the threads that write."""

    def __init__(self, hello: Hello, ring: memoryview, captured: Captured, reply: Callable[[NamedTuple], None]):
        self.spool, self.layout, self.meta = Path(hello.spool), LAYOUTS[hello.layout], hello.meta
        self.ring, self.captured, self.reply = ring, captured, reply
        self.files: dict[int, File] = {}  # until their last part, or until they are given up
        self._ready: SimpleQueue[File] = SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished = 0  # jobs queued or running
        self._threads = hello.threads

    def start(self) -> None:
        """Start the threads: fewer than asked for when the system has a limit. Raises RuntimeError when not one can be started."""
        for n in range(self._threads):
            try:
                threading.Thread(target=self._work, name=f"hsnb-writer-{n}", daemon=True).start()
            except RuntimeError:
                if not n:
                    raise
                return

    def take(self, message: Piece | GiveUp) -> None:
        """Queue what a message asks for."""
        if isinstance(message, GiveUp):
            if (file := self.files.pop(message.key, None)) is None:  # it had its last part
                self.reply(Gone(message.key))
            else:
                file.given_up = True
                self._queue(file, None)
            return
        held = _Held(message.number, len(message.parts))
        for part in message.parts:
            if part.begin is not None:
                self.files[part.key] = File(part.key, self.layout(*part.begin, self.meta))
            file = self.files[part.key]
            if part.start + part.n == file.request.num_tokens:
                del self.files[part.key]
            self._queue(file, (part, held))

    def abandon(self) -> None:
        """Remove every file whose rows are not all there, and finish the others: the scheduler is gone, nobody else will."""
        for key in list(self.files):
            self.take(GiveUp(key))
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished, _LAST_S)

    def _queue(self, file: File, what: tuple[Part, _Held] | None) -> None:
        with self._changed:
            self._unfinished += 1
            file.todo.append(what)
            if file.queued:
                return
            file.queued = True
        self._ready.put(file)

    def _work(self) -> None:
        while True:
            file = self._ready.get()
            part, held = file.todo.popleft() or (None, None)
            try:
                self._act(file, part)
            except Exception:  # of what removes; the thread goes on for the others
                log.exception("hsnb: request %s: its end could not be told", file.request.request_id)
            if held is None:
                self.reply(Gone(file.key))
            else:
                self._give(held, file)
            with self._changed:
                self._unfinished -= 1
                file.queued = bool(file.todo)
                again = file.queued
                if not self._unfinished:
                    self._changed.notify_all()
            if again:
                self._ready.put(file)
            del file, part, held  # an idle thread keeps nobody's rows

    def _give(self, held: _Held, file: File) -> None:
        with self._changed:
            held.users -= 1
            if file.request.whole and not file.given_up:
                held.ended.append(file.key)
            last = not held.users
        if last:
            self.reply(Given(held.number, held.ended))

    def _act(self, file: File, part: Part | None) -> None:
        """Write one part, and publish when it was the last; or remove what was begun."""
        request = file.request
        try:
            if file.over:
                return
            if part is None or file.given_up:
                self._remove(file)
                return
            if not file.begun:
                request.begin(self.spool)
                file.begun = True
            self.put(request, part)
            if request.whole:
                self.publish(request)
                file.over = True
        except Exception as error:
            log.exception("hsnb: request %s failed", request.request_id)
            try:
                self._remove(file)
            finally:  # told even when the disk does not even take a removal
                if not file.given_up:  # of one that was given up the reason is told, or it starts again
                    self.reply(Failed(file.key, f"{type(error).__name__}: {error}"))

    def put(self, request: Request, part: Part) -> None:
        """Put rows in place."""
        states = self.view(part.states_at, part.n * request.row_bytes).reshape(part.n, request.columns, -1)
        request.put(part.start, states, self.view(part.ids_at, 8 * part.n).view(np.int64), part.goes_on)

    def view(self, start: int, nbytes: int) -> np.ndarray:
        """Return bytes of the ring."""
        return np.frombuffer(self.ring, np.uint8, nbytes, start)

    def publish(self, request: Request) -> None:
        """Give a whole dump its name. It is counted just before: whoever sees the file sees the count."""
        request.seal()
        self.captured.add(1)
        try:
            request.publish(self.spool)
        except BaseException:
            self.captured.add(-1)
            raise

    @staticmethod
    def _remove(file: File) -> None:
        file.over = True
        if file.begun:
            file.request.discard()


def main(connection: int, ring: int, armed: int) -> None:
    """Write until the scheduler ends; the arguments are open files."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole process group: the scheduler's end is ours
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="[%(asctime)s hsnb writer] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    serve(Connection(connection), ring, armed)


def serve(connection: Connection, ring: int, armed: int) -> None:
    """Take messages until the other side is gone."""
    hello: Hello = connection.recv()
    replying = threading.Lock()

    def reply(message: NamedTuple) -> None:
        with replying, contextlib.suppress(OSError):  # the scheduler is gone
            connection.send(message)

    memory = mmap.mmap(ring, hello.ring_bytes, prot=mmap.PROT_READ)
    scribe = Scribe(hello, memoryview(memory), Captured(armed, hello.captured_at), reply)
    scribe.start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            if connection.poll(_LOOKS_S):
                scribe.take(connection.recv())
            elif os.getpid() != hello.scheduler != os.getppid():
                break
    scribe.abandon()
