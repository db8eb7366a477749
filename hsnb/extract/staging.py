"""Verify a dump and stage it: in the thread that asks, or, where there are cores for it, in a process of that thread's own.

Threads of one process take turns at Python's lock between all the reading, checking and hashing: eight of them did less than two
cores' work on short prompts (docs/performance.md). A process costs 300 MB and two seconds, so machines with few cores have threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NamedTuple

import torch

from hsnb.checks import Asked, Check, label_checks, require, row_checks
from hsnb.dumps import open_dump
from hsnb.errors import DumpError
from hsnb.extract.output import Output

log = logging.getLogger(__name__)
CORES = 8  # with so many processes pay
_NICE = 5  # where cores are short the engine goes first
_PR_SET_PDEATHSIG = 1  # of Linux


def threads(servers: int = 1) -> int:
    """Return how many threads publish what one of so many servers gives."""
    return min(8, max(2, (os.cpu_count() or 2) // servers))


class Task(NamedTuple):
    """The dump at `path`, what it must be, and the mask int64 [S] for a layout that keeps it in the sample's file."""

    row: int
    path: Path
    asked: Asked
    loss_mask: torch.Tensor | None


class Staged(NamedTuple):
    """The staged file, with its xxh3-128."""

    file: str
    bytes: int
    checksum: str


def stage(output: Output, task: Task) -> Staged:
    """Verify a dump in the engine's dtype and stage it. Raises DumpError for one that was not asked for, ExtractError for a bad output."""
    dump = open_dump(task.path)

    def judge(checks: Iterable[Check]) -> None:
        require(checks, f"row {task.row}", "run the shard again; if it stays, probe the server with hsnb probe")

    judge(label_checks(dump, task.asked))
    return Staged(*output.stage(task.row, dump, task.loss_mask, lambda faults: judge(row_checks(dump, faults))))


class Stagers:
    """Stage for many threads. `processes`: each thread in a process of its own; None: where the machine has the cores."""

    def __init__(self, output: Output, processes: bool | None = None):
        self.output = output
        self.processes = len(os.sched_getaffinity(0)) >= CORES if processes is None else processes
        self._own = threading.local()
        self._all: list[_Process] = []

    def stage(self, task: Task) -> Staged:
        """Raises as `stage`, and DumpError when the process ended: the next dump has another."""
        if not self.processes:
            return stage(self.output, task)
        process = getattr(self._own, "process", None) or self._start()
        if process is None:
            return stage(self.output, task)
        try:
            return process.ask(task)
        except EOFError:
            del self._own.process
            raise DumpError(
                got=f"row {task.row}: the process that verified its dump ended with status {process.close()}",
                expected="a dump verified and staged",
                likely="it was killed, or the machine has no memory left",
                next="the sample is asked for again",
            ) from None

    def _start(self) -> _Process | None:
        """Start this thread's process; None when the system gives none: the thread then does the work itself."""
        for ended in [p for p in self._all if p.ended()]:  # of threads that are gone
            self._all.remove(ended)
            ended.close()
        try:
            self._own.process = _Process(self.output)
        except OSError as error:
            log.warning(f"no process to verify dumps could be started ({error}): they are verified in a thread")
            return None
        self._all.append(self._own.process)
        return self._own.process

    def close(self) -> None:
        """End the processes."""
        while self._all:
            self._all.pop().close()


class _Process:
    """One process that stages; it ends with its thread."""

    def __init__(self, output: Output):
        self._connection, its = Pipe()
        code = "from hsnb.extract.staging import main; main()"
        command = [sys.executable, "-c", code, str(its.fileno()), str(os.getpid())]
        self._popen = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        its.close()
        self._connection.send((output.folder, output.staging.name, output.layout.name))

    def ask(self, task: Task) -> Staged:
        """Have a task done. Raises what it raised, and EOFError when the process ended."""
        try:
            self._connection.send_bytes(_packed(task))
            done, cause = pickle.loads(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError from error
        if isinstance(done, BaseException):
            raise done from cause  # what a full disk is known by
        return done

    def ended(self) -> bool:
        """Say whether it has ended."""
        return self._popen.poll() is not None

    def close(self) -> int:
        """End the process and return its status."""
        self._connection.close()
        self._popen.kill()
        return self._popen.wait()


def main() -> None:
    """Stage what the thread at the other end asks for, until it is gone."""
    connection, client = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a notebook that is interrupted: the client finishes what it has begun
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a client that is killed leaves nobody who writes
    if os.getppid() != client:
        return
    torch.set_num_threads(1)
    os.nice(_NICE)
    folder, name, layout = connection.recv()
    output = Output(folder, name, layout)
    while True:
        try:
            task = _unpacked(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = stage(output, task), None
        except Exception as error:
            answer = error, error.__cause__
        connection.send_bytes(_pickled(answer))


def _packed(task: Task) -> bytes:
    """Pickle a task, its tensors as arrays: torch pickles a tensor as a whole archive."""
    asked, mask = task.asked, task.loss_mask
    return pickle.dumps(
        task._replace(asked=replace(asked, token_ids=asked.token_ids.numpy()), loss_mask=None if mask is None else mask.numpy())
    )


def _unpacked(data: bytes) -> Task:
    task: Task = pickle.loads(data)
    asked, mask = task.asked, task.loss_mask
    return task._replace(
        asked=replace(asked, token_ids=torch.from_numpy(asked.token_ids)), loss_mask=None if mask is None else torch.from_numpy(mask)
    )


def _pickled(answer: tuple) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception:  # an error of a kind that cannot travel
        return pickle.dumps((RuntimeError(f"{type(answer[0]).__name__}: {answer[0]}"), None))
