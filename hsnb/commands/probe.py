"""`hsnb probe`: probe a running server, or one started for the purpose, and exit by the verdict."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from hsnb import probe
from hsnb.session import close_server, deployment_of, open_server


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("params", nargs="?", default="params/demo.yaml", help="a params/*.yaml (default: %(default)s)")
    parser.add_argument("--server", default="", metavar="URL", help="a running server; without it one is started and stopped again")
    parser.add_argument("--spool", default="", metavar="DIR", help="the server's spool (default: /dev/shm/hsnb/{port})")
    parser.add_argument("--run", default="demo", help="where the server's log goes: outputs/RUN (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="ask each prompt N times")


def run(args: argparse.Namespace) -> dict[str, Any]:
    p = SimpleNamespace(params=args.params, server_url=args.server, spool=args.spool, run=args.run)
    try:
        result = probe.run(open_server(p, deployment_of(p)), repeat=args.repeat)
    finally:
        close_server()
    return {"ok": result.ok, "text": result.text(), **result.as_dict()}


def text(result: dict[str, Any]) -> str:
    return result["text"]
