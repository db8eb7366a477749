"""`hsnb export`: write a folder of training files in another trainer's layout."""

from __future__ import annotations

import argparse
from typing import Any


def add(parser: argparse.ArgumentParser) -> None:
    from hsnb.trainers import WRITTEN

    parser.add_argument("source", metavar="SRC", help="a folder of training files of any known layout, e.g. outputs/RUN/data")
    parser.add_argument("target", metavar="DST", help="where to write; a killed export goes on when it is started again")
    parser.add_argument("--layout", required=True, choices=list(WRITTEN), help="the trainer's layout")
    parser.add_argument("--boundaries", type=int, nargs="+", metavar="K", help="some of the captured boundaries (default: all)")
    parser.add_argument("--model", default="", metavar="DIR", help="the checkpoint's folder or demo:NAME, where SRC does not name it")
    parser.add_argument("--vocab", type=int, default=0, metavar="N", help="also write a draft vocabulary of the N most frequent tokens")
    parser.add_argument(
        "--from-boundaries", type=int, nargs="+", metavar="K", help="SRC's boundaries, in its columns' order, where it does not say"
    )
    parser.add_argument("--from-final", choices=["pre", "post"], help="SRC's final, where it does not say")
    parser.add_argument("--verify", action="store_true", help="read what was written before and compare checksums")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from hsnb.trainers.export import export

    done = export(
        args.source,
        args.target,
        args.layout,
        boundaries=args.boundaries,
        model=args.model or None,
        vocab=args.vocab,
        stated=(args.from_boundaries, args.from_final),
        verify=args.verify,
    )
    return done.as_dict()


def text(result: dict[str, Any]) -> str:
    said = f"boundaries {list(result['boundaries'])}, final {result['final']} the norm"
    lines = [
        f"{result['path']}: {result['samples']:,} samples, {result['tokens']:,} tokens, {result['bytes']:,} bytes, {said}",
        f"done before: {result['done_before']:,}; written again: {result['damaged']:,}",
        "",
        result["command"],
    ]
    return "\n".join(lines + [f"# {note}" for note in result["notes"]])
