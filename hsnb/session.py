"""The server a notebook works with: attached to by URL, or one of its own that ends with the kernel at the latest."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hsnb import probe
from hsnb.errors import ParamsError
from hsnb.params import Deployment
from hsnb.paths import run_dir, write_json
from hsnb.progress import Progress
from hsnb.server import Server, attach

if TYPE_CHECKING:
    from hsnb.server.preflight import Preflight
    from hsnb.server.verdict import ServerVerdict

_own: list[Server] = []  # of this process: one at most


def deployment_of(p) -> Deployment:
    """Return the deployment that a notebook's parameters name, with `spool` put in when it is given."""
    return Deployment.load(p.params, **({"server": {"spool": p.spool}} if p.spool and "," not in p.spool else {}))


def open_server(p, deployment: Deployment, *, keep: bool = False) -> Server:
    """Attach to `p.server_url`, or start a server; one that this process started before is stopped first.

    A cell that is run again in the same kernel thus leaves no server behind. `keep`: the server outlives the kernel, until
    `hsnb stop`. Raises ServerError, CaptureError or ParamsError.
    """
    close_server()
    if p.server_url:
        return attach(p.server_url, spool=p.spool, expect=deployment)
    with starting() as tell:
        server = Server.start(deployment, log_dir=run_dir(p.run), detach=keep, progress=tell)
    if not keep:
        _own.append(server)
        atexit.register(server.stop)
    return server


def open_servers(p, deployment: Deployment, *, prove: bool = False) -> list[Server]:
    """Attach to every server of `p.server_url`, a comma list, or start one.

    `p.spool`, when it is given, has as many folders. `prove`: probe those that have no PASS yet. Raises as `open_server` does.
    """
    urls, spools = _words(p.server_url), _words(p.spool)
    if len(urls) <= 1:
        servers = [open_server(p, deployment)]
    elif spools and len(spools) != len(urls):
        raise ParamsError(
            got=f"{len(spools)} spools for {len(urls)} servers",
            expected="as many, in the same order, or none",
            likely="a URL or a folder left out",
            next="leave out spool: hsnb's own servers say where theirs is",
        )
    else:
        close_server()
        pairs = zip(urls, spools or [""] * len(urls), strict=True)
        servers = [attach(url, spool=spool, expect=deployment) for url, spool in pairs]
    if prove:
        for server in servers:
            probe.ensure(server)
    return servers


def note_server(p, checked: Preflight, server: Server | None = None, result: ServerVerdict | None = None) -> Path:
    """Write outputs/{run}/server.json, which the run's index reads: what the preflight said and, of a server that answers, what it armed.

    To be called before the start too: a start that fails then leaves what was checked, and not the verdict of an earlier server.
    `ok` is the server's verdict where there is one: a preflight is about a server to be started, not about one attached to.
    """
    tree = {"ok": result is not None and result.ok, "verdict": _said(checked, server, result), "preflight": checked.as_dict()}
    if server is not None and result is not None:
        kept = ("rank", "model_class", "dtype", "boundaries", "final")
        tree["armed"] = [{name: getattr(rank, name) for name in kept} for rank in server.armed]
        tree["checks"] = [check.as_dict() for check in result.checks]
    return write_json(run_dir(p.run) / "server.json", tree)


def _said(checked: Preflight, server: Server | None, result: ServerVerdict | None) -> str:
    if server is None or result is None:
        failed = ", ".join(row.check for row in checked.rows if not row.ok)
        return f"no server: preflight failed ({failed})" if failed else "no server: preflight passed"
    if bad := [f"{check.name} is {check.value}" for check in result.checks if not check.ok]:
        return f"FAIL: {'; '.join(bad)}"
    first = server.armed[0]
    armed = ", ".join(f"B_{b}" for b in first.boundaries)
    return f"PASS: {armed} and final ({first.final}) armed on {len(server.armed)} of {first.tp_size} ranks"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def close_server() -> None:
    """Stop the server that `open_server` started; an attached or kept one goes on."""
    while _own:
        server = _own.pop()
        server.stop()
        atexit.unregister(server.stop)


@contextmanager
def starting() -> Iterator:
    """Show a server's start as one progress output; yields the callable that Server.start tells its last log line to."""
    with Progress(None, unit="s", desc="starting the server") as progress:

        def tell(seconds: float, line: str) -> None:
            progress.advance(max(0, int(seconds) - progress.done), note=line[-100:])

        yield tell
        progress.advance(0, note="ready")
