"""What of a data set is done: one sqlite file a writer, on a local disk, read together.

A sample counts when it is entered here, not when a file exists. Its file is staged whole first, then the move to its name is
noted (`note_moves`), made, and entered (`enter`): whoever finds a noted move of a killed writer can tell by the checksum
whether it was made. Each writer's entries are also exported as parquet beside the data, for readers on other machines.
Where writers differ about a sample, what was said last counts: it is entered, or it is owed.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import threading
import uuid
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import xxhash

from hsnb.errors import ExtractError
from hsnb.paths import cache_dir, on_network

FORMAT = 2
BATCH = 2000  # rows that an export holds at a time
FOLDER = "ledger"  # in the data set's folder
REDO = "redo"  # the name of the ledger of what is done again, and of what was found damaged in another writer's


@dataclass(frozen=True, slots=True)
class Entry:
    """One published sample. `row` is its index in the whole data set; `seconds` from request to file; `finished` ISO 8601, UTC."""

    row: int
    request_id: str
    ids_hash: str  # xxh3-128 of the token ids as int64
    tokens: int
    file: str  # relative to the data set's folder
    bytes: int
    xxh3_128: str  # of the file
    boundaries: str  # JSON list
    final: str  # pre or post the norm
    dtype: str
    attempt: int
    seconds: float
    server: str
    finished: str


class Owed(NamedTuple):
    """Why a sample is owed: in words, after how many tries, and since when (ISO 8601, UTC)."""

    error: str
    attempt: int
    at: str


_COLUMNS = [f.name for f in fields(Entry)]
_TYPES = {"int": "INTEGER", "float": "REAL", "str": "TEXT"}
_ROW = f"({', '.join(f'{f.name} {_TYPES[f.type]}' for f in fields(Entry))}, PRIMARY KEY (row))"
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS done {_ROW};
CREATE TABLE IF NOT EXISTS moving {_ROW};
CREATE TABLE IF NOT EXISTS failed (row INTEGER PRIMARY KEY, error TEXT, attempt INTEGER, at TEXT);
PRAGMA user_version = {FORMAT};
"""
_DONE = f"SELECT {', '.join(_COLUMNS)} FROM done"
_OWED = "SELECT row, error, attempt, at FROM failed"
_INSERT = f"VALUES ({','.join('?' * len(_COLUMNS))})"


def home(folder: Path) -> Path:
    """Return where the ledgers of the data set in `folder` lie: beside it, or in the cache when it is on a network file system.

    sqlite's locks and its shared memory do not work over a network; the parquet exports are always in `folder`/ledger.
    """
    folder = folder.resolve()
    if on_network(folder):
        return cache_dir() / "ledgers" / xxhash.xxh3_64_hexdigest(str(folder).encode())
    return folder / FOLDER


