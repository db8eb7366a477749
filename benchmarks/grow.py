"""Measure what a token and a sample cost as the work grows: the server's writer by length of prompt, the client by number of samples.

    python -m benchmarks.grow [--out docs] [--parts writer,client,server] [--counts 1000,10000]

writer: hsnb's writer as the capture drives it, in chunks of 2,048 rows of Kimi's width (57,344 bytes a token), into /dev/shm; no
engine. client: whole extractions, ledger and files, from a stub of the server that answers at once with real dumps of 6 tokens;
each count in a process of its own. server: 10,000 captured requests to a real SGLang on this CPU, the tiny DeepSeek. Results go
to grow-results.json; `python -m benchmarks.render_speed` makes the tables.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from benchmarks.gpu import now, versions
from benchmarks.gpu_site import ROOT
from benchmarks.grow_results import FILE, Client, Grow, Length, Made, Requests
from benchmarks.others import COLUMNS, WIDTH, Hsnb

CHUNK = 2048  # rows
LENGTHS = (128, 512, 2048, 8192, 16384)
TOKENS = 16384  # of a turn, in all


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, measure, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grow", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help=f"folder of {FILE} (default: docs/)")
    parser.add_argument("--parts", default="writer,client,server")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--counts", default="1000,10000", help="samples of the client's runs")
    args = parser.parse_args(argv)
    if "writer" in args.parts:
        keep(args.out / FILE, "writer", writer=writer(args.turns))
    for count in map(int, args.counts.split(",") if "client" in args.parts else ()):
        keep(args.out / FILE, f"client {count}", client={**Grow.read(args.out / FILE).client, count: client(count)})
    if "server" in args.parts:
        keep(args.out / FILE, "server", server=server())
    return 0


def keep(path: Path, part: str, **found) -> None:
    """Put one part into the file as soon as it is measured, with its date and versions, and print it."""
    before = Grow.read(path)
    before.model_copy(update={**found, "made": {**before.made, part: Made(date=now(), versions=versions())}}).write(path)
    print(part, found, flush=True)


def writer(turns: int) -> list[Length]:
    """Return CPU seconds and memory for each length of prompt, the lengths in turns."""
    folder = Path(tempfile.mkdtemp(prefix="hsnb-grow-", dir="/dev/shm"))
    columns = [torch.randn(CHUNK, WIDTH).to(torch.bfloat16) for _ in range(COLUMNS)]
    hsnb = Hsnb(folder)
    found = {n: Length(tokens=n, seconds=[], cpu_s=[], memory_mib=[]) for n in LENGTHS}
    try:
        for turn in range(turns + 1):  # the first one fills the ring
            for tokens in LENGTHS:
                cpu, began = hsnb.cpu_s(), time.perf_counter()
                for _ in range(TOKENS // tokens):
                    one_prompt(hsnb, columns, tokens)
                    hsnb.writer.settle()
                    for path in folder.glob("*.safetensors"):
                        path.unlink()
                if turn:
                    found[tokens].seconds.append((time.perf_counter() - began) / TOKENS)
                    found[tokens].cpu_s.append((hsnb.cpu_s() - cpu) / TOKENS)
                    found[tokens].memory_mib.append(sum(p.memory_full_info().pss for p in (psutil.Process(), hsnb.process())) / 2**20)
    finally:
        hsnb.writer.close()
        shutil.rmtree(folder)
    return list(found.values())


def one_prompt(hsnb: Hsnb, columns: list[torch.Tensor], tokens: int) -> None:
    """Hand a prompt's chunks to the writer."""
    file = hsnb.file(tokens)
    for start in range(0, tokens, CHUNK):
        n = min(CHUNK, tokens - start)
        hsnb.add(file, start, n, [c[:n] for c in columns], torch.arange(start, start + n))


def server(thousands: int = 10) -> Requests:
    """Send ten thousand captured prompts to a real server and note its memory after each thousand."""
    from benchmarks.gpu_probe import prompt_ids
    from benchmarks.speed_load import VOCAB, memory, one_turn
    from hsnb.params import Deployment
    from hsnb.server import Server

    tree = {
        "name": "grow",
        "model": "demo:tiny-deepseek",
        "server": {"device": "cpu", "dtype": "float32", "flags": {"max-running-requests": 64}},
        "capture": {"boundaries": [2, 4, 6]},
    }
    ids = [prompt_ids(4 + n % 5, VOCAB, seed=n) for n in range(1000)]
    seconds = []
    deployment = Deployment.parse(tree, origin="benchmarks/grow.py")
    with tempfile.TemporaryDirectory(prefix="hsnb-grow-") as folder, Server.start(deployment, log_dir=Path(folder)) as started:
        one_turn(started, ids[:8], 8, "hsnb-bench")  # the writing process is there from now on
        held = [memory(started)]
        for _ in range(thousands):
            seconds.append(one_turn(started, ids, 64, "hsnb-bench").published_s)
            held.append(memory(started))
    return Requests(work="1,000 prompts of 4 to 8 tokens, 64 in a request", seconds=seconds, memory_mib=[m / 2**20 for m in held])


def client(count: int) -> Client:
    """Run one extraction of `count` samples in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="hsnb-grow-") as folder:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.many_samples", folder, str(count)], cwd=ROOT, capture_output=True, text=True, check=True
        )
    tree = json.loads(ran.stdout.splitlines()[-1])
    if not tree["ok"] or tree["samples"] != count:
        raise RuntimeError(f"{tree['samples']} of {count} samples")
    return Client(rate=tree["rate"], seconds=tree["seconds"], memory_mib=[m / 2**20 for m in tree["memory"]])


if __name__ == "__main__":
    sys.exit(main())
