"""The server a notebook works with: attached to by URL, or one of its own that ends with the kernel at the latest."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

from hsnb import probe
from hsnb.errors import ParamsError
from hsnb.params import Deployment
from hsnb.paths import run_dir
from hsnb.progress import Progress
from hsnb.server import Server, attach

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
