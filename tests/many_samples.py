"""Run COUNT short samples through ledger and writer on the stub of the server, in a process of its own, and print what it took."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from pathlib import Path

import psutil

from hsnb import extract
from hsnb.extract import Limits
from tests.stub import StubServer, make_data


class Counter:
    """What the stub keeps of its requests here: their number."""

    n = 0

    def append(self, _) -> None:
        self.n += 1

    def __len__(self) -> int:
        return self.n


def main(folder: str, count: int) -> dict:
    """Return {CPU seconds of each thousand, bytes of memory after each, whether all are published}."""
    data, server = make_data(Path(folder, "data"), [6] * count), StubServer(Path(folder), max_running_requests=64)
    server.asked = Counter()
    times, memory, me = [], [], psutil.Process()

    async def note(rid, ids):
        if server.asked.n % 1000 == 0:
            gc.collect()  # what is held, not what is not yet collected
            times.append(time.process_time())  # of the processor: others may use the cores too
            memory.append(me.memory_info().rss)

    server.behave = note
    result = extract.run(server, data, limits=Limits(canary_every=5000, status_s=5))
    seconds = [b - a for a, b in itertools.pairwise(times)]
    return {"ok": result.ok, "samples": result.samples, "rate": count / result.seconds, "seconds": seconds, "memory": memory}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
