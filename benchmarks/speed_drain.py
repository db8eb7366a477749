"""The client beside the load: every dump is verified, checksummed, moved or copied to the output, entered and freed as it appears."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from hsnb.collect import LOOK_S, free
from hsnb.extract.flow import Disk
from hsnb.extract.output import Committer, Output
from hsnb.extract.publish import Publisher
from hsnb.extract.staging import threads
from hsnb.ledger import Ledger
from hsnb.patch.spool import file_stem
from hsnb.sizes import OUTPUT_FLOOR


class Drain:
    """Publish dumps with the classes of an extraction, into a new folder below `root`; one for all turns, its processes stay."""

    def __init__(self, server, root: Path):
        self.server = server
        self.folder = Path(tempfile.mkdtemp(prefix="hsnb-drain-", dir=root))
        self.output = Output(self.folder, "drain", "speculators")
        self.ledger = Ledger(self.folder / "ledger" / "drain.sqlite", {})
        self.committer = Committer(self.ledger, self.output)
        disk = Disk(self.folder, None, OUTPUT_FLOOR)
        self.publisher = Publisher(self.output, self.committer, lambda _: None, disk, 600.0, threading.Event())
        self.pool = ThreadPoolExecutor(threads(), thread_name_prefix="hsnb-drain")
        self.stopped = threading.Event()
        self.rows = 0

    def begin(self, rids: list[str], ids: list[list[int]]) -> None:
        """Begin a turn: look for these requests' dumps from now on."""
        rows = range(self.rows, self.rows + len(rids))
        self.rows = rows.stop
        self.output.begin(rows)
        self.turn = dict(zip(rows, zip(rids, map(torch.tensor, ids), strict=True), strict=True))
        self.futures: list[Future] = []
        self.watching = threading.Thread(target=self._watch, name="hsnb-drain-watch")

    def start(self) -> None:
        """Look from now on."""
        self.watching.start()

    def _watch(self) -> None:
        names = {f"{file_stem(rid)}.safetensors": row for row, (rid, _) in self.turn.items()}
        while names and not self.stopped.wait(LOOK_S):
            for entry in os.scandir(self.server.spool):
                if (row := names.pop(entry.name, None)) is not None:
                    self.futures.append(self.pool.submit(self._publish, row, Path(entry.path)))

    def _publish(self, row: int, path: Path) -> None:
        rid, ids = self.turn[row]
        self.publisher.publish(self.server, row, rid, path, ids, 1, time.monotonic(), lambda _: None)
        free(path)

    def finish(self) -> None:
        """Return when everything of this turn is published. Raises what a dump or the output raised."""
        self.watching.join()
        for future in self.futures:
            future.result()

    def clear(self) -> None:
        """Remove what this turn published. Raises RuntimeError when it was not all."""
        done = self.ledger.done()
        if missing := [row for row in self.turn if row not in done]:
            raise RuntimeError(f"{len(missing)} of {len(self.turn)} dumps were not entered")
        for row in self.turn:
            (self.folder / done[row].file).unlink()

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, of this process and of those that stage."""
        staging = [p for p in psutil.Process().children() if any("hsnb.extract.staging" in word for word in p.cmdline())]
        return time.process_time() + sum(sum(p.cpu_times()[:2]) for p in staging)

    def close(self) -> None:
        """Stop, and remove the folder."""
        self.stopped.set()
        self.pool.shutdown()
        self.publisher.close()
        self.committer.close()
        self.ledger.close()
        shutil.rmtree(self.folder)
