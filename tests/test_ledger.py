"""The ledger: what is entered is done, what is not entered is not, and other settings are another data set."""

import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from hsnb import ledger as module
from hsnb.errors import ExtractError
from hsnb.ledger import Entry, Ledger, home, read_failed, read_ledgers
from hsnb.tally import Tally, tally

PRINT = {"data": "abc", "boundaries": [2, 4], "final": "pre"}


def entry(row: int, attempt: int = 1, **other) -> Entry:
    made = Entry(
        row, f"hsnb-{row}", "1d5", 10, f"hidden_states/hs_{row}.safetensors", 640, "ff", "[2, 4]", "pre", "bfloat16", attempt, 0.5,
        "http://127.0.0.1:1", "2026-01-01T00:00:00",
    )  # fmt: skip
    return replace(made, **other)


@pytest.fixture
def data(tmp_path):
    (tmp_path / "ledger").mkdir()
    return tmp_path


def ledger(data, name="a", print_=PRINT) -> Ledger:
    return Ledger(data / "ledger" / f"{name}.sqlite", print_)


def test_entries_of_all_writers_are_read_together(data, tmp_path):
    for shard, rows in ((0, (0, 2)), (1, (1,))):
        with ledger(data, f"shard-{shard}") as writer:
            writer.enter(map(entry, rows))
    assert read_ledgers(data, PRINT) == {0: entry(0), 1: entry(1), 2: entry(2)}
    assert read_ledgers(tmp_path / "none", PRINT) == {}


def test_of_a_sample_that_was_done_again_the_newest_entry_counts(data):
    for name, when in (("a", "2026-03-01"), ("b", "2026-02-01"), ("c", "2026-01-01")):
        with ledger(data, name) as writer:
            writer.enter([entry(0, finished=when)])
    assert read_ledgers(data, PRINT)[0].finished == "2026-03-01"


def test_a_tally_goes_by_the_last_word_on_each_sample(data):
    assert tally(data) == Tally(0, 0, 0, 0)
    with ledger(data, "shard-0000-of-0002") as writer:
        writer.enter([entry(0), entry(2, tokens=7, bytes=500)])
        writer.fail(4, "lost", 3, "2026-01-01T00:00:00")
        writer.note_moves([entry(6)])
        assert tally(data) == Tally(samples=2, tokens=17, bytes=1140, owed=1)  # while it writes
    with ledger(data, "redo") as writer:
        writer.enter([entry(4, finished="2026-01-02T00:00:00")])  # done again
        writer.fail(2, "damaged", 1, "2026-01-02T00:00:00")  # found damaged
    assert tally(data) == Tally(samples=2, tokens=20, bytes=1280, owed=1)
    assert tally(data)[0] == len(read_ledgers(data)) and tally(data).owed == len(read_failed(data))


def test_a_tally_leaves_out_a_ledger_without_tables_and_refuses_a_damaged_one(data):
    sqlite3.connect(data / "ledger" / "b.sqlite").close()
    (data / "ledger" / "b.sqlite").touch()
    with ledger(data) as writer:
        writer.enter([entry(0)])
    assert tally(data).samples == 1
    (data / "ledger" / "b.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ExtractError, match=r"b\.sqlite: file is not a database, expected a ledger of hsnb"):
        tally(data)


def test_a_noted_move_is_not_done_until_it_is_entered(data):
    with ledger(data) as writer:
        writer.note_moves([entry(0), entry(1)])
        assert read_ledgers(data, PRINT) == {}
        writer.enter([entry(0)])
        assert writer.moves() == [entry(1)]
        writer.drop_moves([1])
        assert writer.moves() == []
    assert read_ledgers(data, PRINT) == {0: entry(0)}


def test_a_sample_that_is_done_at_last_is_owed_no_more(data):
    with ledger(data) as writer:
        writer.fail(3, "NaN in row 5", 3, "2025-12-31")
        writer.fail(4, "no dump", 3, "2025-12-31")
        writer.enter([entry(3, attempt=2)])
    assert read_failed(data) == {4: "no dump"}
    assert read_failed(data, {4}) == {}
    assert read_ledgers(data, PRINT)[3].attempt == 2
    with ledger(data, "redo") as writer:
        writer.enter([entry(4)])
    assert read_failed(data) == {}


def test_a_withdrawn_entry_is_owed_also_when_an_export_has_it_still(data):
    with ledger(data) as writer:
        writer.enter([entry(0), entry(1)])
        writer.export(data / "ledger")
        writer.fail(1, "a flipped bit", 1, "2026-01-02")
    assert read_ledgers(data, PRINT).keys() == {0}
    assert read_failed(data) == {1: "a flipped bit"}


def test_the_last_word_on_a_sample_counts_whoever_said_it(data):
    """A sample that another machine found damaged, or has done again since, with ledgers of one name on both machines."""
    with ledger(data) as writer:
        writer.enter([entry(0), entry(1), entry(2)])
    with ledger(data, "redo") as writer:
        writer.fail(1, "a flipped bit", 1, "2026-01-02")
        writer.fail(2, "truncated", 1, "2025-12-31")  # and entered since
        writer.export(data / "ledger")
    for name in ("here", "redo's sqlite file is on another machine"):
        assert read_ledgers(data, PRINT).keys() == {0, 2}, name
        assert read_failed(data) == {1: "a flipped bit"}, name
        (data / "ledger" / "redo.sqlite").unlink(missing_ok=True)
    with ledger(data, "elsewhere") as writer:
        writer.enter([entry(1, finished="2026-01-03"), entry(0, finished="2026-01-03", xxh3_128="again")])
        writer.export(data / "ledger").rename(data / "ledger" / "a.parquet")  # of the same name as the older sqlite file here
    (data / "ledger" / "elsewhere.sqlite").unlink()
    assert {r: e.finished for r, e in read_ledgers(data, PRINT).items()} == {0: "2026-01-03", 1: "2026-01-03", 2: "2026-01-01T00:00:00"}
    assert read_failed(data) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "xyz"}, "data was 'abc' and is 'xyz'"),
        ({"boundaries": [2, 5]}, r"boundaries was \[2, 4\] and is \[2, 5\]"),
        ({"extra": 1}, "extra was None and is 1"),
    ],
)
def test_other_settings_are_refused_by_name(change, words, data):
    ledger(data).close()
    ledger(data, print_={**PRINT, **change}).close()  # opening it does not make it another data set's
    with pytest.raises(ExtractError, match=words):
        read_ledgers(data, {**PRINT, **change})
    assert read_ledgers(data, PRINT) == {}


