"""Find a request's dump once it is answered, or the reason why there is none."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from hsnb.dumps import dump_path
from hsnb.errors import CaptureError
from hsnb.patch.armed import read_armed


def failure(spool: Path, request_id: str) -> str:
    """Return what the plug-in says went wrong with this request, "" when nothing did."""
    for armed in read_armed(spool):
        for entry in reversed(armed.failures):
            if entry["request_id"] == request_id:
                return entry["error"]
    return ""


def collect(spool: Path, request_id: str, layout: str = "safetensors", timeout_s: float = 10.0) -> Path:
    """Return the path of the dump of an answered request; it is published during the prefill, so it should be there.

    Raises CaptureError with the plug-in's own reason, or when nothing came in `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    while True:
        if path := dump_path(spool, request_id, layout):
            return path
        if why := failure(spool, request_id):
            raise CaptureError(
                got=f"request {request_id} was answered and not captured: {why}",
                expected="a dump of its states",
                likely=_likely(why),
                next="see armed-0.json in the spool and the server's log",
            )
        if time.monotonic() > end:
            gone = "" if read_armed(spool) else "; the spool has no armed file any more"
            raise CaptureError(
                got=f"no dump of request {request_id} in {spool} after {timeout_s:g} s{gone}",
                expected="one beside armed-0.json",
                likely="the spool was removed, or is another server's" if gone else "the server has another request-id prefix, or hangs",
                next="start the server with hsnb serve, and give its URL",
            )
        time.sleep(0.005)


def free(path: Path) -> None:
    """Remove a dump that is published elsewhere, or of no use."""
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


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
