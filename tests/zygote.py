"""Start many clients cheaply: one process imports everything once and forks a client for each line on its stdin.

A client is what `python -m hsnb.extract ARGS` is, from its first line on: only the five seconds of imports are shared. Publishes
float32, so that states can be compared closer than bfloat16 rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class Zygote:
    """The test's side. `start(args, log)` returns the client's pid; `wait(pid)` its exit status, negative for a signal."""

    def __init__(self, env: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env,
            cwd=Path(__file__).resolve().parents[1],
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"
        self.running = 0

    def start(self, args: list[str], log: Path) -> int:
        print(json.dumps([args, str(log)]), file=self.process.stdin, flush=True)
        self.running = int(self.process.stdout.readline())
        return self.running

    def wait(self, pid: int) -> int:
        said, status = map(int, self.process.stdout.readline().split())
        assert said == pid
        self.running = 0
        return status

    def close(self) -> None:
        if self.running:  # of a test that failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.running, signal.SIGKILL)
        self.process.stdin.close()
        self.process.wait(10)


def serve() -> None:
    """Fork a client for each line, say its pid, and when it has ended its status; one at a time."""
    print("ready", flush=True)
    for line in sys.stdin:
        args, log = json.loads(line)
        if (pid := os.fork()) == 0:
            client(args, log)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(pid, os.waitstatus_to_exitcode(status), flush=True)


def client(args: list[str], log: str) -> None:
    """Be the client, in the forked process."""
    with open(log, "ab", buffering=0) as out, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    status = 70
    try:
        status = main(args)
    finally:
        os._exit(status)


if __name__ == "__main__":
    import pyarrow.parquet  # noqa: F401
    import torch

    from hsnb.extract.__main__ import main
    from hsnb.trainers.speculators import SpeculatorsLayout

    torch.set_num_threads(1)  # and no threads before the forks
    SpeculatorsLayout.DTYPE = torch.float32
    serve()
