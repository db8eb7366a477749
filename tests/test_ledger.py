"""The ledger: what is entered is done, what is not entered is not, and other settings are another data set."""

import sqlite3
import subprocess
import sys

import pytest

from hsnb.errors import ExtractError
from hsnb.ledger import Entry, Ledger, read_failed, read_ledgers

PRINT = {"data": "abc", "boundaries": [2, 4], "final": "pre"}


def entry(row: int, attempt: int = 1) -> Entry:
    return Entry(
        row,
        f"hsnb-{row}",
        10,
        f"hidden_states/hs_{row}.safetensors",
        640,
        "ff",
        "[2, 4]",
        "pre",
        "bfloat16",
        attempt,
        0.5,
        "2026-01-01T00:00:00",
    )


def test_entries_of_all_shards_are_read_together(tmp_path):
    for shard, rows in ((0, (0, 2)), (1, (1,))):
        with Ledger(tmp_path / f"shard-{shard}.sqlite", PRINT) as ledger:
            for row in rows:
                ledger.enter(entry(row))
    assert read_ledgers(tmp_path, PRINT) == {0: entry(0), 1: entry(1), 2: entry(2)}
    assert read_ledgers(tmp_path / "none", PRINT) == {}


def test_a_sample_that_is_done_at_last_is_owed_no_more(tmp_path):
    with Ledger(tmp_path / "a.sqlite", PRINT) as ledger:
        ledger.fail(3, "NaN in row 5", 3, "now")
        ledger.fail(4, "no dump", 3, "now")
        ledger.enter(entry(3, attempt=2))
    assert read_failed(tmp_path) == {4: "no dump"}
    assert read_ledgers(tmp_path, PRINT)[3].attempt == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "xyz"}, "data was 'abc' and is 'xyz'"),
        ({"boundaries": [2, 5]}, r"boundaries was \[2, 4\] and is \[2, 5\]"),
        ({"extra": 1}, "extra was None and is 1"),
    ],
)
def test_other_settings_are_refused_by_name(change, words, tmp_path):
    Ledger(tmp_path / "a.sqlite", PRINT).close()
    Ledger(tmp_path / "a.sqlite", {**PRINT, **change}).close()  # opening it does not make it another data set's
    with pytest.raises(ExtractError, match=words):
        read_ledgers(tmp_path, {**PRINT, **change})
    assert read_ledgers(tmp_path, PRINT) == {}


def test_a_second_writer_is_refused(tmp_path):
    with Ledger(tmp_path / "a.sqlite", PRINT), pytest.raises(ExtractError, match="one writer a shard"):
        Ledger(tmp_path / "a.sqlite", PRINT)
    Ledger(tmp_path / "a.sqlite", PRINT).close()


def test_a_writer_killed_at_once_after_enter_has_entered(tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {str(sys.path[0])!r})
from pathlib import Path
from hsnb.ledger import Entry, Ledger
ledger = Ledger(Path({str(tmp_path)!r}) / "a.sqlite", {PRINT!r})
ledger.enter(Entry(7, "hsnb-7", 10, "f", 1, "ff", "[2, 4]", "pre", "bfloat16", 1, 0.5, "t"))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert list(read_ledgers(tmp_path, PRINT)) == [7]
    Ledger(tmp_path / "a.sqlite", PRINT).close()  # its lock died with it


def test_a_damaged_ledger_is_named(tmp_path):
    (tmp_path / "a.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ExtractError, match=r"a\.sqlite.*not a database.*move it away"):
        read_ledgers(tmp_path, PRINT)
    with pytest.raises((ExtractError, sqlite3.DatabaseError)):
        Ledger(tmp_path / "a.sqlite", PRINT)
