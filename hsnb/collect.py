"""Find a request's dump once it is answered, or the reason why there is none; and what dead clients left in a spool."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from pathlib import Path

from hsnb.dumps import dump_path, list_dumps, open_dump
from hsnb.errors import CaptureError, DumpError
from hsnb.patch.armed import read_armed

TIMEOUT_S = 10.0
PATIENCE = 30  # times that, while the server publishes others
LOOK_S = 0.005
FAILURES_S = 0.25  # between two looks at the armed file, which is larger than most dumps' names


def failure(spool: Path, request_id: str) -> str:
    """Return what the plug-in says went wrong with this request, "" when nothing did."""
    for armed in read_armed(spool):
        for entry in reversed(armed.failures):
            if entry["request_id"] == request_id:
                return entry["error"]
    return ""


def collect(spool: Path, request_id: str, layout: str = "safetensors", timeout_s: float = TIMEOUT_S) -> Path:
    """Return the path of the dump of an answered request; it is written beside the prefill, so it may come a moment later.

    Raises CaptureError with the plug-in's own reason, or when the server has published no dump, and written to none, for `timeout_s`.
    """
    for path in _looks(spool, request_id, layout, timeout_s):
        if path:
            return path
        time.sleep(LOOK_S)
    raise AssertionError("unreachable")


async def acollect(spool: Path, request_id: str, layout: str = "safetensors", timeout_s: float = TIMEOUT_S) -> Path:
    """Do what `collect` does without blocking the loop."""
    for path in _looks(spool, request_id, layout, timeout_s):
        if path:
            return path
        await asyncio.sleep(LOOK_S)
    raise AssertionError("unreachable")


def _looks(spool: Path, request_id: str, layout: str, timeout_s: float):
    """Yield the dump's path, or None while it is not there, until there is a reason to raise CaptureError."""
    begun = time.monotonic()
    end, asked, told = begun + timeout_s, 0.0, None
    while True:
        yield dump_path(spool, request_id, layout)
        now = time.monotonic()
        if now - asked > FAILURES_S:
            asked = now
            if why := failure(spool, request_id):
                raise CaptureError(
                    got=f"request {request_id} was answered and not captured: {why}",
                    expected="a dump of its states",
                    likely=_likely(why),
                    next="see armed-0.json in the spool and the server's log",
                )
            if told != (told := [a.counts.get("captured") for a in read_armed(spool)]):  # a slow disk: others' dumps are before ours
                end = min(now + timeout_s, begun + PATIENCE * timeout_s)
        if now > end and now < begun + PATIENCE * timeout_s and _being_written(spool, timeout_s):  # one long dump on a slow disk
            end = now + FAILURES_S
        if now > end:
            gone = "" if read_armed(spool) else "; the spool has no armed file any more"
            raise CaptureError(
                got=f"no dump of request {request_id} in {spool} after {timeout_s:g} s{gone}",
                expected="one beside armed-0.json",
                likely="the spool was removed, or is another server's" if gone else "the server has another request-id prefix, or hangs",
                next="start the server with hsnb serve, and give its URL",
            )


def _being_written(spool: Path, seconds: float) -> bool:
    """Say whether the server has put rows into any unfinished dump in the last `seconds`."""
    newest = 0.0
    for path in spool.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # published meanwhile
            newest = max(newest, path.stat().st_mtime)
    return time.time() - newest < seconds


def free(path: Path) -> None:
    """Remove a dump that is published elsewhere, or of no use."""
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def sweep(spool: Path, prefix: str, but: str | None = None) -> int:
    """Remove the dumps of requests whose ids begin with `prefix` and not with `but`, when it is given; return how many.

    A killed client leaves dumps in a living server's spool. Its ids begin with its ledger's name, and this process holds that
    ledger's lock: nobody waits for them any more.
    """
    removed = 0
    for path in list_dumps(spool):
        try:
            request_id = open_dump(path).request_id
        except DumpError:  # freed meanwhile by its own client
            continue
        if request_id.startswith(prefix) and not (but and request_id.startswith(but)):
            free(path)
            removed += 1
    return removed


def _likely(why: str) -> str:
    for word, cause in {
        "No space": "the spool's file system is full",
        "too large": "the spool's file system, or a limit, does not take a file of this size",
        "Permission": "the spool cannot be written to by the server",
        "Read-only": "the spool cannot be written to by the server",
        "No such file": "the spool was removed while the server ran",
        "radix": "the server runs with the radix cache",
    }.items():
        if word in why:
            return cause
    return "see the reason above"
