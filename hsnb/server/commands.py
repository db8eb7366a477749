"""`hsnb serve` and `hsnb stop`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hsnb.cli import Command
from hsnb.errors import HsnbError, ParamsError, ServerError
from hsnb.params import Deployment
from hsnb.paths import run_dir
from hsnb.server import causes
from hsnb.server.ready import failure, read_exit
from hsnb.server.server import Server
from hsnb.server.state import Running, running_servers, stop_server

logger = logging.getLogger("hsnb.server")
_TELL_EVERY_S = 5.0


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hsnb serve`."""
    parser.add_argument("params", nargs="?", default="params/demo.yaml", help="a params/*.yaml (default: %(default)s)")
    parser.add_argument("--port", type=int, default=None, metavar="N", help="listen here instead of the params' port (0: a free one)")
    parser.add_argument("--spool", default="", metavar="DIR", help="the server's spool (default: /dev/shm/hsnb/{port})")
    parser.add_argument("--run", default="server", help="where the log goes: outputs/RUN (default: %(default)s)")
    parser.add_argument("--detach", action="store_true", help="return when it is ready and leave it running until hsnb stop")
    parser.add_argument("--no-capture", action="store_true", help="leave the plug-in off (to compare with)")


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Start a server; stay until Ctrl-C, SIGTERM or its end, or return when it is ready (--detach).

    Raises ServerError when it does not start, or ends by itself.
    """
    given = {"port": args.port, "spool": args.spool or None}
    own = {name: value for name, value in given.items() if value is not None}
    deployment = Deployment.load(args.params, **({"server": own} if own else {}))
    with _sigterm_as_interrupt():
        server = Server.start(deployment, log_dir=run_dir(args.run), capture=not args.no_capture, detach=args.detach, progress=_Teller())
        logger.info("ready at %s after %.0f s; log: %s", server.url, server.startup_seconds, server.log)
        if args.detach:
            logger.info("it runs until: hsnb stop %d", server.port)
            return {"ok": True, "stopped": False, **server.as_dict()}
        logger.info("Ctrl-C stops it")
        with server:
            try:
                while server.running():
                    time.sleep(0.3)
            except KeyboardInterrupt:
                server.stop()
                return {"ok": True, "stopped": True, **server.as_dict()}
            raise _died(server)


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hsnb stop`."""
    parser.add_argument("server", nargs="?", default="", metavar="URL|PORT", help="which server; may be left out when one runs detached")
    parser.add_argument("--all", action="store_true", help="stop all detached servers; one that a notebook or a shell owns has to be named")


def stop(args: argparse.Namespace) -> dict[str, Any]:
    """Stop one server, or all; only servers of this user that hsnb started on this host are looked at.

    Without a name only detached ones are: a server that has an owner is somebody's work in progress, and ends with it.

    Raises ServerError when there is none such, or when it is not clear which one is meant, naming those that run.
    """
    running = running_servers()
    detached = [server for server in running if server.detached]
    if args.all:
        chosen = detached
    elif args.server:
        port = port_of(args.server)
        chosen = [server for server in running if server.port == port]
        if not chosen:
            raise ServerError(
                got=f"no server of this user on port {port}",
                expected=f"one of those running: {_listed(running)}",
                likely="it has ended, was started by hand, or runs on another host",
                next=f"hsnb stop {running[0].port}" if running else "nothing to do; a server started by hand is stopped by hand",
            )
    elif len(detached) == 1:
        chosen = detached
    else:
        owned = f"; with an owner that still runs: {_listed(running)}" if running and not detached else ""
        raise ServerError(
            got=f"{len(detached)} detached servers: {_listed(detached)}" if detached else f"no server running detached{owned}",
            expected="one, or a port",
            likely="several were left running"
            if detached
            else "a notebook or a shell owns it: it ends with that"
            if owned
            else "it has ended already",
            next=f"hsnb stop {running[0].port}" + (", or hsnb stop --all" if detached else "") if running else "nothing to do",
        )
    stopped = []
    for server in chosen:
        seconds = stop_server(server)
        stopped.append({"url": server.url, "port": server.port, "model": server.model, "seconds": round(seconds, 1), "log": server.log})
    return {"ok": True, "stopped": stopped}


def serve_text(result: dict[str, Any]) -> str:
    """Say what `serve` did."""
    if result["stopped"]:
        return f"stopped {result['url']}; log: {result['log']}"
    shown = ("url", "model", "sglang", "boundaries", "final", "format", "spool", "pid", "log")
    return "\n".join(f"{name:11} {result[name]}" for name in shown)


def stop_text(result: dict[str, Any]) -> str:
    """Say what `stop` did."""
    lines = [f"stopped {s['url']} ({s['model']}) in {s['seconds']} s" for s in result["stopped"]]
    return "\n".join(lines) or "no server was running"


def port_of(server: str) -> int:
    """Return the port of "30000" or "http://127.0.0.1:30000". Raises ParamsError for anything else."""
    with contextlib.suppress(ValueError):
        port = int(server) if server.isdigit() else urlsplit(server if "://" in server else f"http://{server}").port
        if port:
            return port
    raise ParamsError(got=f"server {server!r}", expected="a URL or a port", likely="a typo", next="hsnb stop 30000")


def _listed(running: list[Running]) -> str:
    return ", ".join(f"{s.url} ({s.model})" for s in running) or "none"


def _died(server: Server) -> HsnbError:
    log = Path(server.log)
    cause = causes.find_cause(causes.read_lines(log), code=read_exit(log.with_suffix(".exit.json")).get("code"))
    return failure(
        ServerError(
            got=f"the server ended by itself: {cause.words}", expected="to be asked to", likely=cause.line or cause.words, next=cause.next
        ),
        log,
    )


class _Teller:
    """Log the start's progress every few seconds, and whenever nothing else would be seen for long."""

    def __init__(self):
        self._last = 0.0

    def __call__(self, seconds: float, line: str) -> None:
        if seconds - self._last >= _TELL_EVERY_S:
            self._last = seconds
            logger.info("%4.0f s  %s", seconds, line)


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end things as Ctrl-C does, so that the server is stopped and not orphaned for the half second it would take."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


SERVE = Command(add_serve, serve, serve_text)
STOP = Command(add_stop, stop, stop_text)
