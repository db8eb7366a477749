"""Run hsnb's checks on this machine's NVIDIA GPU(s) in one go: print a table, and keep every figure in gpu-results.json.

    python -m benchmarks.gpu [--gpus 1|2] [--out docs] [--site FOLDER] [--steps a,b] [--limit-s 540]

One GPU: a model of Kimi's depth and width and a dense Llama, both random, made here. Two: the same with tensor parallelism over
NCCL. A step that fails is recorded with its reason and the next one runs; the file is written after every step, so that a run
that is killed keeps what it has. Runs on other cards, or with another number of GPUs, stay in the file.

`--site`: SGLang's wheels are unpacked there and nothing can be installed (no network): hsnb is linked in as a plug-in.
`--device cpu`: a rehearsal of the same code on tiny models; its file is never the published one.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import gpu_site

ROOT = gpu_site.ROOT
ON_REQUEST = ("drafter",)  # needs the demo's weights and speculators, and servers of its own: only when --steps names it


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, run the steps, and return 0 when every one of them is ok."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2))
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of gpu-results.json (default: docs/)")
    parser.add_argument("--site", type=Path, help="folder of unpacked wheels that stands for an installation")
    parser.add_argument("--steps", default="", help="comma list; the others keep their last result")
    parser.add_argument("--limit-s", type=float, default=540, help="no step begins after this many seconds")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    if args.site:  # what lies there is importable in a new process only
        gpu_site.prepare(args.site.resolve())
        rest = _without("--site", sys.argv[1:] if argv is None else argv)
        env = {**gpu_site.environment(args.site.resolve()), "HSNB_ROOT": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *rest], env)
    if args.device == "cpu" and args.out.resolve() == ROOT / "docs":
        parser.error("--device cpu is a rehearsal: name another folder with --out")
    return run(args)


def _without(flag: str, words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if not skip and word != flag and not word.startswith(f"{flag}="):
            kept.append(word)
        skip = word == flag
    return kept


def steps(plan) -> dict[str, tuple[str, Callable]]:
    """Return {name: (title, step)} in the order in which they run: those of one server together, the speed last."""
    from benchmarks import gpu_checks as checks
    from benchmarks.gpu_drafter import drafter
    from benchmarks.gpu_kept import kept
    from benchmarks.gpu_speed import TITLE, speed

    one = plan.gpus == 1
    given = {
        "probe": ("The probe on Kimi's shape", checks.probe_deepseek),
        "ranks": ("Every rank has the same states", None if one else checks.ranks),
        "together": ("Alone and among others, Kimi's shape", checks.together_deepseek),
        "counts": ("What is counted, and bytes on disk", checks.counts),
        "unchanged": ("Answers with and without the plug-in", checks.unchanged if one else None),
        **{
            f"boundaries-{d}": (f"Every boundary against transformers, {d}", partial(checks.boundaries, dtype=d))
            for d in plan.llama_dtypes[:1]
        },
        "probe-llama": ("The probe on the dense Llama", checks.probe_llama),
        "together-llama": ("Alone and among others, dense Llama", checks.together_llama),
        **{
            f"boundaries-{d}": (f"Every boundary against transformers, {d}", partial(checks.boundaries, dtype=d))
            for d in plan.llama_dtypes[1:]
        },
        "chunks": ("In chunks and in one piece", checks.chunked),
        "kept": ("What is copied from is kept until it is", kept if one else None),
        "speed": (TITLE, speed),
        "drafter": ("EAGLE-3 drafters, trained on states taken here and served here", drafter if one else None),
    }
    return {name: (title, step) for name, (title, step) in given.items() if step}


def run(args: argparse.Namespace) -> int:
    """Run the steps asked for and keep the results; return 0 when all of them are ok."""
    from benchmarks.gpu_checks import Context
    from benchmarks.gpu_results import PUBLISHED, Results, Run, card_key
    from benchmarks.gpu_servers import Fleet, Plan

    began = time.monotonic()
    plan = Plan.gpu(args.gpus) if args.device == "cuda" else Plan.tiny(args.gpus)
    file = args.out / PUBLISHED.name
    results = Results.read(file if file.is_file() or args.device == "cpu" else PUBLISHED)
    about = Run(date=now(), gpus=args.gpus, device=args.device, versions=versions(), **card(args.device))
    key = card_key(about.card, args.gpus)
    chosen = [s for s in args.steps.split(",") if s]
    todo = steps(plan)
    if unknown := [s for s in chosen if s not in todo]:
        raise SystemExit(f"--steps {','.join(unknown)}: expected some of {', '.join(todo)}")
    if not chosen:
        results = results.begun_again(key, but=ON_REQUEST)
    logs = Path(tempfile.mkdtemp(prefix="hsnb-gpu-"))
    fleet = Fleet(plan, logs, limit_s=min(300.0, args.limit_s))
    print(f"{about.card} x {args.gpus}, driver {about.driver}; " + ", ".join(f"{k} {v}" for k, v in about.versions.items()), flush=True)
    good = True

    def keep(name: str, done, *, quiet: bool = False) -> None:
        nonlocal results
        done = done.model_copy(update={"source": about.versions["hsnb source"]})
        results = results.with_step(key, about, name, done)
        results.write(file)
        if not quiet:
            show(name, done)

    try:
        if set(chosen) - set(ON_REQUEST) or not chosen:
            make_models(plan)
        if not chosen:
            fleet.begin()
        context = Context(plan, fleet, args.out, began + args.limit_s)
        for name, (title, step) in todo.items():
            if name not in (chosen or [n for n in todo if n not in ON_REQUEST]):
                continue
            context.keep = partial(so_far, keep, name, title, time.monotonic(), logs, args.out)
            left = args.limit_s - (time.monotonic() - began)
            fleet.limit_s = min(300.0, left)
            done = guarded(title, partial(step, context), left, context.take_found)
            good = good and done.state == "ok"
            keep(name, done)
    finally:
        fleet.stop_all()
        keep_logs(logs, args.out)
    if fleet.tries:
        done = started(fleet)
        good = good and done.state == "ok"
        keep("starts", done)
    print(f"{time.monotonic() - began:.0f} s in all; {file}", flush=True)
    return 0 if good else 1


def so_far(keep: Callable, name: str, title: str, begun: float, logs: Path, out: Path, figures: list, tables: list) -> None:
    """Keep what a long step has found until now, and the servers' logs: it stands as failed until the step has ended."""
    from benchmarks.gpu_results import Step

    seconds = round(time.monotonic() - begun, 1)
    step = Step(
        title=title, state="failed", date=now(), seconds=seconds, figures=list(figures), tables=list(tables), error="cut before its end"
    )
    keep(name, step, quiet=True)
    keep_logs(logs, out, quiet=True)


