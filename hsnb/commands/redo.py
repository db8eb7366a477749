"""`hsnb redo`: extract what a run's ledgers say is owed: samples that failed, and those that verify took off."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hsnb import extract
from hsnb.data import load_prepared
from hsnb.errors import ParamsError
from hsnb.paths import run_dir
from hsnb.session import close_server, deployment_of, open_servers
from hsnb.verify import redo_rows


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("params", nargs="?", default="params/demo.yaml", help="a params/*.yaml (default: %(default)s)")
    parser.add_argument("--run", default="demo", help="outputs/RUN/data is mended (default: %(default)s)")
    parser.add_argument("--server", default="", metavar="URL[,URL]", help="running servers; without it one is started and stopped again")
    parser.add_argument("--spool", default="", metavar="DIR[,DIR]", help="their spools (default: /dev/shm/hsnb/{port})")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if Path(args.params).is_dir():
        raise ParamsError(
            got=f"{args.params}, a folder",
            expected="a params/*.yaml, and the run as --run NAME",
            likely="redo asks a server, so it needs the deployment; verify takes a folder",
            next="hsnb redo params/x.yaml --run NAME",
        )
    data = load_prepared(run_dir(args.run) / "data")
    rows = redo_rows(data)
    if not rows:
        return {"ok": True, "asked": 0, "owed": {}, "folder": str(data.path)}
    p = SimpleNamespace(params=args.params, server_url=args.server, spool=args.spool, run=args.run)
    deployment = deployment_of(p)
    layout = json.loads((data.path / "hsnb.json").read_text())["layout"]
    try:
        result = extract.run(open_servers(p, deployment, prove=True), data, layout=layout, limits=deployment.extract, only=rows)
    finally:
        close_server()
    return {"ok": result.ok, "asked": len(rows), "owed": result.failed, "folder": str(data.path), **result.as_dict()}


def text(result: dict[str, Any]) -> str:
    if not result["asked"]:
        return f"{result['folder']}: nothing is owed"
    lines = [f"{result['folder']}: {result['asked'] - len(result['owed']):,} of {result['asked']:,} owed samples extracted"]
    return "\n".join(lines + [f"  still owed: row {row}: {why}" for row, why in result["owed"].items()])
