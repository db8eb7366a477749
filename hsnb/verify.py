"""Re-check a finished data set: every entered file, its checksum and its states, and every file and sample beside."""

from __future__ import annotations

import contextlib
import html
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from hsnb.checks import Asked, dump_checks
from hsnb.data import Prepared, load_prepared
from hsnb.errors import DumpError, ExtractError
from hsnb.extract.output import ASIDE, STAGING, checksum, export
from hsnb.extract.publish import ids_hash
from hsnb.ledger import REDO, Entry, Ledger, files, home, read_failed, read_ledgers
from hsnb.storage import Store, adopt, of_data
from hsnb.trainers import layout as find_layout


@dataclass(frozen=True)
class Verified:
    """What a data set holds. `damaged`: {row: what is wrong with it}; `foreign`: files that no ledger has entered."""

    folder: Path
    samples: int  # that are to be extracted
    entered: int
    bytes: int  # read and compared
    damaged: dict[int, str] = field(default_factory=dict)
    owed: dict[int, str] = field(default_factory=dict)  # asked for and not entered, with the reason
    missing: int = 0  # never asked for: their shards were not run
    foreign: list[str] = field(default_factory=list)
    withdrawn: bool = False  # the damaged ones are owed from now on
    made: str = ""

    @property
    def ok(self) -> bool:
        """True when every sample is entered and every file is what was entered, and there is nothing else."""
        return not (self.damaged or self.owed or self.missing or self.foreign)

    def as_dict(self) -> dict:
        """Return plain values, for --json."""
        return {**asdict(self), "folder": str(self.folder), "ok": self.ok}

    def frame(self):
        """Return the table of the result: check, value, threshold, result."""
        import pandas as pd

        counts = [
            ("samples entered", self.entered, self.samples, self.entered == self.samples),
            ("damaged", len(self.damaged), 0, not self.damaged),
            ("owed", len(self.owed), 0, not self.owed),
            ("never asked for", self.missing, 0, not self.missing),
            ("files that no ledger has", len(self.foreign), 0, not self.foreign),
        ]
        rows = [(name, f"{n:,}", f"{bar:,}", "pass" if ok else "FAIL") for name, n, bar, ok in counts]
        return pd.DataFrame([*rows, ("bytes compared", f"{self.bytes:,}", "", "")], columns=["check", "value", "threshold", "result"])

    def text(self) -> str:
        """Return it in lines."""
        lines = [f"{self.folder}: {self.entered:,} of {self.samples:,} samples entered, {self.bytes:,} bytes compared"]
        lines += [f"  damaged: row {row}: {why}" for row, why in self.damaged.items()]
        lines += [f"  owed: row {row}: {why}" for row, why in self.owed.items() if row not in self.damaged]
        lines += [f"  no ledger has {name}" for name in self.foreign]
        lines += [f"  {self.missing:,} samples were never asked for"] * bool(self.missing)
        lines += ["  the damaged ones are owed now: hsnb redo asks for them again"] * self.withdrawn
        return "\n".join([*lines, "whole" if self.ok else "NOT whole"])

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self.folder))}</p>" + self.frame().to_html(index=False, border=0)


def verify(folder: Path, *, keep: bool = False, progress: Callable[[int, int], None] | None = None) -> Verified:
    """Read every entered file of the data set in `folder` and compare it with its entry, the data and what states can be.

    A damaged sample's entry is withdrawn, so that it is owed, unless `keep`. `progress(done, all)` after each file.
    Raises DataError for a folder that hsnb did not prepare, ExtractError for one where nothing was extracted, or with another run's ledger.
    """
    data = load_prepared(folder)
    about = about_states(data)
    table, store = data.dataset(), of_data(data.path, about)
    if store is not None:
        store.fetch_ledgers()
    entries = read_ledgers(data.path, about["fingerprint"])

    def check(entry: Entry) -> tuple[int, str]:
        token_ids = table[entry.row]["input_ids"]
        if store is None or entry.file not in store.sizes() or (data.path / entry.file).exists():
            return entry.row, damage(data.path, entry, about, token_ids)
        with store.local(entry.file) as copy:
            return entry.row, damage(data.path, entry, about, token_ids, copy)

    damaged = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 2)) as pool:
        for n, (row, why) in enumerate(pool.map(check, entries.values()), 1):
            if why:
                damaged[row] = why
            if progress:
                progress(n, len(entries))
    ok = {int(r) for r in data.ok.nonzero()[0]}
    withdrawn = bool(damaged) and not keep and withdraw(data, about["fingerprint"], damaged, store)
    if withdrawn and store is not None:  # after the ledgers that say so: whoever goes on elsewhere owes them too
        for row in damaged:
            store.remove(entries[row].file)
    owed = read_failed(data.path, entries.keys() - damaged.keys()) | damaged
    return Verified(
        data.path,
        len(ok),
        len(entries) - len(damaged),
        sum(e.bytes for r, e in entries.items() if r not in damaged),
        damaged,
        owed,
        len(ok - entries.keys() - owed.keys()),
        foreign_files(data.path, about["layout"], entries, store),
        withdrawn,
        datetime.now(UTC).isoformat(timespec="seconds"),
    )


