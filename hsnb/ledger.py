"""What of a data set is done: one sqlite file a writer, read together. A sample counts when it is entered here, not when a file exists."""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from hsnb.errors import ExtractError


@dataclass(frozen=True)
class Entry:
    """One published sample. `row` is its index in the whole data set; `seconds` from request to entry; `finished` ISO 8601, UTC."""

    row: int
    request_id: str
    tokens: int
    file: str  # relative to the data set's folder
    bytes: int
    xxh3_128: str  # of the file
    boundaries: str  # JSON list
    final: str
    dtype: str
    attempt: int
    seconds: float
    finished: str


_COLUMNS = [f.name for f in fields(Entry)]
_TYPES = {"int": "INTEGER", "float": "REAL", "str": "TEXT"}
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS done ({", ".join(f"{f.name} {_TYPES[f.type]}" for f in fields(Entry))}, PRIMARY KEY (row));
CREATE TABLE IF NOT EXISTS failed (row INTEGER PRIMARY KEY, error TEXT, attempt INTEGER, at TEXT);
"""


class Ledger:
    """The writing side of one shard's ledger; a second writer of the same file is refused."""

    def __init__(self, path: Path, fingerprint: dict):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = open(path.with_suffix(".lock"), "a")  # noqa: SIM115 (held until close; the kernel frees it with the process)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ExtractError(
                got=f"{path} is being written by another process",
                expected="one writer a shard",
                likely="this shard is being extracted in another terminal or notebook",
                next="wait for it, or take another shard",
            ) from error
        self._db = sqlite3.connect(path)
        self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + _SCHEMA)
        with self._db:
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('fingerprint', ?)", (json.dumps(fingerprint),))  # the first one stays

    def enter(self, entry: Entry) -> None:
        """Enter a published sample; it is durable when this returns."""
        with self._db:
            self._db.execute(f"INSERT OR REPLACE INTO done VALUES ({','.join('?' * len(_COLUMNS))})", astuple(entry))
            self._db.execute("DELETE FROM failed WHERE row = ?", (entry.row,))

    def fail(self, row: int, error: str, attempt: int, at: str) -> None:
        """Note that a sample is owed, and why."""
        with self._db:
            self._db.execute("INSERT OR REPLACE INTO failed VALUES (?, ?, ?, ?)", (row, error, attempt, at))

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_ledgers(folder: Path, fingerprint: dict) -> dict[int, Entry]:
    """Return what all ledgers in `folder` say is done, by row, so that the number of shards may change between runs.

    Raises ExtractError when one of them was written for other data, another model or other settings, naming what changed.
    """
    done: dict[int, Entry] = {}
    for path in sorted(folder.glob("*.sqlite")):
        with _reading(path) as db:
            check_fingerprint(path, json.loads(db.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()[0]), fingerprint)
            for values in db.execute(f"SELECT {', '.join(_COLUMNS)} FROM done"):
                done[values[0]] = Entry(*values)
    return done


def read_failed(folder: Path) -> dict[int, str]:
    """Return the samples that are owed, with the reason."""
    failed: dict[int, str] = {}
    for path in sorted(folder.glob("*.sqlite")):
        with _reading(path) as db:
            failed.update(db.execute("SELECT row, error FROM failed"))
    return failed


def check_fingerprint(path: Path, before: dict, now: dict) -> None:
    """Raise ExtractError naming every item in which two fingerprints differ."""
    changed = [f"{k} was {before.get(k)!r} and is {now.get(k)!r}" for k in sorted({*before, *now}) if before.get(k) != now.get(k)]
    if changed:
        raise ExtractError(
            got=f"{path.parent.parent}: {'; '.join(changed)}",
            expected="the settings it was begun with",
            likely="the data, the model or the settings changed since; their states must not be mixed in one data set",
            next="use another run (-p run NAME), or go back to the settings before",
        )


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        db = sqlite3.connect(path)
        try:
            db.executescript(_SCHEMA)
            yield db
        finally:
            db.close()
    except sqlite3.DatabaseError as error:
        raise ExtractError(
            got=f"{path}: {error}",
            expected="a ledger of hsnb",
            likely="a file damaged by the disk, or not a ledger",
            next="move it away: its samples are then extracted again",
        ) from error