def test_the_export_holds_every_column_and_refuses_other_settings_too(data):
    with ledger(data) as writer:
        writer.enter([entry(2), entry(0)])
        path = writer.export(data / "ledger")
    table = pq.read_table(path)
    assert table.column_names == [f.name for f in module.fields(Entry)]
    assert [Entry(**row) for row in table.to_pylist()] == [entry(0), entry(2)]
    (data / "ledger" / "a.sqlite").unlink()
    assert read_ledgers(data, PRINT) == {0: entry(0), 2: entry(2)}
    with pytest.raises(ExtractError, match="data was 'abc' and is 'xyz'"):
        read_ledgers(data, {**PRINT, "data": "xyz"})


def test_an_export_of_nothing_is_an_export(data):
    with ledger(data) as writer:
        writer.export(data / "ledger")
    (data / "ledger" / "a.sqlite").unlink()
    assert read_ledgers(data, PRINT) == {}


def test_ledgers_lie_beside_the_data_unless_that_is_on_a_network(data, monkeypatch, tmp_path):
    assert home(data) == data.resolve() / "ledger"
    mount = SimpleNamespace(mountpoint=str(data.resolve()), fstype="nfs4", opts="rw")
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw"), mount])
    monkeypatch.setenv("HSNB_CACHE", str(tmp_path / "cache"))
    assert home(data).parent == tmp_path / "cache" / "ledgers"
    assert home(data) != home(data / "another")


def test_a_second_writer_is_refused(data):
    with ledger(data), pytest.raises(ExtractError, match="one writer a shard"):
        ledger(data)
    ledger(data).close()


def test_a_writer_killed_at_once_after_enter_has_entered(data):
    code = f"""
import os, sys
sys.path.insert(0, {os.getcwd()!r})
from pathlib import Path
from hsnb.ledger import Entry, Ledger
ledger = Ledger(Path({str(data)!r}) / "ledger" / "a.sqlite", {PRINT!r})
ledger.enter([{entry(7)!r}])
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert list(read_ledgers(data, PRINT)) == [7]
    ledger(data).close()  # its lock died with it


def test_a_ledger_whose_writer_was_killed_while_making_it_is_empty(data):
    (data / "ledger" / "a.sqlite").touch()
    db = sqlite3.connect(data / "ledger" / "b.sqlite")
    db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)")
    db.close()
    assert read_ledgers(data, PRINT) == {}
    with ledger(data, "b") as writer:
        writer.enter([entry(1)])
    assert list(read_ledgers(data, PRINT)) == [1]


def test_a_damaged_ledger_is_named(data):
    (data / "ledger" / "a.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ExtractError, match=r"a\.sqlite.*not a database.*move it away"):
        read_ledgers(data, PRINT)
    with pytest.raises(ExtractError, match=r"a\.sqlite.*not a database.*move it away"):
        ledger(data)


def test_a_ledger_of_another_format_is_named(data):
    db = sqlite3.connect(data / "ledger" / "a.sqlite")
    db.executescript("CREATE TABLE meta (key, value); INSERT INTO meta VALUES ('fingerprint', '{}');")
    db.close()
    with pytest.raises(ExtractError, match="format 1, expected 2"):
        read_ledgers(data, PRINT)
