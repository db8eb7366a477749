"""Progress of a long loop: one output that updates itself in a notebook, a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import collections
import contextlib
import html
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

NOTEBOOK_INTERVAL_S = 0.5  # each update is a message that papermill handles and may save the notebook for
PIPE_INTERVAL_S = 10.0
ADDRESS = "HSNB_PROGRESS"  # the variable that tells a kernel where its process listens
MOST_BYTES = 8192
WINDOW_S = 60.0  # the rate is that of the last minute: the first requests of a server are slow and would spoil the ETA


class _Sink(Protocol):
    interval_s: float

    def show(self, progress: Progress, *, last: bool) -> None: ...


class Progress:
    """Count `unit`s of a loop: `with Progress(total, unit="tokens", desc="shard 4") as p: p.advance(n, note="...")`.

    advance() may be called from several threads. It is shown at most twice a second, and the last state always: also that
    of a loop that was left by an exception, marked "stopped". In an executed notebook one output remains.
    """

    def __init__(self, total: int | None, *, unit: str = "it", desc: str = ""):
        self.total, self.unit, self.desc = total or None, unit, desc
        self.done, self.note, self.stopped = 0, "", False
        self._lock = threading.Lock()
        self._start = self._shown = self._end = 0.0
        self._samples: collections.deque[tuple[float, int]] = collections.deque()
        self._sink: _Sink | None = None

    def __enter__(self) -> Progress:
        self._start = self._shown = time.monotonic()
        self._samples.append((self._start, 0))
        self._sink = _sink(self)
        self._sink.show(self, last=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self.stopped = kind is not None
            self._end = time.monotonic()
            if self._sink is not None:
                self._sink.show(self, last=True)

    def advance(self, n: int = 1, note: str | None = None) -> None:
        """Count `n` more units; `note` replaces the free text."""
        with self._lock:
            self.done += n
            self.note = self.note if note is None else note
            now = time.monotonic()
            if self._sink is not None and now - self._shown >= self._sink.interval_s:
                self._sample(now)
                self._shown = now
                self._sink.show(self, last=False)

    def _sample(self, now: float) -> None:
        self._samples.append((now, self.done))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the loop began, until it ended."""
        return (self._end or time.monotonic()) - self._start if self._start else 0.0

    @property
    def rate(self) -> float:
        """Units per second over the last minute; over the whole loop once it has ended."""
        since, done = (self._start, 0) if self._end or not self._samples else self._samples[0]
        seconds = (self._end or time.monotonic()) - since
        return (self.done - done) / seconds if self._start and seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at this rate; None while that is unknown (no total, or nothing done yet)."""
        if self.total is None or (rate := self.rate) <= 0:
            return None
        return max(self.total - self.done, 0) / rate

    def __str__(self) -> str:
        of = f" of {self.total:,}" if self.total else ""
        parts = [f"{self.done:,}{of} {self.unit}"]
        if self.total:
            parts.append(f"{100 * self.done / self.total:.0f} %")
        if self.unit != "s":  # seconds are counted while something starts: they have no rate
            parts.append(f"{self.rate:,.0f} {self.unit}/s" if self.rate >= 10 else f"{self.rate:.2f} {self.unit}/s")
        if self._end:
            parts.append(f"{'stopped after' if self.stopped else 'took'} {_clock(self.elapsed_s)}")
        elif (eta := self.eta_s) is not None:
            parts.append(f"{_clock(eta)} left")
        if self.note:
            parts.append(self.note)
        return (f"{self.desc}: " if self.desc else "") + " · ".join(parts)


class _Display:
    """One display of a kernel, updated in place."""

    interval_s = NOTEBOOK_INTERVAL_S

    def __init__(self) -> None:
        self.handle: Any = None

    def show(self, progress: Progress, *, last: bool) -> None:
        from IPython.display import display

        text = str(progress)
        share = min(progress.done / progress.total, 1.0) if progress.total else float(last and not progress.stopped)
        colour = "#b00020" if progress.stopped else "#0072b2"
        bar = f'<div style="width:{100 * share:.1f}%;height:100%;background:{colour}"></div>'
        page = f'<div style="max-width:40em;height:.5em;background:#8883">{bar}</div><div>{html.escape(text)}</div>'
        bundle = {"text/plain": text, "text/html": page}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)


class _Bar:
    """tqdm on a terminal's stderr."""

    interval_s = NOTEBOOK_INTERVAL_S

    def __init__(self, progress: Progress):
        from tqdm import tqdm

        self.bar = tqdm(total=progress.total, unit=f" {progress.unit}", desc=progress.desc or None, file=sys.stderr, mininterval=0)

    def show(self, progress: Progress, *, last: bool) -> None:
        self.bar.set_postfix_str("stopped" if progress.stopped else progress.note, refresh=False)
        self.bar.update(progress.done - self.bar.n)
        if last:
            self.bar.refresh()
            self.bar.close()


