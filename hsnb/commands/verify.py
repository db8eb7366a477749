"""`hsnb verify`: re-check every file of a data set, checksums included, and exit by what was found."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hsnb.data import ABOUT
from hsnb.paths import write_json
from hsnb.progress import Progress
from hsnb.verify import verify


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a data set, or the run's folder that holds it (outputs/demo)")
    parser.add_argument("--keep", action="store_true", help="only report: damaged samples stay entered and are not redone")


def run(args: argparse.Namespace) -> dict[str, Any]:
    folder = data_folder(args.folder)
    with Progress(None, unit="files", desc="verify") as shown:

        def tell(done: int, total: int) -> None:
            shown.total = total
            shown.advance(done - shown.done)

        result = verify(folder, keep=args.keep, progress=tell)
    tree = {**result.as_dict(), "text": result.text()}
    if not args.keep:
        write_json(folder / "verify.json", tree)
    return tree


def text(result: dict[str, Any]) -> str:
    return result["text"]


def data_folder(name: str) -> Path:
    """Return the data set meant by its own folder, or by the run's that holds it in data/."""
    folder = Path(name).expanduser().resolve()
    inner = folder / "data"
    return inner if not (folder / ABOUT).is_file() and (inner / ABOUT).is_file() else folder
