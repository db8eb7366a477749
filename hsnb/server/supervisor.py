"""Hold one server: start it, watch its owner, end every process of it, clear what it leaves.

Run as `python -m hsnb.server.supervisor`, with a JSON job on stdin (`Job`) and the server's environment as its own. It is a
process and not a thread, because the owner (a notebook's kernel, papermill, a shell) may be killed at any moment and its
server must not outlive it. Only the standard library and psutil are imported.

SGLang's launcher ends its children only when it is ready; killed while it starts, it leaves `sglang::scheduler` and others
behind. Orphans are therefore made to fall to this process (PR_SET_CHILD_SUBREAPER), where they are found and ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from hsnb.server.leftovers import ShmWatch, clear_spool

POLL_S = 0.5
GRACE_READY_S = 5.0
GRACE_LOADING_S = 1.0  # nothing to finish yet
LAUNCHER_ALONE_S = 0.5
KILL_LIMIT_S = 8.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass
class Job:
    """What the supervisor is told. Times in seconds; `owners` are (pid, create time as psutil gives it)."""

    command: list[str]
    log: str
    exit_record: str
    state: str
    spool: str  # empty: none to clear
    port: int
    keep_dumps: bool = False  # the user named the spool
    owner: str = ""  # what the spool's marker says: which server it was made for
    host: str = "127.0.0.1"
    owners: list[list[float]] = field(default_factory=list)  # none: detached
    about: dict = field(default_factory=dict)  # goes into the state file


@dataclass
class Exit:
    """The exit record, written next to the log. `code` is the launcher's (negative: killed by that signal)."""

    code: int | None = None
    signal: str = ""
    reason: str = ""  # "asked to stop", "owner 123 ended", "the server ended by itself"
    seconds: float = 0.0  # from the start of the server to its end
    removed: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # processes that would not die


def create_time(pid: int) -> float | None:
    """Return when `pid` was created (seconds since the epoch), or None when it is gone, or dead and not yet reaped."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def is_alive(pid: int, created: float) -> bool:
    """Say whether the very process (pid, create time) still runs; a recycled pid is another process."""
    now = create_time(pid)
    return now is not None and abs(now - created) < 1.0


class Supervisor:
    """One run of the job; `run` returns when nothing of the server is left."""

    def __init__(self, job: Job):
        self.job = job
        self.stop_reason = ""
        self.exit = Exit()
        self.shm = ShmWatch()
        self._exited = False
        # Python writes a byte there for each signal. No lock may be taken in a handler: it can interrupt another one that holds it
        # (with threading.Event the supervisor stood still for ever when two children stopped at once).
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def _on_signal(self, number: int, _frame) -> None:
        if number != signal.SIGCHLD:
            self.stop_reason = self.stop_reason or "asked to stop"

    def _wait(self, seconds: float) -> None:
        """Wait for a signal; a plain sleep would finish its half second before one is heeded."""
        if select.select([self._woken], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)

    def run(self) -> Exit:
        """Start the server, wait for its end or a reason to end it, and clear up."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        started = time.monotonic()
        try:
            with open(self.job.log, "ab") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                child = subprocess.Popen(self.job.command, **streams, start_new_session=True, preexec_fn=_die_with_parent)
        except OSError as error:
            self.exit.reason = f"could not start {self.job.command[0]}: {error.strerror}"
            self._write_exit(started)
            return self.exit
        self.launcher = child.pid
        self._write_state()
        while not self.stop_reason:
            self._reap()
            if self._exited:
                self.stop_reason = "the server ended by itself"
            for pid, created in self.job.owners:
                if not is_alive(int(pid), created):
                    self.stop_reason = self.stop_reason or f"owner {int(pid)} ended"
            if not self.stop_reason:
                self.shm.look(self._family)
                self._wait(POLL_S)
        self.exit.reason = self.stop_reason
        self.end()
        self._write_exit(started)
        return self.exit

    def _family(self) -> set[int]:
        """Return every living process of the server: descendants, and whatever shares the launcher's session or group."""
        pids = {p.pid for p in psutil.Process().children(recursive=True)}
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if self.launcher in (os.getsid(pid), os.getpgid(pid)):
                    pids.add(pid)
        return pids

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.launcher:
                self._exited = True
                self.exit.code = os.waitstatus_to_exitcode(status)
                if self.exit.code < 0:
                    self.exit.signal = signal.Signals(-self.exit.code).name

    def end(self) -> None:
        """End every process of the server, politely first, then remove its files."""
        grace = GRACE_READY_S if self._listening() else GRACE_LOADING_S
        # Stopped processes make no new files and no new children while the owners of files are looked up.
        family = self._signal(signal.SIGSTOP)
        self.shm.look(lambda: family, final=True)
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        self._wait_gone(grace)
        limit = time.monotonic() + KILL_LIMIT_S
        while (family := self._signal(signal.SIGKILL)) and time.monotonic() < limit:
            self._wait_gone(0.2)
        self.exit.left = sorted(family)
        self.exit.removed = self.shm.remove()
        if self.job.spool and clear_spool(Path(self.job.spool), self.job.owner, keep_dumps=self.job.keep_dumps):
            self.exit.removed.append(self.job.spool)
        Path(self.job.state).unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> set[int]:
        self._reap()
        family = self._family()
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return family

    def _wait_gone(self, seconds: float) -> None:
        """Wait until all have ended, at most `seconds`; shorter when the launcher is all that is left.

        Told to stop, SGLang's launcher drains requests for 5 s, but its schedulers have ended by then.
        """
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            self._reap()
            family = self._family()
            if not family:
                return
            if all(pid == self.launcher or _is_tracker(pid) for pid in family):
                limit = min(limit, time.monotonic() + LAUNCHER_ALONE_S)
            time.sleep(0.05)

    def _listening(self) -> bool:
        with socket.socket(family(self.job.host)) as probe:
            probe.settimeout(0.5)
            return probe.connect_ex((self.job.host, self.job.port)) == 0

    def _write_state(self) -> None:
        about = {
            **self.job.about,
            "supervisor": os.getpid(),
            "supervisor_created": psutil.Process().create_time(),
            "launcher": self.launcher,
            "log": self.job.log,
            "exit_record": self.job.exit_record,
            "spool": self.job.spool,
            "detached": not self.job.owners,
        }
        write_json(Path(self.job.state), about)

    def _write_exit(self, started: float) -> None:
        self.exit.seconds = round(time.monotonic() - started, 2)
        with contextlib.suppress(OSError):  # the log's folder may be gone with the run; the processes are what matters
            write_json(Path(self.job.exit_record), asdict(self.exit))


def family(host: str) -> socket.AddressFamily:
    """Return the address family of a host given as a name or a number."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _is_tracker(pid: int) -> bool:
    """Say whether `pid` is Python's resource tracker, which ends with the process that started it and ignores SIGTERM."""
    try:
        return any("resource_tracker" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return True  # gone


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the session and the process group remain
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write_json(path: Path, tree: dict) -> None:
    """Write `tree` for this user only (0600), whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(tree, file, indent=1)
    os.replace(temporary, path)


def main() -> int:
    """Read the job from stdin and run it."""
    result = Supervisor(Job(**json.load(sys.stdin))).run()
    return 1 if result.left else 0


if __name__ == "__main__":
    raise SystemExit(main())
