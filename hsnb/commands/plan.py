"""`hsnb plan`: how large a run is, whether it fits, what forbids it, and with --measure how long it takes. Starts nothing else."""

from __future__ import annotations

import argparse
import contextlib
from types import SimpleNamespace
from typing import Any

from hsnb.commands.prepare import told
from hsnb.data import prepare
from hsnb.limits import server_limits
from hsnb.params import Deployment
from hsnb.paths import run_dir
from hsnb.plan import Plan
from hsnb.planning import check_runnable, plan


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("params", nargs="?", default="params/demo.yaml", help="a params/*.yaml (default: %(default)s)")
    parser.add_argument("--tokens", type=_count, default=0, metavar="N", help="plan so many tokens instead of the data")
    parser.add_argument("--run", default="demo", help="outputs/RUN/data is planned for (default: %(default)s)")
    parser.add_argument("--num-shards", type=_count, default=16, metavar="N", help="parts of the data set (default: %(default)s)")
    parser.add_argument("--max-length", type=_count, default=512, metavar="TOKENS", help="longest sample (default: %(default)s)")
    parser.add_argument("--too-long", choices=["error", "skip", "truncate"], default="error", help="what to do with a longer one")
    parser.add_argument("--hours", type=float, default=None, metavar="H", help="also say the rate that it takes to be done in H hours")
    parser.add_argument("--measure", action="store_true", help="prepare the data, and send 32 samples through the server to the disk")
    parser.add_argument("--server", default="", metavar="URL", help="with --measure: a running server; without it one is started")
    parser.add_argument("--spool", default="", metavar="DIR", help="the server's spool (default: /dev/shm/hsnb/{port})")


def run(args: argparse.Namespace) -> dict[str, Any]:
    own = {"server": {"spool": args.spool}} if args.spool else {}
    deployment = Deployment.load(args.params, **own)
    out = run_dir(args.run, make=False) / "data"
    options = {"tokens": args.tokens, "num_shards": args.num_shards, "hours": args.hours}
    if args.measure:
        made = _measured(args, deployment, options)
    else:
        with contextlib.nullcontext() if args.tokens else told("plan") as tell:
            made = plan(deployment, out, max_length=args.max_length, too_long=args.too_long, progress=tell, **options)
    return {"text": made.text(), **made.as_dict()}


def text(result: dict[str, Any]) -> str:
    return result["text"]


def _measured(args: argparse.Namespace, deployment: Deployment, options: dict[str, Any]) -> Plan:
    """Prepare, and plan without a server first: what does not fit is not measured."""
    from hsnb import probe
    from hsnb.measure import measure
    from hsnb.session import close_server, open_server

    check_runnable(deployment)
    folder = run_dir(args.run)
    with told("prepare") as tell:
        data = prepare(deployment, folder / "data", max_length=args.max_length, too_long=args.too_long, progress=tell)
    before = plan(deployment, folder / "data", data=data, **options)
    if not before.ok:
        return before
    try:
        server = open_server(SimpleNamespace(server_url=args.server, spool=args.spool, run=args.run), deployment)
        probe.ensure(server)
        measured = measure(server, deployment, data, folder)
        return plan(deployment, folder / "data", data=data, limits=server_limits(server.info), measured=measured, **options)
    finally:
        close_server()


def _count(text: str) -> int:
    """Read 17300000, 17_300_000 or 17.3e6 as a whole number of 1 or more."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(value)
