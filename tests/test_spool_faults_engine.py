"""A spool that fills up or cannot be written to: the client is told why, and the server lives on."""

import os
import shutil
import subprocess

import psutil
import pytest

from hsnb import extract
from hsnb.collect import collect
from hsnb.errors import CaptureError
from hsnb.params import Deployment
from hsnb.patch.armed import read_armed
from hsnb.server import Server
from tests.conftest import tiny
from tests.helpers import prompt_ids, take

pytestmark = pytest.mark.engine("faults")


@pytest.fixture
def mounted(tmp_path):
    """A spool on a file system of 300 MiB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m,mode=0700", "tmpfs", str(folder)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mounting is not allowed here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, leave: int) -> None:
    """Fill the file system but for `leave` bytes."""
    room = shutil.disk_usage(folder).free - leave
    with open(folder / "ballast", "wb") as out:
        os.posix_fallocate(out.fileno(), 0, room)


def ask(server, n: int, rid: str) -> None:
    with server.client() as client:
        assert client.generate(prompt_ids(n, 500), rid=rid).prompt_tokens == n  # answered all the same


def test_a_full_spool_and_a_limit_on_file_sizes(engine, engine_starts, mounted, tmp_path):
    engine.stop()
    deployment = Deployment.parse(tiny(spool=str(mounted)), origin="test")
    with Server.start(deployment, log_dir=tmp_path) as server:
        engine_starts.note("tiny, a spool that fills", server.sglang_version)
        fill(mounted, leave=200 * 1024)
        ask(server, 300, "hsnb-test-large")  # 300 x 4 x 64 x 4 bytes = 300 KiB
        with pytest.raises(CaptureError, match=r"OSError: \[Errno 28\] No space left on device.*the spool's file system is full"):
            collect(mounted, "hsnb-test-large")
        assert take(server, prompt_ids(20, 500)).num_tokens == 20  # the half-made file is gone, and small ones fit
        assert [p.name for p in mounted.iterdir() if p.name.endswith(".tmp")] == []
        assert read_armed(mounted)[0].counts["failed"] == 1

        (writing,) = (p for p in psutil.Process(server.armed[0].pid).children() if p.cmdline()[1:3] == ["-m", "hsnb.patch"])
        before = writing.rlimit(psutil.RLIMIT_FSIZE)
        writing.rlimit(psutil.RLIMIT_FSIZE, (60_000, before[1]))
        ask(server, 100, "hsnb-test-limit")
        with pytest.raises(CaptureError, match=r"\[Errno 27\] File too large"):
            collect(mounted, "hsnb-test-limit")
        writing.rlimit(psutil.RLIMIT_FSIZE, before)
        writing.kill()
        psutil.wait_procs([writing])
        assert take(server, prompt_ids(40, 500)).num_tokens == 40  # another one goes on
        assert take(server, prompt_ids(30, 500)).num_tokens == 30
        assert server.running()
        assert extract.SPOOL_SHARE <= 0.5  # what an extraction keeps in flight leaves room for half-made files
