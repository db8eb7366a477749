"""armed-{rank}.json: what each scheduler armed, counted and failed at, written from inside it and read by the client.

The file is laid out once with room to spare and its end then rewritten in place, so that it can still be updated when the
file system is full. One number before that end is not the scheduler's: the dumps, counted by the process that writes them. Only the
standard library is used: this module is imported in every SGLang process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

ARMED_FORMAT = 1
MAX_FAILURES = 512  # more than a client has in flight: the latest ones; `counts` has the sum
RING_FULL = "ring_full_ms"  # the one count that is none of requests: how long forwards waited for the writer's ring
CAPTURED = "captured"
_ROOM = 192 * 1024  # bytes for counts and failures
_DIGITS = 20  # bytes for the number of dumps


@dataclass
class Armed:
    """One scheduler's account. `state` is "armed", or "refused" with the reason in `error` (nothing is captured then)."""

    state: str
    error: str = ""
    rank: int = 0
    pid: int = 0
    pid_created: float = 0.0  # seconds since the epoch, as psutil gives it: tells a recycled pid
    port: int = 0
    started: str = ""  # ISO 8601, UTC
    sglang_version: str = ""
    patch_version: str = ""
    model_path: str = ""
    model_class: str = ""
    config_hash: str = ""  # sha256 of the model's config.json
    num_layers: int = 0
    hidden_size: int = 0
    dtype: str = ""  # of the model's forward: "float32", "bfloat16", ...
    boundaries: list[int] = field(default_factory=list)
    layers_to_capture: list[int] = field(default_factory=list)  # read back from the model after setting it
    final: str = ""
    format: str = ""
    only: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    env: dict[str, str] = field(default_factory=dict)  # NCCL_*, CUDA_* and SGLANG_* as this scheduler really has them
    server_args: dict = field(default_factory=dict)  # SGLang's own, those that are plain values
    counts: dict[str, int] = field(default_factory=dict)  # captured, failed, and seen but not asked for: warmup, health, other; RING_FULL
    failures: list[dict[str, str]] = field(default_factory=list)  # {"request_id", "error"}
    hsnb_format: int = ARMED_FORMAT


class Captured:
    """The number of dumps, in its place in an armed file that is open as `fd`."""

    def __init__(self, fd: int, offset: int):
        self._fd, self._offset, self._changing = fd, offset, threading.Lock()
        self.number = int(os.pread(fd, _DIGITS, offset) or 0)

    def add(self, n: int) -> int:
        """Count dumps and return how many there are; safe in several threads of one process."""
        with self._changing:
            self.number += n
            os.pwrite(self._fd, b"%-*d" % (_DIGITS, self.number), self._offset)
            return self.number


class ArmedFile:
    """The scheduler's side: one file, held open, its changing end rewritten in place.

    Raises OSError when `spool` cannot be written to.
    """

    def __init__(self, spool: Path, armed: Armed):
        self.path = spool / f"armed-{armed.rank}.json"
        self.armed = armed
        fixed = {k: v for k, v in asdict(armed).items() if k not in ("counts", "failures")}
        head = json.dumps(fixed, indent=1).encode()[:-2] + f',\n "counts": {{"{CAPTURED}": '.encode()
        temporary = spool / f".armed-{armed.rank}.{os.getpid()}.tmp"
        self.fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.captured_at = os.write(self.fd, head + b"%-*d" % (_DIGITS, armed.counts.setdefault(CAPTURED, 0))) - _DIGITS
        self.captured = Captured(self.fd, self.captured_at)
        self._offset = self.captured_at + _DIGITS
        self._longest = _ROOM  # lays the room out
        self.update()
        self._longest = 0
        os.replace(temporary, self.path)

    def update(self) -> None:
        """Write the present counts and failures, the oldest left out if they would outgrow their room; JSON allows padding."""
        while True:
            counts = "".join(f", {json.dumps(what)}: {n}" for what, n in self.armed.counts.items() if what != CAPTURED)
            tail = f'{counts}}}, "failures": {json.dumps(self.armed.failures)}}}'.encode()
            if len(tail) <= _ROOM:
                break
            del self.armed.failures[0]
        self._longest = max(self._longest, len(tail))
        os.pwrite(self.fd, tail.ljust(self._longest), self._offset)  # behind it there are only spaces

    def count(self, what: str, n: int = 1) -> None:
        """Count one request, or add to a count. Dumps are counted here only when no process of its own writes them (tests, stubs)."""
        if what == CAPTURED:
            self.armed.counts[what] = self.captured.add(n)
        else:
            self.armed.counts[what] = self.armed.counts.get(what, 0) + n
            self.update()

    def fail(self, request_id: str, error: str) -> None:
        """Count a failed request and keep the reason where the client can read it."""
        self.armed.failures.append({"request_id": request_id[:200], "error": error[:240]})
        del self.armed.failures[:-MAX_FAILURES]
        self.count("failed")


def refuse(spool: Path, error: str, **known) -> None:
    """Write why nothing is captured to armed-{rank}.json."""
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    ArmedFile(spool, Armed(state="refused", error=error, pid=os.getpid(), **known))


def read_armed(spool: Path) -> list[Armed]:
    """Return what the schedulers of `spool` armed, by rank; an empty list when no plug-in wrote there.

    A file caught in the middle of a rewrite is read again; unknown fields (a newer plug-in) are ignored.
    """
    known = {f.name for f in fields(Armed)}
    found = []
    for path in sorted(Path(spool).glob("armed-*.json")):
        for attempt in range(5):
            try:
                tree = json.loads(path.read_bytes())
                break
            except FileNotFoundError:
                tree = None
                break
            except ValueError:
                if attempt == 4:
                    raise
                time.sleep(0.02)
        if tree:
            found.append(Armed(**{k: v for k, v in tree.items() if k in known}))
    return sorted(found, key=lambda a: a.rank)
