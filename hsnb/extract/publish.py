"""Publish a sample's dump, verified and staged (staging.py), with patience for a full disk and a few tries at one that fails."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import stamina
import torch
import xxhash

from hsnb.checks import Asked
from hsnb.errors import ExtractError
from hsnb.extract.faults import DISK_TRIES, DiskFull, disk_full, disk_trouble
from hsnb.extract.flow import Disk, hours
from hsnb.extract.output import Committer, Output
from hsnb.extract.staging import Stagers, Task
from hsnb.ledger import Entry

LOOK_S = 0.2


class Publisher:
    """What a run's writer threads do.

    `loss_mask(row)`: a row's mask, where its layout wants it. `pause(why)` is told of a full disk, `pause("")` of room; `stopping`
    ends the waiting.
    """

    def __init__(self, output: Output, committer: Committer, loss_mask: Callable, disk: Disk, patience_s: float, stopping: threading.Event):
        self.output, self.committer, self.loss_mask, self.disk = output, committer, loss_mask, disk
        self.patience_s, self.stopping = patience_s, stopping
        self.stagers = Stagers(output)

    def publish(
        self, server, row: int, rid: str, path: Path, token_ids: torch.Tensor, attempt: int, since: float, pause: Callable[[str], None]
    ) -> Entry:
        """Verify the dump at `path` in the engine's dtype, stage, move and enter it. Blocks; never leave it half done.

        Raises DumpError for a dump that is not what was asked for, ExtractError when the output fails.
        """
        armed = server.armed[0]
        asked = Asked(token_ids, tuple(armed.boundaries), armed.final, armed.hidden_size, armed.dtype)
        task, staged = Task(row, path, asked, self.loss_mask(row)), None
        try:
            for trial in stamina.retry_context(on=self._again, attempts=DISK_TRIES, timeout=None, wait_initial=0.5, wait_jitter=0):
                with trial:
                    if staged is None or not self.output.staged(staged.file, staged.bytes):  # the dump itself may have been moved there
                        staged = self._with_room(pause, self.stagers.stage, task)
                    entry = Entry(
                        row, rid, ids_hash(token_ids), len(token_ids), *staged, json.dumps(list(armed.boundaries)), self.output.layout.final,
                        self.output.dtype, attempt, round(time.monotonic() - since, 3), server.url, now(),
                    )  # fmt: skip
                    self._with_room(pause, self.committer.commit, entry)
        except (OSError, sqlite3.Error) as error:
            raise ExtractError(
                got=f"{self.output.folder}: {error}",
                expected="an output that takes files and ledger entries",
                likely="a disk that fails, was unmounted or went read-only",
                next="mend it and run the same shard again: it goes on where it stopped",
            ) from error
        if self.output.uploader is not None:
            self.output.uploader.add(entry)
        return entry

    def close(self) -> None:
        """End what the threads had beside them."""
        self.stagers.close()

    def _again(self, error: Exception) -> bool:
        return disk_trouble(error) and not isinstance(error, DiskFull) and not self.stopping.is_set()

    def _with_room(self, pause: Callable[[str], None], write: Callable, *args):
        """Call `write`, again and again while the disk is full, as long as the run's patience lasts."""
        end, waited = time.monotonic() + self.patience_s, False
        while True:
            try:
                made = write(*args)
                if waited:
                    pause("")
                return made
            except Exception as error:
                if not disk_full(error):
                    raise
                pause(f"the output disk is full: {self.disk.words()}")
                if time.monotonic() > end or self.stopping.is_set():
                    raise full(f"the output disk is full: {self.disk.words()}", self.patience_s) from error
            waited = True
            time.sleep(LOOK_S)


def full(what: str, patience_s: float) -> DiskFull:
    """Return the error of a run that has waited long enough."""
    return DiskFull(
        got=f"{what}; waited {hours(patience_s)}",
        expected="room for the next sample",
        likely="others write to this file system, or it is too small for the shard",
        next="make room and run the same shard again: it goes on where it stopped",
    )


def ids_hash(token_ids: torch.Tensor) -> str:
    """Return the xxh3-128 of token ids as int64 [S], little-endian."""
    return xxhash.xxh3_128_hexdigest(token_ids.numpy().astype("<i8").tobytes())


def now() -> str:
    """Return this moment in ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
