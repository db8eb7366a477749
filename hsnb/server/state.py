"""Which servers this user has running: one small file each beside the spools, written by the supervisor."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from hsnb import paths
from hsnb.errors import ServerError
from hsnb.server.supervisor import is_alive

STOP_LIMIT_S = 25.0  # grace, kill limit and clearing, with room


@dataclass(frozen=True)
class Running:
    """One server that hsnb started on this host."""

    url: str
    port: int
    model: str
    pid: int  # the launcher's
    supervisor: int
    supervisor_created: float
    spool: str
    log: str
    exit_record: str
    detached: bool
    started: str  # ISO 8601, UTC

    def alive(self) -> bool:
        """Say whether its supervisor still runs."""
        return is_alive(self.supervisor, self.supervisor_created)


def state_file(port: int) -> Path:
    """Return where this user's server of `port` is written down.

    In /dev/shm, because pids mean nothing on another host or after a boot; with the uid, because users share the folder.
    """
    return paths.SPOOL_ROOT / f"server-{os.geteuid()}-{port}.json"


def reserve(port: int, about: dict) -> Path:
    """Write down that a server starts on `port`, held by this process until its supervisor takes over; return the file.

    Raises ServerError when a server of this user starts or runs there: while it loads its port still looks free.
    """
    if not paths.SPOOL_ROOT.exists():
        paths.SPOOL_ROOT.mkdir(mode=0o700, exist_ok=True)
        paths.SPOOL_ROOT.chmod(0o1777)
    path, me = state_file(port), psutil.Process()
    about = {**about, "supervisor": me.pid, "supervisor_created": me.create_time(), "launcher": 0}
    for _ in range(2):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            refuse_taken(port)
            path.unlink(missing_ok=True)  # of a server that is gone
            continue
        with os.fdopen(fd, "w") as file:
            json.dump(about, file)
        return path
    raise _taken(port, "another process")


def refuse_taken(port: int) -> None:
    """Raise ServerError when a server of this user that hsnb started runs, or still loads, on `port`."""
    if running := read_state(state_file(port)):
        raise _taken(port, f"{running.model}, started {running.started}")


def _taken(port: int, whose: str) -> ServerError:
    return ServerError(
        got=f"port {port} is taken by a server of hsnb ({whose})",
        expected="a free port",
        likely="a server that still loads, or one that was left running",
        next=f"hsnb stop {port}, or server.port: 0 for a free one",
    )


def read_state(path: Path) -> Running | None:
    """Return the server of one state file; None when there is none, it is another user's, or its supervisor is gone."""
    try:
        if path.lstat().st_uid != os.geteuid() or path.is_symlink():
            return None
        tree = json.loads(path.read_text())
        tree["pid"] = tree.pop("launcher")
        found = Running(**{f.name: tree[f.name] for f in fields(Running)})
    except (OSError, ValueError, KeyError):
        return None
    return found if found.alive() else None


def running_servers() -> list[Running]:
    """Return the servers of this user that hsnb started on this host and that still run, by port."""
    found = [read_state(path) for path in paths.SPOOL_ROOT.glob(f"server-{os.geteuid()}-*.json")]
    return sorted((s for s in found if s), key=lambda s: s.port)


def stop_server(running: Running) -> float:
    """Stop a server and wait until nothing of it is left; return the seconds it took. Raises ServerError when it does not end."""
    started = time.monotonic()
    try:
        os.kill(running.supervisor, signal.SIGTERM)
    except ProcessLookupError:
        return 0.0
    while running.alive():
        if time.monotonic() - started > STOP_LIMIT_S:
            raise ServerError(
                got=f"the server on port {running.port} still runs {STOP_LIMIT_S:.0f} s after it was told to stop",
                expected="its end within seconds",
                likely="a process that the kernel cannot interrupt (a hung GPU driver or a network file system)",
                next=f"see {running.log} and the processes below pid {running.supervisor}",
            )
        time.sleep(0.05)
    return time.monotonic() - started
