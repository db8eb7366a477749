"""Measure what the capture costs: plain prefill against captured, in turns, on one server; and the ceilings of this machine.

    python -m benchmarks.speed [--device cuda|cpu] [--out docs] [--turns 9] [--loads long,short,mixed] [--spools memory,disk]
                               [--outputs memory,disk]

With --outputs a client publishes what is captured meanwhile (verify, checksum, move or copy, enter, free), by the classes of an
extraction; a turn is timed until the last dump is in the spool and until it is at the output. Results go to speed-results.json, one run for each machine;
`python -m benchmarks.render_speed` makes the tables of docs/performance.md from it. `--site`: see benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import gpu_site

ROOT = gpu_site.ROOT


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, measure, and return 0 when everything was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="", choices=("", "cuda", "cpu"), help="default: cuda when there is one")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of speed-results.json (default: docs/)")
    parser.add_argument("--turns", type=int, default=9, help="alternations of each load")
    parser.add_argument("--loads", default="long,short,mixed")
    parser.add_argument("--spools", default="memory", help="memory, disk, or both: a server for each")
    parser.add_argument(
        "--outputs", help="memory, disk, or both, each in turn; '': nobody takes the dumps (default: both on a GPU, else nobody)"
    )
    parser.add_argument("--format", default="safetensors", choices=("safetensors", "pt"))
    parser.add_argument("--label", default="", help="kept apart in the results, e.g. a setting that was tried")
    parser.add_argument("--limit-s", type=float, default=3600, help="no turn begins after this many seconds")
    parser.add_argument("--site", type=Path, help="folder of unpacked wheels that stands for an installation")
    args = parser.parse_args(argv)
    if args.site:  # what lies there is importable in a new process only
        gpu_site.prepare(args.site.resolve())
        rest = gpu_site_rest(sys.argv[1:] if argv is None else argv)
        env = {**gpu_site.environment(args.site.resolve()), "HSNB_ROOT": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.speed", *rest], env)
    return run(args)


def gpu_site_rest(words: list[str]) -> list[str]:
    """Return the arguments without --site."""
    at = next(i for i, w in enumerate(words) if w.split("=")[0] == "--site")
    return words[:at] + words[at + (1 if "=" in words[at] else 2) :]


def run(args: argparse.Namespace) -> int:
    """Measure the ceilings, then each spool's server with each load; the file is written after every one of them."""
    import torch

    from benchmarks.gpu import card, now, versions
    from benchmarks.gpu_results import card_key
    from benchmarks.speed_ceilings import ceilings
    from benchmarks.speed_load import LOADS, deployment, measure
    from benchmarks.speed_results import FILE, Results, Run
    from hsnb.server import Server

    end = time.monotonic() + args.limit_s
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    outputs = ("memory,disk" if device == "cuda" else "") if args.outputs is None else args.outputs
    about = card(device)
    key = (card_key(about["card"], 1) if device == "cuda" else "cpu") + (f" {args.label}" if args.label else "")
    disk = Path(tempfile.mkdtemp(prefix="hsnb-speed-", dir=os.environ.get("HSNB_SPEED_DISK") or None))
    found = Run(date=now(), device=device, card=about["card"], cores=len(os.sched_getaffinity(0)), versions=versions())
    found = found.model_copy(update={"ceilings": ceilings(device, Path("/dev/shm"), disk)})
    results = Results.read(args.out / FILE)

    def keep(name: str = "", load=None) -> None:
        nonlocal found, results
        if load is not None:
            found = found.model_copy(update={"loads": {**found.loads, name: load}})
        results = Results(runs={**results.runs, key: found})
        results.write(args.out / FILE)

    keep()
    for name, value in found.ceilings.items():
        print(f"  {name:<60} {value:8.2f} GB/s", flush=True)
    whole = True
    for spool in args.spools.split(","):
        folder = disk / "spool" if spool == "disk" else None
        with Server.start(deployment(device, folder, args.format), log_dir=disk / f"log-{spool}") as server:
            for output, name in itertools.product(outputs.split(","), args.loads.split(",")):
                place = (output, {"memory": Path("/dev/shm"), "disk": disk}[output]) if output else None
                own = found.ceilings if output == "disk" else None
                load = measure(server, LOADS[device][name], args.turns, end, place, own)
                label = name + (" from disk" if spool == "disk" else "") + (f" to {output}" if output else "")
                whole = whole and load.turns == args.turns
                keep(label, load)
                ratios = (
                    {of: round(load.median(of), 3) for of in ("rate", "whole", "answered", "cpu_s", "server_cpu")} if load.turns else {}
                )
                print(f"{key} {label}: {ratios} {load.model_dump_json()}", flush=True)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
