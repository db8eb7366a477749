"""Dumps verified and staged in processes of their own: the same files, the same errors, nothing left behind. No engine."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from hsnb import extract
from hsnb.checks import Asked
from hsnb.errors import DumpError, ExtractError
from hsnb.extract import staging
from hsnb.extract.faults import disk_full
from hsnb.extract.output import Committer, Output
from hsnb.extract.staging import Stagers, Task
from hsnb.ledger import Entry, Ledger
from tests.stub import StubServer, make_data
from tests.test_extract import files, spooled
from tests.test_publish_moved import dumped

ROOT = Path(__file__).resolve().parents[1]


def task(path: Path, row: int = 7, n: int = 37) -> Task:
    return Task(row, path, Asked(torch.arange(n), (2, 15, 27), "pre", 48, "bfloat16"), None)


def output(folder: Path) -> Output:
    made = Output(folder, "shard-0000-of-0001", "speculators")
    made.begin(range(10))
    return made


def ours() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if any("hsnb.extract.staging" in word for word in p.cmdline())]


@pytest.fixture
def stagers(tmp_path):
    made = Stagers(output(tmp_path / "out"), processes=True)
    yield made
    made.close()
    assert ours() == []


def test_the_same_bytes_as_in_a_thread(stagers, tmp_path):
    path, _ = dumped(tmp_path / "spool")
    apart = stagers.stage(task(path))
    assert not path.exists() and len(ours()) == 1
    assert (stagers.output.staging / apart.file).stat().st_size == apart.bytes
    path, _ = dumped(tmp_path / "spool")
    here = Stagers(output(tmp_path / "other"), processes=False)
    assert here.stage(task(path)) == apart and len(ours()) == 1


def test_its_errors_arrive_whole(stagers, tmp_path):
    path, _ = dumped(tmp_path / "spool")
    with pytest.raises(DumpError, match=r"row 7: token echo is other ids, expected the ids that were sent.*Next: run the shard again"):
        stagers.stage(task(path)._replace(asked=task(path).asked.__class__(torch.arange(1, 38), (2, 15, 27), "pre", 48, "bfloat16")))
    with pytest.raises(DumpError, match="no such dump"):
        stagers.stage(task(tmp_path / "spool" / "gone.safetensors"))
    (process,) = ours()
    large, _ = dumped(tmp_path / "spool", rid="hsnb-large", n=400, dtype=torch.float32)  # to be rounded: written anew
    process.rlimit(psutil.RLIMIT_FSIZE, (20_000, -1))
    with pytest.raises(ExtractError) as caught:
        stagers.stage(task(large, n=400)._replace(asked=Asked(torch.arange(400), (2, 15, 27), "pre", 48, "float32")))
    assert "File too large" in str(caught.value.__cause__) and not disk_full(caught.value)  # what a full disk would be known by
    assert list(stagers.output.staging.rglob(".*.tmp")) == []
    process.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    assert stagers.stage(task(path)).bytes > 0 and ours() == [process]


def test_a_process_that_is_killed_is_told_and_the_next_dump_has_another(stagers, tmp_path):
    path, _ = dumped(tmp_path / "spool")
    stagers.stage(task(path))
    (process,) = ours()
    process.kill()
    path, _ = dumped(tmp_path / "spool")
    with pytest.raises(DumpError, match="row 8: the process that verified its dump ended with status -9"):
        stagers.stage(task(path, row=8))
    assert path.exists() and stagers.stage(task(path, row=8)).file.endswith("hs_8.safetensors")


def test_a_whole_shard_by_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "CORES", 1)
    data, server = make_data(tmp_path / "data", [5 + n % 7 for n in range(24)]), StubServer(tmp_path)
    result = extract.run(server, data)
    assert (result.samples, result.failed) == (24, {}) and len(files(data)) == 24 and spooled(server) == []
    assert ours() == []


def test_without_a_process_to_be_had_the_thread_does_it(stagers, tmp_path, monkeypatch):
    def refused(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(staging, "_Process", refused)
    path, _ = dumped(tmp_path / "spool")
    assert stagers.stage(task(path)).file.endswith("hs_7.safetensors") and ours() == []


@pytest.mark.parametrize("after_the_move", [False, True])
def test_a_commit_that_fails_once_is_tried_again_and_the_engine_is_not_asked_again(tmp_path, monkeypatch, after_the_move):
    """The dump itself was moved to the staging folder, or to its name already: there is none to stage again."""
    method, failed = ("enter" if after_the_move else "note_moves"), []
    real = getattr(Ledger, method)

    def hiccup(self, entries):
        if not failed:
            failed.append(1)
            raise sqlite3.OperationalError("disk I/O error")
        return real(self, entries)

    monkeypatch.setattr(Ledger, method, hiccup)
    data, server = make_data(tmp_path / "data", [5 + n % 7 for n in range(6)]), StubServer(tmp_path)
    result = extract.run(server, data)
    assert (result.samples, result.failed) == (6, {}) and failed and len(files(data)) == 6
    assert len([rid for rid in server.asked if "canary" not in rid]) == 6


def test_a_thread_that_comes_too_late_is_refused_and_not_left_waiting(tmp_path):
    with Ledger(tmp_path / "x.sqlite", {}) as ledger:
        committer = Committer(ledger, output(tmp_path / "out"))
        committer.close()
        entry = Entry(7, "hsnb-7", "0", 5, "hidden_states/hs_7.safetensors", 1, "0", "[2]", "pre", "bfloat16", 1, 0.1, "http://stub", "now")
        with pytest.raises(ExtractError, match="row 7 was verified after the run had ended"):
            committer.commit(entry)


def test_a_killed_client_leaves_no_process(tmp_path):
    code = """
import sys, time
from pathlib import Path
from hsnb.extract.staging import Stagers
from tests.test_staging import dumped, output, task
folder = Path(sys.argv[1])
stagers = Stagers(output(folder / "out"), processes=True)
stagers.stage(task(dumped(folder / "spool")[0]))
print("ready", flush=True)
time.sleep(60)
"""
    client = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert client.stdout.readline() == "ready\n"
    (process,) = psutil.Process(client.pid).children()
    client.kill()
    client.wait()
    client.stdout.close()
    process.wait(30)
