"""A running server: start it, wait until HTTP says that it is ready, prove that capture is armed, stop it."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd
import psutil

import hsnb
from hsnb import paths
from hsnb.errors import HsnbError
from hsnb.params import Deployment
from hsnb.patch.armed import RING_FULL, Armed, read_armed
from hsnb.server import causes
from hsnb.server.armed_check import check_armed, check_info, read_or_refuse
from hsnb.server.client import Client
from hsnb.server.command import build_command, build_env, masked
from hsnb.server.leftovers import claim_spool, clear_spool
from hsnb.server.preflight import pick_port, preflight
from hsnb.server.ready import Progress, failure, pick_info, wait_ready
from hsnb.server.state import STOP_LIMIT_S, reserve, state_file
from hsnb.server.supervisor import Job
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
    ) -> Server:
        """Start SGLang for `deployment` and return when it is ready.

        The server ends with this process (and, in a notebook, with whatever runs the kernel), however that ends; `detach`
        leaves it running until `hsnb stop`. `progress(seconds, line)` is called about twice a second with the last
        meaningful line of the log. `capture` False leaves the plug-in off.

        Raises ServerError with the likely cause and the log's last lines, CaptureError when the plug-in is not armed as
        asked, ParamsError and BoundaryError before anything is loaded.
        """
        before = time.monotonic()
        preflight(deployment, capture=capture).check()
        port = pick_port(deployment)
        spool = Path(deployment.server.spool) if deployment.server.spool else paths.default_spool(port)
        folder = Path(log_dir) if log_dir is not None else paths.run_dir("server")
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / f"server-{port}-{dt.datetime.now():%Y%m%d-%H%M%S}.log").resolve()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(deployment.server.host, deployment.server.host)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        job = Job(
            command=build_command(deployment, port),
            log=str(log),
            exit_record=str(log.with_suffix(".exit.json")),
            state=str(state_file(port)),
            spool=str(spool) if capture else "",
            port=port,
            keep_dumps=bool(deployment.server.spool),
            owner=f"port {port}, started {started} by {os.getpid()}",
            host=host,
            owners=[] if detach else owners(),
        )
        job.about = {"url": url, "port": port, "model": deployment.model, "started": started}
        reserve(port, {**job.about, "log": job.log, "exit_record": job.exit_record, "spool": job.spool, "detached": detach})
        try:
            env = build_env(deployment, spool if capture else None, extra_env)
            if capture:
                clear_spool(spool, keep_dumps=job.keep_dumps)  # of a dead server; a folder that is not hsnb's was refused by the preflight
                claim_spool(paths.make_private(spool), job.owner)
            log.write_text(f"# hsnb {hsnb.__version__}: {masked(job.command, env)}\n")
            supervisor = spawn_supervisor(job, env)
        except BaseException:
            state_file(port).unlink(missing_ok=True)
            raise
        server = cls(url, host, port, spool, 0, log, {}, "", 0.0, deployment, capture=capture, detached=detach, _supervisor=supervisor)
        try:
            seen = Progress(log, progress, deployment.server.ready_timeout_s)
            info = wait_ready(url, seen, is_alive=lambda: supervisor.poll() is None, exit_record=Path(job.exit_record))
            server._take(info)
            server.pid = json.loads(Path(job.state).read_text())["launcher"]
            if capture:
                check_info(info)
                problem = causes.plugin_failure(causes.read_lines(log))
                server.armed = read_or_refuse(spool, url=url, plugin_failure=problem)
                check_armed(server.armed, ranks=deployment.server.tp_size, expect=deployment)
        except HsnbError as error:
            server._end()
            raise failure(error, log) from error.__cause__
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
        self._supervisor.terminate()
        try:
            self._supervisor.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._supervisor = None

    def running(self) -> bool:
        """Say whether the server's processes still run (of an attached one: whether it answers)."""
        if self._supervisor is not None:
            return self._supervisor.poll() is None
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


def owners() -> list[list[float]]:
    """Return (pid, create time) of this process and, in a notebook's kernel, of what runs the kernel.

    Jupyter and papermill name themselves in JPY_PARENT_PID. A process started from a kernel inherits the variable too, so it
    counts only when it is the parent's.
    """
    me = psutil.Process()
    found = [[me.pid, me.create_time()]]
    parent = os.environ.get("JPY_PARENT_PID", "")
    if parent.isdigit() and int(parent) == os.getppid():
        found.append([int(parent), psutil.Process(int(parent)).create_time()])
    return found


def spawn_supervisor(job: Job, env: dict[str, str]) -> subprocess.Popen:
    """Start the supervisor in a session of its own, so that neither Ctrl-C nor the end of a terminal reaches it first."""
    with open(job.log, "ab") as log:  # a traceback of the supervisor belongs there
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "hsnb.server.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            env=env,
            text=True,
        )
    with supervisor.stdin as pipe:
        json.dump(asdict(job), pipe)
    return supervisor
