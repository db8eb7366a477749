"""Start a server as somebody would who knows SGLang and not hsnb: its own flags, and the plug-in's variables by hand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from hsnb.params import Deployment
from hsnb.server.command import build_command, build_env
from hsnb.server.leftovers import ShmWatch
from hsnb.server.preflight import pick_port
from hsnb.server.ready import Progress, wait_ready
from tests.conftest import tiny


@contextlib.contextmanager
def by_hand(
    folder: Path, *, add: tuple[str, ...] = (), drop: tuple[str, ...] = (), boundaries=(2, 4, 6), **server
) -> Iterator[tuple[str, Path, dict]]:
    """Yield (url, spool, /server_info) of a server whose flags lack `drop` and have `add`; end it and clear up after it."""
    deployment = Deployment.parse({**tiny(**server), "capture": {"boundaries": list(boundaries)}}, origin="by hand")
    port, spool, log, watch = pick_port(deployment), folder / "spool", folder / "server.log", ShmWatch()
    command = [*(word for word in build_command(deployment, port) if word not in drop), *add]
    with open(log, "w") as out:
        env = build_env(deployment, spool)
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def living() -> set[int]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return {process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))}
        return set()

    url = f"http://127.0.0.1:{port}"
    try:
        info = wait_ready(url, Progress(log, None, 120), is_alive=lambda: process.poll() is None, exit_record=folder / "none")
        watch.look(living, final=True)
        yield url, spool, info
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # ends all of a ready server; what is left in the group goes next
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)
        watch.remove()
