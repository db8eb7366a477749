"""Where the states go: staged whole, their move noted, moved to their names, entered. The only module that calls a layout.

A layout writes a verified dump below a folder: here the staging folder, on the data set's own file system. What is at a
file's real name was therefore whole, fsynced and noted with its checksum before it got there, and is never written again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from hsnb.checks import Faults
from hsnb.dumps import Dump
from hsnb.errors import ExtractError
from hsnb.ledger import FOLDER, Entry, Ledger
from hsnb.params import Deployment
from hsnb.paths import write_json
from hsnb.trainers import layout as find_layout
from hsnb.trainers.place import file_digest, sync_folder

STAGING, ASIDE = ".staging", "set-aside"  # in the data set's folder
GROUP = 256  # samples entered in one transaction at most


def check_first(deployment: Deployment, layout: str) -> None:
    """Refuse before anything is prepared or started: boundaries that the model has not, a final that the layout cannot hold."""
    find_layout(layout).check_settings(deployment.check_against_model(), deployment.capture.final, deployment.model_path())


class Output:
    """The data set's folder as one writer (`name`) sees it."""

    def __init__(self, folder: Path, name: str, layout: str):
        self.folder, self.layout = folder, find_layout(layout)
        self.staging = folder / STAGING / name
        self.dtype = str(self.layout.DTYPE).removeprefix("torch.")
        self.uploader = None  # hsnb.storage.Uploader of a run whose files go to an object store

    def check(self, boundaries: tuple[int, ...], final: str, model: str) -> None:
        """Raise ParamsError when the layout cannot hold what the server captures, ModelError when it cannot norm it."""
        self.layout.check_settings(boundaries, final, model)

    def begin(self, rows: Sequence[int]) -> None:
        """Make the folders for `rows`, empty the staging of what a killed run left, and set aside files that no ledger knows.

        A file at a row's name that is not entered is not ours to count nor to overwrite: another run's, or a hand's.
        """
        self.layout.begin(self.folder, rows)
        shutil.rmtree(self.staging, ignore_errors=True)
        for parent in {Path(self.layout.sample_file(r)).parent for r in rows}:
            (self.staging / parent).mkdir(parents=True, exist_ok=True)
            (self.folder / parent).mkdir(parents=True, exist_ok=True)
        for row in rows:
            set_aside(self.folder, self.layout.sample_file(row))

    def stage(self, row: int, dump: Dump, loss_mask: torch.Tensor | None, judge: Callable[[Faults], None]) -> tuple[str, int, str]:
        """Write a dump to the staging folder, fsynced. Return (file, bytes, xxh3-128 of the file).

        `loss_mask`: int64 [S], for a layout that keeps it in the sample's file. `judge` raises for rows that cannot be states.
        """
        dump.metadata = {**dump.metadata, "request_id": f"row-{row}"}  # the file names the sample, not the try: same bytes each time
        return self.layout.publish(self.staging, row, dump, loss_mask, judge)

    def move(self, entries: Sequence[Entry]) -> None:
        """Move staged files to their names and make the moves durable; one that was moved when this failed before stays there."""
        for entry in entries:
            try:
                os.replace(self.staging / entry.file, self.folder / entry.file)
            except FileNotFoundError:
                if not self.holds(entry.file, entry.bytes):
                    raise
        for parent in {(self.folder / e.file).parent for e in entries}:
            sync_folder(parent)

    def staged(self, file: str, size: int) -> bool:
        """Say whether a file that was staged is still there, or at its name already."""
        return (self.staging / file).exists() or self.holds(file, size)

    def holds(self, file: str, size: int) -> bool:
        """Say whether a staged file has been moved: what no ledger knows was set aside in the beginning, so it is this run's."""
        with contextlib.suppress(OSError):
            return not (self.staging / file).exists() and (self.folder / file).stat().st_size == size
        return False

    def end(self) -> None:
        """Remove the staging folder; the one above it too when no other writer works."""
        shutil.rmtree(self.staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # another writer's is there
            self.staging.parent.rmdir()

    def describe(self, server, layout: str, fingerprint: dict, store: str = "") -> None:
        """Write hsnb.json beside the data set: which boundaries its columns are, so that no trainer has to be told by memory.

        `store`: where the files go, "" when they stay.
        """
        armed = server.armed[0]
        tree = {
            "hsnb_format": 1,
            "layout": layout,
            "boundaries": armed.boundaries,
            "final": self.layout.final,
            "target_layer_ids": armed.boundaries,
            "model": armed.model_path,
            "hidden_size": armed.hidden_size,
            "num_layers": armed.num_layers,
            "fingerprint": fingerprint,
            **({"store": store} if store else {}),
        }
        write_json(self.folder / "hsnb.json", tree)


class Committer(threading.Thread):
    """Note, move and enter what the writers staged, as many at a time as are ready: the fsyncs are shared."""

    def __init__(self, ledger: Ledger, output: Output):
        super().__init__(name="hsnb-committer", daemon=True)
        self.ledger, self.output = ledger, output
        self._queue: queue.SimpleQueue[tuple[Entry, Future] | None] = queue.SimpleQueue()
        self._closing, self._closed = threading.Lock(), False
        self.start()

    def commit(self, entry: Entry) -> None:
        """Return when `entry`'s staged file is at its name and entered. Raises what the disk or the ledger raised, ExtractError once closed."""
        future: Future = Future()
        with self._closing:
            if self._closed:  # a thread that was still at its disk when the run had waited long enough
                raise ExtractError(
                    got=f"row {entry.row} was verified after the run had ended",
                    expected="the end of a run after its threads'",
                    likely="a disk that takes longer than the run waits when it is stopped",
                    next="run the same shard again: the row is asked for again",
                )
            self._queue.put((entry, future))
        future.result()

    def run(self) -> None:
        while batch := self._next():
            try:
                self.ledger.note_moves(e for e, _ in batch)
                self.output.move([e for e, _ in batch])
                self.ledger.enter(e for e, _ in batch)
            except BaseException as error:  # told to whoever waits; noted moves are settled by the next run
                for _, future in batch:
                    future.set_exception(error)
            else:
                for _, future in batch:
                    future.set_result(None)

    def _next(self) -> list[tuple[Entry, Future]]:
        item = self._queue.get()
        batch = []
        while item is not None:
            batch.append(item)
            if len(batch) == GROUP or self._queue.empty():
                return batch
            item = self._queue.get()
        self._queue.put(None)  # the end was met: it is met again once this batch is done
        return batch

    def close(self) -> None:
        """Finish what was handed in, and end."""
        with self._closing:
            self._closed = True
            self._queue.put(None)
        self.join()


def export(ledger: Ledger, folder: Path) -> Path:
    """Export a ledger's entries beside the data."""
    return ledger.export(folder / FOLDER)


def set_aside(folder: Path, file: str) -> Path | None:
    """Move a file that no ledger has entered out of the trainer's sight; return where to. None when there is none.

    It loses its ending, too: SpecForge's reader takes every .ckpt in any folder below the data.
    """
    path = folder / file
    if not path.exists():
        return None
    target = folder / ASIDE / f"{file}.aside"
    target.parent.mkdir(parents=True, exist_ok=True)
    while target.exists():
        target = target.with_name(f"{target.name}.again")
    os.replace(path, target)
    return target


def checksum(path: Path) -> str:
    """Return the xxh3-128 of a file, "" when there is none."""
    try:
        return file_digest(path)
    except FileNotFoundError:
        return ""
