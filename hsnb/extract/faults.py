"""What went wrong, and whose it is: the sample's, the server's or the disk's. A server that hangs, and a restart of one of ours."""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from pathlib import Path

from hsnb import probe
from hsnb.errors import ExtractError, HsnbError, ServerError
from hsnb.patch.armed import read_armed
from hsnb.server import Server

log = logging.getLogger(__name__)
DISK_TRIES = 4  # at an output that fails, half a second, one and two apart
_FULL = {errno.ENOSPC, errno.EDQUOT}


class ServerLost(Exception):
    """The server has ended, hangs, or cannot be reached: nothing that it was asked for will come."""


class DiskFull(ExtractError):
    """The spool or the output is full, and the run's patience is at its end."""


class CanaryOut(Exception):
    """The server no longer gives what it gave for the same prompt."""


def disk_full(error: BaseException) -> bool:
    """Say whether a write failed for want of room; safetensors and sqlite put it in words of their own."""
    cause = error.__cause__ or error
    return getattr(cause, "errno", None) in _FULL or any(w in str(cause) for w in ("No space left", "disk is full", "quota exceeded"))


def disk_trouble(error: BaseException) -> bool:
    """Say whether it was the output that failed, and not the sample."""
    return isinstance(error, (ExtractError, OSError, sqlite3.Error))


class HangWatch:
    """Tell a server that works from one that hangs: its spool or its counts change while it runs what it was asked."""

    def __init__(self, spool: Path, limit_s: float):
        self.spool, self.limit_s = spool, limit_s
        self._seen: tuple = ()
        self._since = time.monotonic()

    def hangs(self, waiting: int, answered: int) -> bool:
        """Look once; True when requests have been `waiting` and nothing has moved for the limit."""
        seen = (answered, *self._moves()) if waiting else (time.monotonic(),)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return time.monotonic() - self._since > self.limit_s

    def _moves(self) -> tuple:
        """Return what each forward changes: a chunk writes into a file of the spool, a request ends in the counts."""
        newest = 0
        for path in self.spool.iterdir():
            try:
                newest = max(newest, path.stat().st_mtime_ns)
            except OSError:
                continue  # freed meanwhile
        armed = read_armed(self.spool)
        return newest, tuple(sorted(armed[0].counts.items())) if armed else ()


def can_restart(server) -> bool:
    """Say whether the server is one that this process started."""
    return isinstance(server, Server) and not server.attached and server.deployment is not None


def restart(server: Server) -> None:
    """Start a lost server of ours again, prove it, and let `server` be the new one.

    It changes in place, because others hold it: the notebook that will stop it, and the handler that stops it at exit.
    Raises HsnbError when it does not start, or does not pass the probe.
    """
    folder = server.log.parent if server.log else None
    server._end()
    new = Server.start(server.deployment, log_dir=folder, capture=server.capture, detach=server.detached)
    vars(server).update(vars(new))
    probe.ensure(server)


def lost(error: object, server, done: int, asked: int) -> ServerError:
    """Say what the loss of a server means for the shard: what is kept, where to look, and that it can go on."""
    said = error.got if isinstance(error, HsnbError) else str(error)
    return ServerError(
        got=f"the server at {server.url} is lost after {done:,} of {asked:,} samples ({said})",
        expected="answers until the shard is done",
        likely=f"it was stopped or killed, or hangs; its log: {server.log or 'on the side that started it'}",
        next="run the same shard again: what is published is entered, and it goes on where it stopped",
    )


def first_of(error: BaseException) -> BaseException:
    """Return the first error of a task group's group, or `error` itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
