"""`hsnb training`: say how to train on a folder, and write its draft vocabulary when asked."""

from __future__ import annotations

import argparse
from typing import Any


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a folder that was extracted or exported, e.g. outputs/RUN/data")
    parser.add_argument(
        "--model", default="", metavar="DIR", help="the checkpoint's folder or demo:NAME, where the folder does not name it"
    )
    parser.add_argument("--vocab", type=int, default=0, metavar="N", help="write a draft vocabulary of the N most frequent tokens")


def run(args: argparse.Namespace) -> dict[str, Any]:
    from hsnb.trainers.source import training

    how, about, files = training(args.folder, model=args.model or None, vocab=args.vocab)
    known = {k: about[k] for k in ("boundaries", "final", "model")}
    return {"command": how.command, "notes": list(how.notes), "vocabulary": [str(f) for f in files], **known}


def text(result: dict[str, Any]) -> str:
    return "\n".join([result["command"], *(f"# {note}" for note in result["notes"]), *(f"# written: {f}" for f in result["vocabulary"])])