def guarded(title: str, step: Callable, left_s: float, found: Callable = lambda: ([], [])):
    """Run one step and return its record, whatever becomes of it: a bench that stops at the first fault measures nothing else.

    `found`: what it had found when it failed.
    """
    from benchmarks.gpu_results import Step, said, without_paths

    if left_s <= 0:
        return Step(title=title, state="skipped", date=now(), seconds=0, error="the time was out")
    before, figures, tables, error = time.monotonic(), [], [], ""
    try:
        figures, tables = step()
    except Exception as failure:
        print("\n".join([said(failure), *getattr(failure, "__notes__", [])]), file=sys.stderr, flush=True)
        error, (figures, tables) = without_paths(said(failure)), found()
    state = "failed" if error else "ok" if all(f.ok for f in figures) else "off"
    seconds = round(time.monotonic() - before, 1)
    return Step(title=title, state=state, date=now(), seconds=seconds, figures=figures, tables=tables, error=error)


def started(fleet):
    """Return the record of all starts: seconds, or why there were none."""
    from benchmarks.gpu_results import Step, figure, without_paths

    figures = []
    for name, tries in fleet.tries.items():
        for n, (seconds, error) in enumerate(tries, 1):
            again = f", start {n}" if n > 1 else ""
            if error:  # one that a second start made good is told, not judged
                bar = ("equal to", "ready") if n == len(tries) else ("", None)
                figures.append(figure(f"{name}{again}", "failed", "start", *bar, note=without_paths(error, 300)))
            else:
                figures.append(figure(f"{name}{again}: time to ready", seconds, "s", note="beside others" if fleet.plan.together else ""))
    state = "ok" if all(f.ok for f in figures) else "off"
    return Step(title="Starts", state=state, date=now(), seconds=0, figures=figures)


def make_models(plan) -> None:
    """Make both models, once; 26 s for the one of Kimi's shape."""
    from benchmarks.gpu_models import llama_folder
    from hsnb.demo import model_folder

    llama_folder(plan.llama)
    model_folder(plan.deepseek)


def keep_logs(logs: Path, out: Path, *, quiet: bool = False) -> None:
    """Put the servers' logs into one file beside the results, when those are not the published ones."""
    if out.resolve() == ROOT / "docs":
        if not quiet:
            print(f"the servers' logs: {logs}")
        return
    with open(out / "servers.log", "w") as whole:
        for log in sorted(logs.rglob("*.log")):
            whole.write(f"==== {log.relative_to(logs)}\n{log.read_text(errors='replace')[-1_500_000:]}\n")


def show(name: str, step) -> None:
    """Print one step as rows: figure, value, unit, bar, result."""
    from benchmarks.render_gpu import bar_text, show_value

    print(f"\n{name}: {step.title} [{step.state}, {step.seconds:g} s] {step.error}")
    for f in step.figures:
        result = "" if not f.rule else "pass" if f.ok else "OFF"
        print(f"  {f.name[:96]:<96} {show_value(f.value):>12} {f.unit:<12} {bar_text(f):<22} {result}")
    for table in step.tables:
        for row in table.rows if table.columns[-1] == "result" else []:
            if row[-1] != "pass":
                print(f"  {row[-1]}: {row[0]}: {row[1]}, expected {row[2]}")
    sys.stdout.flush()


def card(device: str) -> dict:
    """Return the card's name, memory (MiB) and driver as nvidia-smi says them; a rehearsal says what it is."""
    if device == "cpu":
        return {"card": f"rehearsal {platform.machine()}", "memory_mib": 0, "driver": "none"}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    name, memory, driver = (word.strip() for word in lines[0].split(","))
    return {"card": name, "memory_mib": int(memory), "driver": driver}


def versions() -> dict[str, str]:
    """Return the versions that the figures belong to; `hsnb source` tells two states of one version apart."""
    from importlib.metadata import version

    import torch
    import xxhash

    import hsnb

    digest = xxhash.xxh3_64()
    for path in sorted((ROOT / "hsnb").rglob("*.py")):
        digest.update(path.read_bytes())
    found = {name: version(name) for name in ("sglang", "transformers", "triton") if name != "triton" or torch.cuda.is_available()}
    cuda = str(torch.version.cuda or "none")
    return {
        "hsnb": hsnb.__version__,
        "hsnb source": digest.hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": cuda,
        **found,
    }


def now() -> str:
    """Return the time, ISO 8601 in UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
