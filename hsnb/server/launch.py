"""Launch SGLang under a supervisor, for a whole server or for one node's part of one: port, spool, log, environment, process."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import hsnb
from hsnb import paths
from hsnb.params import Deployment
from hsnb.server.command import Part, build_command, build_env, masked
from hsnb.server.leftovers import claim_spool, clear_spool
from hsnb.server.preflight import pick_port, preflight
from hsnb.server.state import reserve, state_file
from hsnb.server.supervisor import Job


@dataclass(frozen=True)
class Launched:
    """A launcher that was started and is not ready yet."""

    url: str
    host: str
    port: int
    spool: Path
    log: Path
    job: Job
    supervisor: subprocess.Popen


def launch(
    deployment: Deployment,
    log_dir: Path,
    *,
    capture: bool = True,
    detach: bool = False,
    extra_env: dict[str, str] | None = None,
    part: Part | None = None,
) -> Launched:
    """Check everything that can be checked before a model is loaded, and start the launcher (`part`: of a server over several nodes).

    It ends with this process (and, in a notebook, with whatever runs the kernel); `detach`: by `hsnb stop`.
    Raises ServerError, ParamsError, ModelError or BoundaryError before anything is loaded.
    """
    preflight(deployment, capture=capture, node_rank=part and part.node_rank).check()
    port = pick_port(deployment)
    spool = Path(deployment.server.spool) if deployment.server.spool else paths.default_spool(port)
    log_dir.mkdir(parents=True, exist_ok=True)
    log = (log_dir / f"server-{port}-{dt.datetime.now():%Y%m%d-%H%M%S}.log").resolve()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(deployment.server.host, deployment.server.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    job = Job(
        command=build_command(deployment, port, part),
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
    which = f", part {part.node_rank + 1} of {deployment.server.nnodes}" if part else ""
    job.about = {"url": url, "port": port, "model": deployment.model + which, "started": started}
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
    return Launched(url, host, port, spool, log, job, supervisor)


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


def end(supervisor: subprocess.Popen, limit_s: float) -> None:
    """Tell a supervisor to end its server, and wait until it has; one that has not within `limit_s` is killed."""
    supervisor.terminate()
    try:
        supervisor.wait(limit_s)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
