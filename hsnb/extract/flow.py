"""How much may be in flight: what the engine can use, what the spool can hold, what the output can take."""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from pathlib import Path

import torch

from hsnb.errors import ExtractError
from hsnb.limits import server_limits
from hsnb.params import ExtractParams
from hsnb.sizes import SPOOL_FLOOR
from hsnb.sizes import floor as least_free

SPOOL_SHARE = 0.5  # of the spool's free bytes that requests in flight may need: others use /dev/shm too
MAX_REQUESTS = 256  # in the server at once
MAX_DUMPS = 256  # answered and not published yet: writers that are this far behind are not helped by more
HEADER = 8192  # bytes of a dump besides states and ids, at most
WINDOW_S = 300.0  # of the rate that forecasts look at


class Disk:
    """A file system that is written to, by all workers of a run: its free bytes above a floor, and how long they last."""

    def __init__(self, path: Path, floor: int | None, most: int):
        self.path = path
        self.floor = least_free(floor, most, shutil.disk_usage(path).total)
        self._lock, self._pending = threading.Lock(), 0
        self._written: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def room(self) -> int:
        """Return the bytes that may still be written, without those that are promised already."""
        return shutil.disk_usage(self.path).free - self.floor - self._pending

    def promise(self, size: int) -> None:
        """Count `size` bytes that will be written; a negative size when they are, or will not be."""
        with self._lock:
            self._pending += size

    def note(self, written: int) -> None:
        """Tell how many bytes this run has written in all, for the forecast."""
        now = time.monotonic()
        self._written.append((now, written))
        while len(self._written) > 2 and now - self._written[0][0] > WINDOW_S:
            self._written.popleft()

    def lasts_s(self, left: int) -> float | None:
        """Return the seconds until the floor is met at the present rate; None when `left` bytes, all that is to come, fit."""
        (since, before), (now, after) = self._written[0], self._written[-1]
        room = self.room()
        if left <= room or after <= before or now <= since:
            return None
        return max(room, 0) / ((after - before) / (now - since))

    def words(self) -> str:
        return f"{gb(shutil.disk_usage(self.path).free)} free in {self.path}, of which {gb(self.floor)} stay free"


class Flow:
    """What one server has in flight. Used by its worker's loop alone.

    Two bounds. In the server: as many tokens as its KV pool holds and a prefill more, so that there is always a batch that can
    start. In the spool: bytes of dumps that exist or will, up to half of what is free above the floor, looked at each time.
    A slow disk fills the spool's budget and so slows the requests; while the spool has room the engine never waits for it.
    """

    def __init__(self, server, limits: ExtractParams, in_flight_tokens: int = 0):
        armed, info = server.armed[0], server.info
        self.spool = server.spool
        self.token_bytes = (len(armed.boundaries) + 1) * armed.hidden_size * getattr(torch, armed.dtype).itemsize + 8
        pool = int(info.get("max_total_num_tokens") or 8192)
        chunk = int(info.get("chunked_prefill_size") or 0)
        self.most_tokens = in_flight_tokens or pool + max(chunk, 0)
        self.most_requests = max(8, min(MAX_REQUESTS, 2 * int(info.get("max_running_requests") or MAX_REQUESTS)))
        self.longest = server_limits(info).longest or pool  # one more is refused, or never answered
        self.given = in_flight_tokens
        self.disk = Disk(self.spool, limits.spool_floor, SPOOL_FLOOR)
        self.tokens = self.requests = self.dumps = 0  # in the server; answered and not freed
        self.asked = self.held = 0  # bytes of dumps that may still be written, and of those that are there

    def need(self, tokens: int) -> int:
        """Return the bytes of a dump of so many tokens."""
        return tokens * self.token_bytes + HEADER

    def full(self, tokens: int) -> str:
        """Return why a request of `tokens` must wait: "engine", "writers" or "spool"; "" when it may go."""
        busy = self.requests or self.held
        if self.requests and (self.tokens + tokens > self.most_tokens or self.requests >= self.most_requests):
            return "engine"
        if self.dumps >= MAX_DUMPS:
            return "writers"
        if self.given and self.held and self.tokens + self.held // self.token_bytes + tokens > self.given:
            return "engine"  # a bound that was asked for holds until the dump is freed
        need, free = self.need(tokens), shutil.disk_usage(self.spool).free
        usable = min(SPOOL_SHARE * (free + self.held), free + self.held - self.disk.floor)
        if self.asked + self.held + need <= usable or (not busy and need <= free - self.disk.floor):
            return ""
        return "spool"

    def never(self, tokens: int) -> bool:
        """Say whether a dump of `tokens` would not fit the spool's file system even if it were empty."""
        return self.need(tokens) + self.disk.floor > shutil.disk_usage(self.spool).total

    def sent(self, tokens: int) -> None:
        self.tokens, self.requests, self.asked = self.tokens + tokens, self.requests + 1, self.asked + self.need(tokens)

    def answered(self, tokens: int) -> None:
        self.tokens, self.requests = self.tokens - tokens, self.requests - 1
        self.asked, self.held, self.dumps = self.asked - self.need(tokens), self.held + self.need(tokens), self.dumps + 1

    def freed(self, tokens: int) -> None:
        self.held, self.dumps = self.held - self.need(tokens), self.dumps - 1


def check_fits(flow: Flow, rows, lengths) -> None:
    """Refuse before the first request what the server cannot prefill whole, or the spool not hold."""
    longest = max(rows, key=lambda r: lengths[r], default=None)
    if longest is None:
        return
    if lengths[longest] > flow.longest:
        raise ExtractError(
            got=f"row {longest} has {lengths[longest]} tokens",
            expected=f"at most {flow.longest} (what the server's context_length and max_total_num_tokens leave for a prompt)",
            likely="max_length is larger than the server's context",
            next="lower max_length in a new run, or raise server.context_length and server.max_total_tokens",
        )
    if flow.never(lengths[longest]):
        raise ExtractError(
            got=f"row {longest} has {lengths[longest]} tokens, a dump of {gb(flow.need(lengths[longest]))}",
            expected=f"less than the spool's file system holds ({gb(shutil.disk_usage(flow.spool).total)} at {flow.spool})",
            likely="a small /dev/shm, as containers have it",
            next="a larger one (docker run --shm-size), or -p spool FOLDER on another file system",
        )


def gb(size: float) -> str:
    """Return bytes in words: 1.23 GB."""
    return f"{size / 1e9:,.2f} GB" if abs(size) >= 1e8 else f"{size / 1e6:,.1f} MB"


def hours(seconds: float) -> str:
    """Return 19200 as "5 h 20 min" and 75 as "1 min 15 s"."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {s} s" if minutes else f"{s} s"
