"""How far a data set is, by the ledgers of this machine: for whoever looks on while others write."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hsnb.ledger import Owed, files, reading, settle


class Tally(NamedTuple):
    """Samples published, their tokens and the bytes of their files, and samples owed."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    owed: int = 0


class _Done(NamedTuple):
    tokens: int
    bytes: int
    finished: str  # what `settle` goes by


def tally(data: Path) -> Tally:
    """Count what the ledgers of the data set in `data` say together: of a sample that several name, the last word counts.

    A writer may be at work; one that is making its tables just now counts nothing. Exports of other machines are not read.
    Raises ExtractError for a damaged ledger.
    """
    done: dict[int, _Done] = {}
    owed: dict[int, Owed] = {}
    for path in files(data):
        with reading(path) as db:
            if db is not None:
                entries = {row: _Done(*what) for row, *what in db.execute("SELECT row, tokens, bytes, finished FROM done")}
                settle(done, owed, entries, {row: Owed(*why) for row, *why in db.execute("SELECT row, error, attempt, at FROM failed")})
    return Tally(len(done), sum(d.tokens for d in done.values()), sum(d.bytes for d in done.values()), len(owed))
