"""The client beside the load: every dump is verified, checksummed, moved or copied to the output, entered and freed as it appears."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from hsnb.collect import free
from hsnb.extract.flow import Disk
from hsnb.extract.output import Committer, Output
from hsnb.extract.publish import Publisher
from hsnb.ledger import Ledger
from hsnb.patch.spool import file_stem
from hsnb.sizes import OUTPUT_FLOOR

LOOK_S = 0.002


def threads() -> int:
    """Return how many threads an extraction publishes with on this machine."""
    return min(8, max(2, os.cpu_count() or 2))


class Drain:
    """Publish the dumps of `rids` with the classes of an extraction, into a new folder below `root`; one turn."""

    def __init__(self, server, root: Path, rids: list[str], ids: list[list[int]]):
        self.server, self.rids = server, rids
        self.ids = [torch.tensor(i) for i in ids]
        self.folder = Path(tempfile.mkdtemp(prefix="hsnb-drain-", dir=root))
        output = Output(self.folder, "drain", "speculators")
        output.begin(range(len(rids)))
        self.ledger = Ledger(self.folder / "ledger" / "drain.sqlite", {})
        self.committer = Committer(self.ledger, output)
        self.publisher = Publisher(output, self.committer, lambda _: None, Disk(self.folder, None, OUTPUT_FLOOR), 600.0, threading.Event())
        self.pool = ThreadPoolExecutor(threads(), thread_name_prefix="hsnb-drain")
        self.stopped, self.found = threading.Event(), threading.Thread(target=self._watch, name="hsnb-drain-watch")
        self.futures: list[Future] = []

    def start(self) -> None:
        """Begin to look for dumps."""
        self.found.start()

    def _watch(self) -> None:
        rows = {f"{file_stem(rid)}.safetensors": row for row, rid in enumerate(self.rids)}
        while rows and not self.stopped.wait(LOOK_S):
            for entry in os.scandir(self.server.spool):
                if (row := rows.pop(entry.name, None)) is not None:
                    self.futures.append(self.pool.submit(self._publish, row, Path(entry.path)))

    def _publish(self, row: int, path: Path) -> None:
        self.publisher.publish(self.server, row, self.rids[row], path, self.ids[row], 1, time.monotonic(), lambda _: None)
        free(path)

    def finish(self) -> None:
        """Return when everything is published. Raises what a dump or the output raised."""
        self.found.join()
        for future in self.futures:
            future.result()

    def close(self) -> None:
        """Remove what was published."""
        self.stopped.set()
        self.pool.shutdown()
        self.committer.close()
        done = len(self.ledger.done())
        self.ledger.close()
        shutil.rmtree(self.folder)
        if len(self.futures) == len(self.rids) != done:
            raise RuntimeError(f"{done} of {len(self.rids)} dumps were entered")
