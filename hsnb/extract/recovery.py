"""What a killed writer had under way: moves that were noted are finished or forgotten, by their checksums."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from hsnb.errors import ExtractError
from hsnb.extract.output import STAGING, Output, checksum, set_aside, sync_folder
from hsnb.ledger import Ledger, files, take_lock


def recover(output: Output, ledger: Ledger) -> int:
    """Finish or forget the moves that a killed writer had noted; return how many samples this entered.

    A noted file that is at its name, or still staged, with the very checksum that was noted is the verified one.
    """
    found = []
    for entry in ledger.moves():
        if checksum(output.folder / entry.file) == entry.xxh3_128:
            sync_folder((output.folder / entry.file).parent)
            found.append(entry)
        elif checksum(output.staging / entry.file) == entry.xxh3_128:
            set_aside(output.folder, entry.file)
            output.move([entry])
            found.append(entry)
        else:
            ledger.drop_moves([entry.row])
    if found:
        ledger.enter(found)
    return len(found)


def recover_others(folder: Path, name: str, layout: str, print_: dict, overlap: tuple) -> int:
    """Settle what other, dead writers had under way; return how many samples this entered.

    Raises ExtractError when a living one has rows of ours.
    """
    shard, num_shards, only = overlap
    found = 0
    for path in files(folder):
        if path.stem == name:
            continue
        lock = take_lock(path)
        if lock is None:
            if only is None and _overlap(path.stem, shard, num_shards):
                raise ExtractError(
                    got=f"{path.stem} is being written by another process, and has rows of {name}",
                    expected="every row extracted by one writer at a time",
                    likely="two numbers of shards at the same time",
                    next="wait for it, or use one num_shards",
                )
            continue
        lock.close()
        if not (folder / STAGING / path.stem).exists():
            continue
        with contextlib.suppress(ExtractError), Ledger(path, print_) as other:  # somebody else may have taken it meanwhile
            output = Output(folder, path.stem, layout)
            found += recover(output, other)
            output.end()
    return found


def _overlap(stem: str, shard: int, num_shards: int) -> bool:
    parts = stem.split("-")
    if len(parts) != 4 or parts[0] != "shard":
        return True  # a redo may have any row
    return (int(parts[1]) - shard) % math.gcd(int(parts[3]), num_shards) == 0