class _Lines:
    """A plain line on stderr, for logs."""

    interval_s = PIPE_INTERVAL_S

    def show(self, progress: Progress, *, last: bool) -> None:
        if last or progress.done:
            sys.stderr.write(f"{progress}\n")
            sys.stderr.flush()


class _Mirror:
    """What a kernel shows, told to the process that runs the kernel as well, for its terminal (see `mirror`)."""

    interval_s = NOTEBOOK_INTERVAL_S

    def __init__(self, address: str):
        self.display, self.address = _Display(), address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def show(self, progress: Progress, *, last: bool) -> None:
        self.display.show(progress, last=last)
        names = ("done", "total", "unit", "desc", "note", "stopped")
        tree = {name: getattr(progress, name) for name in names} | {"text": str(progress), "last": last}
        with contextlib.suppress(OSError):  # nobody listens any more: the notebook has it
            self.socket.sendto(json.dumps(tree).encode()[:MOST_BYTES], socket.MSG_DONTWAIT, self.address)
        if last:
            self.socket.close()


@dataclass
class _Shown:
    """A loop of a kernel as its process was told of it; what a sink takes for the loop itself."""

    done: int
    total: int | None
    unit: str
    desc: str
    note: str
    stopped: bool
    text: str
    last: bool

    def __str__(self) -> str:
        return self.text


@contextlib.contextmanager
def mirror() -> Iterator[None]:
    """Show the progress of a kernel that this process starts on this process's terminal too, a bar or a line now and then.

    papermill shows cells, and one cell may take a day. The kernel inherits the address of a socket and writes to it.
    """
    with tempfile.TemporaryDirectory(prefix="hsnb-") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        address = f"{folder}/progress"
        try:
            listening.bind(address)
        except OSError:  # a TMPDIR of more than some hundred characters: the notebook shows it all the same
            yield
            return
        before, os.environ[ADDRESS] = os.environ.get(ADDRESS), address
        teller = threading.Thread(target=_tell, args=(listening,), name="hsnb-progress", daemon=True)
        teller.start()
        try:
            yield
        finally:
            os.environ.pop(ADDRESS) if before is None else os.environ.__setitem__(ADDRESS, before)
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.sendto(b"", address)
            teller.join(5.0)


def _tell(listening: socket.socket) -> None:
    """Show what kernels say until an empty message comes."""
    sink: _Sink | None = None
    told = 0.0
    while message := listening.recv(MOST_BYTES):
        try:
            shown: Any = _Shown(**json.loads(message))
        except (ValueError, TypeError):
            continue
        if sink is None:
            sink, told = (_Bar(shown) if sys.stderr.isatty() else _Lines()), time.monotonic()
        if shown.last or time.monotonic() - told >= sink.interval_s:
            told = time.monotonic()
            sink.show(shown, last=shown.last)
        if shown.last:
            sink = None


def _sink(progress: Progress) -> _Sink:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None  # a kernel has IPython loaded
    if getattr(shell, "kernel", None) is not None:
        return _Mirror(address) if (address := os.environ.get(ADDRESS)) else _Display()
    return _Bar(progress) if sys.stderr.isatty() else _Lines()


def _clock(seconds: float) -> str:
    """Return 75 as 1:15 and 3675 as 1:01:15."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}" if minutes >= 60 else f"{minutes}:{s:02d}"
