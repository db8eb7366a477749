"""A running server: start it, wait until HTTP says that it is ready, prove that capture is armed, stop it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from hsnb import paths
from hsnb.errors import HsnbError
from hsnb.params import Deployment
from hsnb.patch.armed import RING_FULL, Armed, read_armed
from hsnb.server import causes
from hsnb.server.armed_check import check_armed, check_info, read_or_refuse
from hsnb.server.client import Client
from hsnb.server.command import Part
from hsnb.server.far import read_far
from hsnb.server.launch import end, launch
from hsnb.server.link import Link
from hsnb.server.ready import Progress, failure, pick_info, wait_ready
from hsnb.server.state import STOP_LIMIT_S
from hsnb.show import pairs_html


@dataclass(eq=False)
class Server:
    """A server that answers. Made by `Server.start` or `attach`; use it as a context manager, or call `stop`."""

    url: str
    host: str
    port: int
    spool: Path
    pid: int  # of the launcher; 0 when attached to one that hsnb did not start
    log: Path | None  # None when attached to one that hsnb did not start
    info: dict = field(repr=False)
    sglang_version: str
    startup_seconds: float
    deployment: Deployment | None
    armed: list[Armed] = field(default_factory=list, repr=False)
    capture: bool = True
    detached: bool = False
    attached: bool = False
    link: Link | None = field(default=None, repr=False)  # to the other nodes of a server over several
    _supervisor: subprocess.Popen | None = field(default=None, repr=False)

    @classmethod
    def start(
        cls,
        deployment: Deployment,
        *,
        log_dir: str | Path | None = None,
        capture: bool = True,
        detach: bool = False,
        progress: Callable[[float, str], None] | None = None,
        extra_env: dict[str, str] | None = None,
        link: Link | None = None,
    ) -> Server:
        """Start SGLang for `deployment` and return when it is ready.

        The server ends with this process (and, in a notebook, with whatever runs the kernel), however that ends; `detach`
        leaves it running until `hsnb stop`. `progress(seconds, line)` is called about twice a second with the last
        meaningful line of the log. `capture` False leaves the plug-in off. `link`: the other nodes of a server over several; it
        ends with the server, and the server with the loss of any of them.

        Raises ServerError with the likely cause and the log's last lines, CaptureError when the plug-in is not armed as
        asked, ParamsError and BoundaryError before anything is loaded.
        """
        before = time.monotonic()
        part = Part(0, link.meet) if link else None
        folder = Path(log_dir) if log_dir is not None else paths.run_dir("server")
        made = launch(deployment, folder, capture=capture, detach=detach, extra_env=extra_env, part=part)
        url, spool, log, supervisor = made.url, made.spool, made.log, made.supervisor
        server = cls(
            url, made.host, made.port, spool, 0, log, {}, "", 0.0, deployment,
            capture=capture, detached=detach, _supervisor=supervisor, link=link,
        )  # fmt: skip
        try:
            if link:
                from hsnb.weights import weights_hash  # it imports torch

                weights = weights_hash(paths.resolve(deployment.model_path()))
                link.begin(deployment.model_dump(), spool, weights, on_loss=supervisor.terminate)

            def lives() -> bool:
                if link:
                    link.check()
                return supervisor.poll() is None

            seen = Progress(log, progress, deployment.server.ready_timeout_s)
            info = wait_ready(url, seen, is_alive=lives, exit_record=Path(made.job.exit_record))
            server._take(info)
            server.pid = json.loads(Path(made.job.state).read_text())["launcher"]
            if capture:
                check_info(info)
                if link:
                    link.wait_armed(spool)
                problem = causes.plugin_failure(causes.read_lines(log))
                server.armed = read_or_refuse(spool, url=url, plugin_failure=problem)
                check_armed(server.armed, ranks=deployment.server.tp_size, expect=deployment, far=read_far(spool))
        except HsnbError as error:
            said = _blamed(link, error) if not server.running() else error
            server._end()
            raise failure(said, log) from error.__cause__
        except BaseException:  # an interrupt, too, leaves no server behind
            server._end()
            raise
        server.startup_seconds = round(time.monotonic() - before, 1)
        return server

    def _take(self, info: dict) -> None:
        self.info = pick_info(info)
        self.sglang_version = str(info.get("version", ""))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        if not self.detached:
            self.stop()

    def stop(self) -> None:
        """End the server and everything it left; calling it again does nothing.

        Does nothing on a server that was only attached to: it is not ours to end (`hsnb stop` does).
        """
        if not self.attached:
            self._end()

    def _end(self) -> None:
        if self._supervisor is None:
            return
        if self.link is not None:
            self.link.leave()
        end(self._supervisor, STOP_LIMIT_S)
        if self.link is not None:
            self.link.end()
        self._supervisor = None

    def running(self) -> bool:
        """Say whether the server's processes still run (of an attached one: whether it answers)."""
        if self._supervisor is not None:
            return self._supervisor.poll() is None and not (self.link and self.link.lost)
        if not self.attached:
            return False
        try:
            with Client(self.url, timeout_s=5) as client:
                client.model_info()
        except HsnbError:
            return False
        return True

    def client(self, **options) -> Client:
        """Return a client of this server; close it, or use it as a context manager."""
        return Client(self.url, **options)

    def tail(self, n: int = 20) -> str:
        """Return the log's last `n` lines."""
        return causes.tail(self.log, n) if self.log else "(the log of this server is not known)"

    def as_dict(self) -> dict:
        """Return what the table shows, for --json."""
        first = self.armed[0] if self.armed else None
        return {
            "url": self.url,
            "model": self.info.get("model_path") or (self.deployment.model if self.deployment else ""),
            "sglang": self.sglang_version,
            "boundaries": first.boundaries if first else [],
            "final": first.final if first else "",
            "format": first.format if first else "",
            "tp_size": self.info.get("tp_size"),
            "dtype": first.dtype if first and first.dtype else self.info.get("dtype"),
            "device": self.info.get("device"),
            "capture": "armed" if first else "off",
            "spool": str(self.spool) if first else "",
            "pid": self.pid,
            "log": str(self.log or ""),
            "startup_seconds": self.startup_seconds,
            "ends_with": "hsnb stop" if self.detached or self.attached else "this process",
        }

    def frame(self) -> pd.DataFrame:
        """Return `as_dict` as a table of two columns."""
        return pd.DataFrame({"what": list(self.as_dict()), "value": [str(v) for v in self.as_dict().values()]})

    def plot(self, ax=None):
        """Draw the requests that each scheduler has counted by now, captured or not; after a stop, what it said when it was armed."""
        from hsnb.figures import requests

        now = read_armed(self.spool) if self.capture else []
        shown = {f"rank {a.rank}": {k: n for k, n in a.counts.items() if k != RING_FULL} for a in now or self.armed}
        return requests(shown, ax)

    def _repr_html_(self) -> str:
        return pairs_html(self.as_dict().items())


def _blamed(link: Link | None, error: HsnbError) -> HsnbError:
    """Return the reason of the node that failed first: the others then only say that their connection is gone."""
    try:
        if link:
            link.blame()
    except HsnbError as theirs:
        return theirs
    return error
