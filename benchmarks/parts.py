"""Measure the parts that the writer and the client are made of, one by one, in CPU time: what to change, and what it is worth.

    python -m benchmarks.parts [--out docs] [--turns 7]

Results go to parts-results.json; `python -m benchmarks.render_speed` makes the table of docs/performance.md from it. CPU time is
of the whole process: threads that spin count.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.gpu import now, versions
from benchmarks.gpu_site import ROOT
from benchmarks.large_pages import asking, mounted, not_asking
from benchmarks.others import META
from benchmarks.parts_results import FILE, Parts
from hsnb.checks import RowLook, row_faults
from hsnb.patch.armed import Armed, ArmedFile
from hsnb.patch.batch import States
from hsnb.patch.bodies import Body
from hsnb.patch.capture import Capture
from hsnb.patch.settings import Settings
from hsnb.patch.spool import SafetensorsRequest, bits
from hsnb.trainers.place import copy, file_digest, synced_checksum

Part = tuple[str, str, float, Callable[[], object]]  # name, unit, what one unit is of, work


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, measure, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help=f"folder of {FILE} (default: docs/)")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args(argv)
    memory, disk = (Path(tempfile.mkdtemp(prefix="hsnb-parts-", dir=root)) for root in ("/dev/shm", None))
    found: dict[str, list[float]] = {}
    try:
        with mounted() as large:
            makers = [scheduler(memory), capture(memory), client(memory, disk), pages(memory, "/dev/shm in small pages", not_asking)]
            makers += [pages(memory, "/dev/shm in large pages, as hsnb asks for them")]
            for parts in map(list, [*makers, *([pages(large, "memory mounted for large pages", not_asking)] if large else [])]):
                for turn in range(args.turns + 1):
                    for name, unit, per, work in parts:
                        began = time.process_time()
                        work()
                        if turn:
                            found.setdefault(f"{name} [{unit}]", []).append((time.process_time() - began) / per)
    finally:
        shutil.rmtree(memory)
        shutil.rmtree(disk)
    result = Parts(date=now(), cores=len(os.sched_getaffinity(0)), versions=versions(), parts=found)
    result.write(args.out / FILE)
    print(result.model_dump_json(indent=1))
    return 0


class Req:
    """What the capture reads of SGLang's request."""

    def __init__(self, rid: str, tokens: int):
        self.rid, self.origin_input_ids, self.output_ids = rid, range(tokens), []
        self.to_finish = self.finished_reason = None


def scheduler(memory: Path) -> Iterator[Part]:
    """Yield what the capture takes of the scheduler for 64 prompts of 128 tokens, so narrow that the copies are nothing, twenty times over."""
    spool, times, n, tokens = memory / "spool", 20, 64, 128
    spool.mkdir()
    armed = ArmedFile(spool, Armed(state="armed", dtype="float32", num_layers=2, hidden_size=8))
    made = Capture(
        SimpleNamespace(forward=None), Settings(spool, (0, 1), "pre", "safetensors", "hsnb-"), armed, writes=True, warmup=False, spec=Body()
    )
    states = {k: torch.randn(n * tokens, 8) for k in (0, 1, "final")}

    def batches() -> None:
        for _ in range(times):
            reqs = [Req(f"hsnb-{uuid.uuid4().hex}", tokens) for _ in range(n)]
            rids, ids = [r.rid for r in reqs], torch.arange(n * tokens)
            batch = SimpleNamespace(rids=rids, extend_seq_lens_cpu=[tokens] * n, extend_prefix_lens_cpu=[0] * n, input_ids=ids)
            made.note_lengths(reqs)
            made.store(made.wanted(batch), states, ids)
        made.writer.settle()
        for path in spool.glob("*.safetensors"):
            path.unlink()

    yield "a batch of 64 prompts of 128 tokens, without the copies of states", "ms a batch", times / 1e3, batches


