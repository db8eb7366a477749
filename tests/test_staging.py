"""Dumps verified and staged in processes of their own: the same files, the same errors, nothing left behind. No engine."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from hsnb import extract
from hsnb.checks import Asked
from hsnb.errors import DumpError, ExtractError
from hsnb.extract import staging
from hsnb.extract.faults import disk_full
from hsnb.extract.output import Output
from hsnb.extract.staging import Stagers, Task
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
    before = time.monotonic()
    process.wait(10)
    assert time.monotonic() - before < 5
