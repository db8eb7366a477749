"""Measure the client's drain alone: verify, publish, checksum, enter and free dumps that lie in the spool. No server, no GPU.

    python -m benchmarks.drain [--out docs] [--turns 5] [--label TEXT] [--loads long,short,demo]

The dumps are real ones (the plug-in's own writer makes them) of Kimi's width in bfloat16, or SmolLM2's in float32. Each turn
publishes all of them with the classes that an extraction uses, by as many threads as it would have. Results go to
drain-results.json; `python -m benchmarks.render_speed` makes the table of docs/performance.md from it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.drain_results import FILE, Case, DrainResults, DrainRun, DrainTurn
from benchmarks.gpu import now, versions
from benchmarks.gpu_site import ROOT
from benchmarks.large_pages import asking, mounted, not_asking
from hsnb.collect import free
from hsnb.extract.flow import Disk
from hsnb.extract.output import Committer, Output
from hsnb.extract.publish import Publisher
from hsnb.extract.staging import threads
from hsnb.ledger import Ledger
from hsnb.patch.spool import SafetensorsRequest, bits, dtype_name
from hsnb.sizes import OUTPUT_FLOOR

BOUNDARIES = (3, 31, 59)


@dataclass(frozen=True)
class Dumps:
    """`count` prompts of `tokens`, states of width `hidden` in `dtype`."""

    tokens: int
    count: int
    hidden: int
    dtype: torch.dtype

    @property
    def words(self) -> str:
        """What they are, for people."""
        return f"{self.count} dumps of {self.tokens:,} tokens, 4 x {self.hidden:,} {dtype_name(self.dtype)}"

    @property
    def nbytes(self) -> int:
        """Bytes of states in the spool."""
        return self.count * self.tokens * 4 * self.hidden * self.dtype.itemsize


DUMPS = {
    "long": Dumps(2048, 4, 7168, torch.bfloat16),
    "short": Dumps(128, 32, 7168, torch.bfloat16),
    "demo": Dumps(256, 64, 576, torch.float32),
}


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, measure, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drain", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help=f"folder of {FILE} (default: docs/)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--label", default="", help="kept apart in the results, e.g. a setting that was tried")
    parser.add_argument("--loads", default=",".join(DUMPS))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure")
    args = parser.parse_args(argv)
    key, results = "client" + (f" {args.label}" if args.label else ""), DrainResults.read(args.out / FILE)
    publishing = threads()
    found = DrainRun(date=now(), cores=len(os.sched_getaffinity(0)), threads=publishing, versions=versions())
    memory = Path("/dev/shm")
    with mounted() as large:
        ways = {
            "memory to memory": (memory, memory, asking),
            "memory to memory, small pages": (memory, memory, not_asking),
            **({"memory to memory, mounted for large pages": (large, large, asking)} if large else {}),
            "memory to disk": (memory, args.disk, asking),
            "memory in small pages to disk": (memory, args.disk, not_asking),
            "disk to disk": (args.disk, args.disk, asking),
        }
        for name in args.loads.split(","):
            turns: dict[str, list[DrainTurn]] = {where: [] for where in ways}
            for turn, (where, (spool, output, pages)) in itertools.product(range(args.turns + 1), ways.items()):
                with pages():
                    taken = one_turn(DUMPS[name], spool, output, publishing)
                if turn:  # the first one warms up
                    turns[where].append(taken)
            cases = {f"{name}, {where}": Case(dumps=DUMPS[name].words, where=where, turns=taken) for where, taken in turns.items()}
            found = found.model_copy(update={"cases": {**found.cases, **cases}})
            DrainResults(runs={**results.runs, key: found}).write(args.out / FILE)
            for words, case in cases.items():
                print(f"{words}: {case.median('rate'):.2f} GB/s, {case.median('cores'):.2f} cores for each GB/s", flush=True)
    return 0


def one_turn(dumps: Dumps, spool_root: Path, output_root: Path, publishing: int) -> DrainTurn:
    """Write the dumps, then time their way out of the spool."""
    spool, folder = (Path(tempfile.mkdtemp(prefix="hsnb-drain-", dir=root)) for root in (spool_root, output_root))
    try:
        paths, ids = write_dumps(dumps, spool)
        armed = SimpleNamespace(boundaries=list(BOUNDARIES), final="pre", hidden_size=dumps.hidden, dtype=dtype_name(dumps.dtype))
        server = SimpleNamespace(armed=[armed], url="http://drain")
        output = Output(folder, "drain", "speculators")
        output.begin(range(dumps.count))
        with Ledger(folder / "ledger" / "drain.sqlite", {}) as ledger:
            committer = Committer(ledger, output)
            publisher = Publisher(output, committer, lambda _: None, Disk(folder, None, OUTPUT_FLOOR), 60.0, threading.Event())

            def publish(row: int) -> None:
                publisher.publish(server, row, f"hsnb-{row}", paths[row], ids, 1, time.monotonic(), lambda _: None)
                free(paths[row])

            cpu, began = time.process_time(), time.perf_counter()
            with ThreadPoolExecutor(publishing) as pool:
                list(pool.map(publish, range(dumps.count)))
            seconds, spent = time.perf_counter() - began, time.process_time() - cpu
            publisher.close()
            committer.close()
            if len(ledger.done()) != dumps.count or any(spool.glob("*.safetensors")):
                raise RuntimeError("not every dump was published and freed")
        return DrainTurn(nbytes=dumps.nbytes, seconds=round(seconds, 4), cpu_s=round(spent, 4))
    finally:
        shutil.rmtree(spool)
        shutil.rmtree(folder)


def write_dumps(dumps: Dumps, spool: Path) -> tuple[list[Path], torch.Tensor]:
    """Write them as the plug-in does and return their paths and their token ids, which are the same in all."""
    meta = {
        "hsnb_format": "1",
        "boundaries": json.dumps(list(BOUNDARIES)),
        "final": "pre",
        "dtype": dtype_name(dumps.dtype),
        "model": "drain",
    }
    meta |= {"sglang_version": "0", "patch_version": "0", "tp_rank": "0", "tp_size": "1"}
    states = torch.randn(dumps.tokens, 4, dumps.hidden, generator=torch.Generator().manual_seed(0)).to(dumps.dtype)
    ids, paths = torch.arange(dumps.tokens), []
    for row in range(dumps.count):
        request = SafetensorsRequest(f"hsnb-{row}", dumps.tokens, "data", 4, dumps.hidden, dtype_name(dumps.dtype), meta)
        request.begin(spool)
        request.put(0, bits(states), ids.numpy())
        request.publish(spool)
        paths.append(request._path)
    return paths, ids


if __name__ == "__main__":
    sys.exit(main())