def damage(folder: Path, entry: Entry, about: dict, token_ids: torch.Tensor, copy: Path | None = None) -> str:
    """Return what is wrong with an entered sample, "" when nothing is: all that differs, the most telling first.

    `copy`: of a file that is at the store.
    """
    path = copy or folder / entry.file
    if not path.exists():
        return "its file is gone"
    found = []
    try:
        dump = find_layout(about["layout"]).open(path, tuple(about["boundaries"]))
        asked = Asked(token_ids, tuple(about["boundaries"]), about["final"], about["hidden_size"], entry.dtype)
        found += [f"{c.name} is {c.value}, expected {c.threshold}" for c in dump_checks(dump, asked) if not c.ok]
    except DumpError as error:
        found.append(f"{error.got} ({error.likely})")
    size = path.stat().st_size
    if size != entry.bytes:
        found.append(f"{size:,} bytes, {entry.bytes:,} were entered")
    elif (now := checksum(path)) != entry.xxh3_128:
        found.append(f"its checksum is {now}, {entry.xxh3_128} was entered" + ("" if found else ": a flipped bit, or another run's file"))
    if ids_hash(token_ids) != entry.ids_hash:
        found.append("the data set's row has other token ids than were entered")
    return "; ".join(found)


def foreign_files(folder: Path, layout: str, entries: dict[int, Entry], store: Store | None = None) -> list[str]:
    """Return the files in the folders of states that no ledger has entered, and what killed writers left; relative, sorted.

    Those at the store have its URL before their name.
    """
    known = {e.file for e in entries.values()}
    places = {str(Path(find_layout(layout).sample_file(0)).parent), *(str(Path(f).parent) for f in known)}
    found = [str(p.relative_to(folder)) for place in places for p in (folder / place).rglob("*") if p.is_file()]
    found += [str(p.relative_to(folder)) for p in (folder / STAGING).rglob("*") if p.is_file()]
    found = sorted({f for f in found if f not in known and not f.startswith(f"{ASIDE}/")})
    there = sorted(f for f in (store.sizes() if store else ()) if f not in known and any(Path(f).is_relative_to(p) for p in places))
    return found + [f"{store.url}/{f}" for f in there]


def withdraw(data: Prepared, fingerprint: dict, damaged: dict[int, str], store: Store | None = None) -> bool:
    """Let damaged samples be owed: taken off the ledgers that are here, and where those of others have them, said in redo's.

    Return whether all are: not while a redo runs. A running writer's ledger is left alone, what redo's says later counts.
    """
    changed, said = [], read_ledgers(data.path)
    at = max([datetime.now(UTC).isoformat(timespec="milliseconds"), *(said[r].finished for r in damaged if r in said)])  # clocks differ

    def owe(path: Path, rows: Callable[[Ledger], set[int]]) -> None:
        with Ledger(path, fingerprint) as ledger:
            adopt(ledger, data.path)
            if mine := rows(ledger) & damaged.keys():
                for row in sorted(mine):
                    ledger.fail(row, damaged[row], 1, at)
                changed.append(export(ledger, data.path).stem)

    for path in files(data.path):
        with contextlib.suppress(ExtractError, OSError):
            owe(path, lambda ledger: set(ledger.done()))
    try:
        if left := set(read_ledgers(data.path)) & damaged.keys():
            owe(home(data.path) / f"{REDO}.sqlite", lambda _: left)
    except (ExtractError, OSError):
        return False
    for name in changed if store else ():
        store.send_ledger(name)
    return True


def about_states(data: Prepared) -> dict:
    """Read hsnb.json of an extraction. Raises ExtractError when there is none."""
    try:
        return json.loads((data.path / "hsnb.json").read_text())
    except (OSError, ValueError) as error:
        raise ExtractError(
            got=f"{data.path}/hsnb.json: {error}",
            expected="what an extraction writes first",
            likely="nothing was extracted here yet",
            next="hsnb run 03_extract",
        ) from error


def redo_rows(data: Prepared) -> list[int]:
    """Return the rows that are owed: asked for and not entered, or withdrawn, on any machine; those of shards never run are not."""
    if store := of_data(data.path, about_states(data)):
        store.fetch_ledgers()
    return sorted(r for r in read_failed(data.path) if data.ok[r])