def capture(memory: Path) -> Iterator[Part]:
    """Yield what the capture does with a batch of four prompts of 128 tokens of SmolLM2 in float32, twenty times over."""
    columns, ring, times = [torch.randn(512, 576) for _ in range(4)], torch.empty(512, 4, 576), 20
    states, rows = States(columns), bits(ring)[:128]
    ids, unit, per = torch.arange(128).numpy(), "us a token", 512 * times / 1e6
    armed = ArmedFile(memory, Armed(state="armed"))

    def by_torch() -> None:
        for _ in range(times):
            ring.copy_(torch.stack(columns, dim=1))

    def by_numpy() -> None:
        for _ in range(times):
            states.copy_to(ring, slice(0, 512))

    def files() -> None:
        for n in range(4 * times):
            request = SafetensorsRequest(f"hsnb-{n}", 128, "data", 4, 576, "float32", META)
            request.begin(memory)
            request.put(0, rows, ids)
            armed.count("captured")
            request.publish(memory)
        for path in memory.glob("*.safetensors"):
            path.unlink()

    yield "stack and copy by torch", unit, per, by_torch
    yield "stack and copy by numpy", unit, per, by_numpy
    yield "lay out, write, count and publish a file of 128 tokens in memory", unit, per, files


def client(memory: Path, disk: Path) -> Iterator[Part]:
    """Yield what the client does with 117 MB of bfloat16."""
    states = torch.randn(2048, 4, 7168).to(torch.bfloat16)
    unit, per = "cores for each GB/s", states.numel() * 2 / 1e9
    source, target, plain = memory / "states.safetensors", disk / "copy", disk / "saved.safetensors"
    save_file({"hidden_states": states}, source)
    buffer = memoryview(bytearray(1 << 20))

    def mapped() -> None:
        with safe_open(source, "pt") as file:
            row_faults(file.get_tensor("hidden_states"))

    def through_a_buffer() -> None:
        with open(source, "rb", buffering=0) as a, open(target, "wb", buffering=0) as b:
            while n := a.readinto(buffer):
                b.write(buffer[:n])

    def digest_in_large_blocks() -> None:
        import xxhash

        with open(source, "rb") as file:
            digest = xxhash.xxh3_128()
            while block := file.read(1 << 24):
                digest.update(block)

    yield "rows looked at by torch's minimum and maximum, in memory", unit, per, lambda: (states.amin(-1), states.amax(-1))
    yield "rows looked at by their bits, in memory", unit, per, lambda: row_faults(states)
    yield "rows looked at by their bits, of a mapped file in /dev/shm", unit, per, mapped
    yield "checksum of a file in /dev/shm, blocks of 16 MiB", unit, per, digest_in_large_blocks
    yield "checksum of a file in /dev/shm, one block of 1 MiB", unit, per, lambda: file_digest(source)
    yield "saved anew to the disk by save_file", unit, per, lambda: save_file({"hidden_states": states}, plain)

    def copied_past_the_page_cache() -> None:
        copy(source, disk / "past", b"", RowLook(*states.shape, states.dtype), source.stat().st_size - states.numel() * 2)

    def copied_by_the_kernel() -> None:
        shutil.copyfile(source, target)
        synced_checksum(target, RowLook(*states.shape, states.dtype), source.stat().st_size - states.numel() * 2)

    yield "copied from /dev/shm to the disk through a buffer of 1 MiB", unit, per, through_a_buffer
    yield "copied from /dev/shm to the disk by the kernel", unit, per, lambda: shutil.copyfile(source, target)
    yield "copied to the disk by the kernel, synced, read back, hashed and looked at", unit, per, copied_by_the_kernel
    yield "copied to the disk past the page cache, hashed and looked at on the way, synced", unit, per, copied_past_the_page_cache


def pages(folder: Path, words: str, asks: Callable = asking) -> Iterator[Part]:
    """Yield what a prompt of 128 tokens of Kimi's width costs in memory, from the writer to the client's last look; ten of them."""
    states, times, made = torch.randn(128, 4, 7168).to(torch.bfloat16), 10, itertools.count()
    rows, ids = bits(states), torch.arange(128).numpy()
    unit, per = "cores for each GB/s", times * states.numel() * 2 / 1e9

    def written() -> None:
        for path in folder.glob("*.safetensors"):
            path.unlink()
        for _ in range(times):
            request = SafetensorsRequest(f"hsnb-{next(made)}", 128, "data", 4, 7168, "bfloat16", META)
            with asks():
                request.begin(folder)
            request.put(0, rows, ids)
            request.publish(folder)

    def read() -> None:
        for path in folder.glob("*.safetensors"):
            synced_checksum(path, RowLook(*states.shape, states.dtype), path.stat().st_size - states.numel() * 2)

    yield f"the last ones removed, a file of 128 tokens laid out, written and published: {words}", unit, per, written
    yield f"such a file read, hashed and looked at: {words}", unit, per, read


if __name__ == "__main__":
    sys.exit(main())
