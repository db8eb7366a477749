"""`hsnb prepare`: write a run's Arrow data set, with every sample's row fixed, before any shard is extracted."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hsnb.data import prepare
from hsnb.params import Deployment
from hsnb.paths import run_dir
from hsnb.planning import check_runnable
from hsnb.progress import Progress


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("params", nargs="?", default="params/demo.yaml", help="a params/*.yaml (default: %(default)s)")
    parser.add_argument("--run", default="demo", help="outputs/RUN/data is written (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=512, metavar="TOKENS", help="longest sample (default: %(default)s)")
    parser.add_argument("--too-long", choices=["error", "skip", "truncate"], default="error", help="what to do with a longer one")


def run(args: argparse.Namespace) -> dict[str, Any]:
    deployment = Deployment.load(args.params)
    deployment.model_config_json()  # a shape is enough to plan with, not to prepare
    check_runnable(deployment)
    with told("prepare") as tell:
        data = prepare(deployment, run_dir(args.run) / "data", max_length=args.max_length, too_long=args.too_long, progress=tell)
    counts = {name: getattr(data, name) for name in ("rows", "tokens", "masked_tokens", "skipped", "truncated", "unmasked", "all_masked")}
    return {"path": str(data.path), **counts, "fingerprint": data.fingerprint, "reused": data.reused}


def text(result: dict[str, Any]) -> str:
    how = "as prepared before" if result["reused"] else "prepared"
    return (
        f"{result['path']}: {result['rows']:,} samples, {result['tokens']:,} tokens ({result['masked_tokens']:,} trained), {how}"
        + (
            f"; {', '.join(f'{result[n]:,} {n}' for n in ('skipped', 'truncated') if result[n])}"
            if result["skipped"] or result["truncated"]
            else ""
        )
        + (f"; {result['unmasked']:,} without a trained token" if result["unmasked"] else "")
        + (f"; {result['all_masked']:,} with nothing but trained tokens" if result["all_masked"] else "")
    )


@contextmanager
def told(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a pass over samples; yields the callable that hsnb.data tells (samples done, samples in all or 0) to."""
    with Progress(None, unit="samples", desc=what) as progress:

        def tell(done: int, total: int) -> None:
            progress.total = total or None
            progress.advance(done - progress.done)

        yield tell
