"""status.json, once a minute, for whoever is not looking at the notebook; and a command at the end."""

from __future__ import annotations

import logging
import os
import subprocess
import time

from hsnb.extract.flow import gb, hours
from hsnb.ledger import FOLDER
from hsnb.paths import write_json

log = logging.getLogger(__name__)
COMMAND_S = 60.0


class Status:
    """The state of one run of one shard, in `ledger/{name}.status.json` beside the data."""

    def __init__(self, job, name: str):
        self.job = job
        self.path = job.data.path / FOLDER / f"{name}.status.json"
        self._since, self._written = time.monotonic(), 0.0

    def tick(self) -> bool:
        """Write the file when it is time; return whether it was."""
        if time.monotonic() - self._written < self.job.limits.status_s:
            return False
        self.write("running")
        return True

    def write(self, state: str, reason: str = "") -> dict:
        """Write the file and return what it says. A disk that is full or dead is not made worse by it."""
        self._written = time.monotonic()
        tree = self.describe(state, reason)
        try:
            write_json(self.path, tree)
        except OSError as error:
            log.warning(f"{self.path}: {error}")
        return tree

    def describe(self, state: str, reason: str = "") -> dict:
        """Return the run's state as plain values."""
        work, seconds = self.job.work, time.monotonic() - self._since
        rate = work.tokens / seconds if seconds else 0.0
        paused = [w.paused for w in self.job.workers if w.paused]
        return {
            "state": "paused" if state == "running" and paused and len(paused) == len(self.job.workers) else state,
            "reason": reason or "; ".join(paused),
            "samples": work.rows,
            "published": work.done,
            "owed": work.failed,
            "tokens_left": work.left_tokens,
            "tokens_per_s": round(rate, 1),
            "eta_s": round(work.left_tokens / rate) if rate else None,
            "disk": self.forecast(),
            "servers": [
                {
                    "url": w.server.url, "published": w.done, "requests": w.flow.requests, "restarts": w.restarts, "canaries": w.canaries,
                    "paused": w.paused, "idle_s": round(w.idle_s, 1), "error": str(w.error or ""),
                }
                for w in self.job.workers
            ],
            "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip

    def forecast(self) -> str:
        """Say when the output disk will be full, "" while all that is to come fits."""
        work, disk = self.job.work, self.job.disk
        disk.note(work.bytes)
        left = self.job.size_of(work.left_tokens) if work.left_tokens else 0
        lasts = disk.lasts_s(left)
        return "" if lasts is None else f"disk full in {hours(lasts)}: {gb(left)} to come, {disk.words()}"

    def note(self) -> str:
        """Return what the progress says besides the tokens."""
        work = self.job.work
        parts = [f"{work.done:,} of {work.rows:,} samples"]
        parts += [f"{work.failed:,} owed"] if work.failed else []
        parts += [f"paused: {w.paused}" for w in self.job.workers if w.paused][:1]
        parts += [words] if (words := self.forecast()) else []
        return ", ".join(parts)

    def end(self, state: str, reason: str = "") -> None:
        """Write the last state and run the user's command with HSNB_STATE and HSNB_STATUS."""
        tree = self.write(state, reason)
        command = self.job.limits.on_stop
        if not command:
            return
        env = {**os.environ, "HSNB_STATE": state, "HSNB_STATUS": str(self.path), "HSNB_REASON": tree["reason"]}
        try:
            done = subprocess.run(command, shell=True, env=env, timeout=COMMAND_S, capture_output=True, text=True)
            if done.returncode:
                log.warning(f"on_stop ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning(f"on_stop: {error}")