class Ledger:
    """The writing side of one writer's ledger; a second writer of the same file is refused. Its methods may be called by any thread."""

    def __init__(self, path: Path, fingerprint: dict):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = take_lock(path)
        if self._lock is None:
            raise ExtractError(
                got=f"{path} is being written by another process",
                expected="one writer a shard",
                likely="this shard is being extracted in another terminal or notebook",
                next="wait for it, or take another shard",
            )
        self._mutex = threading.Lock()
        with _named(path):
            self._db = sqlite3.connect(path, check_same_thread=False)
            _check_format(path, self._db)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + _SCHEMA)
            with self._db:
                first = [("fingerprint", json.dumps(fingerprint)), ("writer", uuid.uuid4().hex[:8])]
                self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", first)  # what is there stays
            self.writer = self._db.execute("SELECT value FROM meta WHERE key = 'writer'").fetchone()[0]

    def note_moves(self, entries: Iterable[Entry]) -> None:
        """Note files that are staged whole and are about to be moved to their names; durable when this returns."""
        with self._mutex, self._db:
            self._db.executemany(f"INSERT OR REPLACE INTO moving {_INSERT}", [astuple(e) for e in entries])

    def moves(self) -> list[Entry]:
        """Return the moves that were noted and not entered: those of a killed writer."""
        return [Entry(*values) for values in self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM moving")]

    def enter(self, entries: Iterable[Entry]) -> None:
        """Enter published samples in one transaction; durable when this returns."""
        entries = list(entries)
        rows = [(e.row,) for e in entries]
        with self._mutex, self._db:
            self._db.executemany(f"INSERT OR REPLACE INTO done {_INSERT}", [astuple(e) for e in entries])
            self._db.executemany("DELETE FROM moving WHERE row = ?", rows)
            self._db.executemany("DELETE FROM failed WHERE row = ?", rows)

    def drop_moves(self, rows: Iterable[int]) -> None:
        """Forget moves that were not made."""
        with self._mutex, self._db:
            self._db.executemany("DELETE FROM moving WHERE row = ?", [(r,) for r in rows])

    def fail(self, row: int, error: str, attempt: int, at: str) -> None:
        """Note that a sample is owed, and why; an entry of it is withdrawn."""
        with self._mutex, self._db:
            self._db.execute("DELETE FROM done WHERE row = ?", (row,))
            self._db.execute("INSERT OR REPLACE INTO failed VALUES (?, ?, ?, ?)", (row, error, attempt, at))

    def done(self) -> dict[int, Entry]:
        """Return this writer's own entries."""
        return {values[0]: Entry(*values) for values in self._db.execute(_DONE)}

    def failed(self) -> dict[int, Owed]:
        """Return what this writer owes."""
        return {row: Owed(*why) for row, *why in self._db.execute(_OWED)}

    def export(self, folder: Path) -> Path:
        """Write the entries as `folder`/{name}.parquet, fingerprint and owed samples in its metadata."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        kinds = {"int": pa.int64(), "float": pa.float64(), "str": pa.string()}
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{self.path.stem}.parquet"
        temporary = target.with_name(f".{target.name}.tmp")  # one writer: the lock is held
        with self._mutex:
            failed = json.dumps([[row, *why] for row, why in self.failed().items()])
            meta = dict(self._db.execute("SELECT * FROM meta")) | {"failed": failed}
            schema = pa.schema([(f.name, kinds[f.type]) for f in fields(Entry)], metadata=meta)
            rows = self._db.execute(f"{_DONE} ORDER BY row")
            with pq.ParquetWriter(temporary, schema) as file:
                while part := rows.fetchmany(BATCH):
                    file.write_table(pa.table(list(zip(*part, strict=True)), schema=schema))
            temporary.replace(target)  # in the lock: the run's watch and its uploader both export
        return target

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def take_lock(path: Path):
    """Return the open lock file of the ledger at `path`, None when another writer holds it. The kernel frees it with the process."""
    lock = open(path.with_suffix(".lock"), "a")  # noqa: SIM115 (held until its owner closes it)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def read_ledgers(data: Path, fingerprint: dict | None = None) -> dict[int, Entry]:
    """Return what is done, by row, by all ledgers of the data set. Raises ExtractError naming what is not `fingerprint`'s in one of them."""
    return _standing(data, fingerprint)[0]


def read_failed(data: Path, done: Container[int] = ()) -> dict[int, str]:
    """Return the samples that are owed, with the reason, without those that are `done` by what the caller knows."""
    return {row: why.error for row, why in _standing(data)[1].items() if row not in done}


def settle(done: dict[int, Entry], owed: dict[int, Owed], entries: dict[int, Entry], failed: dict[int, Owed]) -> None:
    """Bring `done` and `owed` up to date with what one more writer says: the last word on a sample counts, "owed" among equals."""
    for row, entry in entries.items():
        if (row not in done or entry.finished >= done[row].finished) and (row not in owed or entry.finished > owed[row].at):
            done[row] = entry
            owed.pop(row, None)
    for row, why in failed.items():
        if (row not in done or why.at >= done[row].finished) and (row not in owed or why.at >= owed[row].at):
            owed[row] = why
            done.pop(row, None)


def _standing(data: Path, fingerprint: dict | None = None) -> tuple[dict[int, Entry], dict[int, Owed]]:
    """Return what is done and what is owed by all ledgers together."""
    done: dict[int, Entry] = {}
    owed: dict[int, Owed] = {}
    for before, entries, failed in _read_all(data):
        if fingerprint is not None:
            check_fingerprint(data, before, fingerprint)
        settle(done, owed, entries, failed)
    return done, owed


def files(data: Path) -> list[Path]:
    """Return the sqlite files of the data set in `data`."""
    return sorted(home(data).glob("*.sqlite"))


def check_fingerprint(data: Path, before: dict, now: dict) -> None:
    """Raise ExtractError naming every item in which two fingerprints differ."""
    changed = [f"{k} was {before.get(k)!r} and is {now.get(k)!r}" for k in sorted({*before, *now}) if before.get(k) != now.get(k)]
    if changed:
        raise ExtractError(
            got=f"{data}: {'; '.join(changed)}",
            expected="the settings it was begun with",
            likely="the data, the model or the settings changed since; their states must not be mixed in one data set",
            next="use another run (-p run NAME), or go back to the settings before",
        )


def _read_all(data: Path) -> Iterator[tuple[dict, dict[int, Entry], dict[int, Owed]]]:
    """Yield (fingerprint, entries, owed) of every export and sqlite file; of one name either may be the newer, made on another machine."""
    for path in sorted((data / FOLDER).glob("*.parquet")):
        yield read_export(path)
    for path in files(data):
        with reading(path) as db:
            if db is not None:
                before = db.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()[0]
                yield json.loads(before), {v[0]: Entry(*v) for v in db.execute(_DONE)}, {r: Owed(*w) for r, *w in db.execute(_OWED)}


def read_export(path: Path) -> tuple[dict, dict[int, Entry], dict[int, Owed]]:
    """Return (fingerprint, entries, owed) of a parquet export. Raises ExtractError for a damaged one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        fingerprint = json.loads(table.schema.metadata[b"fingerprint"])
        entries = {row["row"]: Entry(**row) for row in table.select(_COLUMNS).to_pylist()}
        failed = {row: Owed(*why) for row, *why in json.loads(table.schema.metadata.get(b"failed", b"[]"))}
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    return fingerprint, entries, failed


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise _damaged(path, error) from error


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection | None]:
    """Yield a connection to read by; None when its writer is making the tables just now, or was killed while it did."""
    with _named(path):
        db = sqlite3.connect(path)
        try:
            _check_format(path, db)
            made = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'failed'").fetchone()[0]
            yield db if made and db.execute("SELECT count(*) FROM meta WHERE key = 'fingerprint'").fetchone()[0] else None
        finally:
            db.close()


def _check_format(path: Path, db: sqlite3.Connection) -> None:
    found = db.execute("PRAGMA user_version").fetchone()[0]
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if found not in (0, FORMAT) or (tables and found == 0 and db.execute("SELECT count(*) FROM meta").fetchone()[0]):
        raise _damaged(path, f"format {found or 1}, expected {FORMAT}")


def _damaged(path: Path, why: object) -> ExtractError:
    return ExtractError(
        got=f"{path}: {why}",
        expected="a ledger of hsnb",
        likely="a file damaged by the disk, of another version of hsnb, or not a ledger",
        next="move it away: its samples are then extracted again",
    )
