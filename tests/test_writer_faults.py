"""What fails in the writer must be heard by the client, and must stop nobody else. No engine."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from hsnb.collect import collect
from hsnb.dumps import list_dumps
from hsnb.errors import CaptureError
from hsnb.patch import ring as rings
from hsnb.patch.armed import Armed, ArmedFile, read_armed
from hsnb.patch.batch import States
from hsnb.patch.ring import Ring
from hsnb.patch.scribe import Scribe
from hsnb.patch.spool import SafetensorsRequest, file_stem
from hsnb.patch.writer import Writer
from tests.test_modes import req, said
from tests.test_writer import assert_right, closed, inside, made, run  # noqa: F401


def test_a_disk_that_hangs_is_told_and_does_not_hang_the_model(tmp_path, monkeypatch):
    """The ring is full and nothing comes back: the requests of that batch fail, the next ones at once, and those after the hang are whole."""
    monkeypatch.setattr(rings, "PATIENCE_S", 0.2)
    capture, hang = inside(tmp_path, monkeypatch), threading.Event()
    put = Scribe.put
    monkeypatch.setattr(Scribe, "put", lambda *args: (hang.wait(60), put(*args)))
    for n in range(12):
        run(capture, (req(f"hsnb-{n}", 160), 0, 160))
    counts, failures = said(capture)
    told = [f for f in failures if "TimeoutError: the ring of 1 MiB is full and nothing was written for 0.2 s" in f]
    assert len(told) == counts["failed"] == 4  # eight pieces of 127 KiB fit into it
    monkeypatch.setattr(rings, "PATIENCE_S", 15)
    before = time.monotonic()
    run(capture, (req("hsnb-again", 160), 0, 160))
    assert time.monotonic() - before < 10 and said(capture)[0]["failed"] == 5, "every batch waits anew for a disk that hangs"
    hang.set()
    capture.writer.settle()
    run(capture, (req("hsnb-after", 160), 0, 160))
    capture.writer.settle()
    assert said(capture)[0] == {"captured": 9, "failed": 5} and list(tmp_path.glob(".*.tmp")) == []
    assert_right(tmp_path, "hsnb-after", 160)


def test_a_copy_that_fails_is_told_and_gives_its_part_of_the_ring_back(tmp_path, monkeypatch):
    capture = made(tmp_path, monkeypatch)
    copy, calls = capture.writer._copy, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: an illegal memory access")
        return copy(*args)

    monkeypatch.setattr(capture.writer, "_copy", failing)
    run(capture, (req("hsnb-a", 400), 0, 400), (req("hsnb-b", 9), 0, 9))  # 337 rows a piece: the second one fails
    capture.writer.settle()
    counts, failures = said(capture)
    assert counts == {"failed": 2} and all("RuntimeError: CUDA error" in f for f in failures)
    assert not capture.writer.ring._slots and capture.open == {} and list(tmp_path.glob(".*.tmp")) == []
    run(capture, (req("hsnb-c", 400), 0, 400))
    capture.writer.settle()
    assert_right(tmp_path, "hsnb-c", 400)


def test_a_process_that_cannot_be_started_is_told_and_tried_again(tmp_path, monkeypatch):
    capture, popen = made(tmp_path, monkeypatch), subprocess.Popen

    def refused(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    run(capture, (req("hsnb-a", 5), 0, 5))
    assert said(capture) == ({"failed": 1}, ["hsnb-a: BlockingIOError: [Errno 11] Resource temporarily unavailable"])
    monkeypatch.setattr(subprocess, "Popen", popen)
    run(capture, (req("hsnb-b", 5), 0, 5))
    capture.writer.settle()
    assert said(capture)[0] == {"failed": 1, "captured": 1} and not capture.writer.ring._slots
    assert_right(tmp_path, "hsnb-b", 5)


def test_a_process_that_ends_takes_only_what_it_had_with_it_and_another_goes_on(tmp_path, monkeypatch):
    """Killed while it is stopped: a prompt of two chunks, and one that was whole in the ring."""
    capture = made(tmp_path, monkeypatch)
    run(capture, (req("hsnb-before", 5), 0, 5))
    capture.writer.settle()
    (first,) = children()
    long = req("hsnb-long", 60)
    run(capture, (long, 0, 30))
    capture.writer.settle()
    first.suspend()
    run(capture, (req("hsnb-a", 20), 0, 20))
    assert len(list(tmp_path.glob(f".*.{first.pid}.*"))) == 1
    first.kill()
    capture.writer.settle()
    counts, failures = said(capture)
    assert counts == {"captured": 1, "failed": 2} and list(tmp_path.glob(".*.tmp")) == [] and not capture.writer.ring._slots
    why = "RuntimeError: the process that writes dumps ended: the next prompt starts another (its status: -9)"
    assert sorted(failures) == [f"hsnb-a: {why}", f"hsnb-long: {why}"]
    run(capture, (long, 30, 60), (req("hsnb-after", 40), 0, 40))
    capture.writer.settle()
    assert said(capture)[0] == {"captured": 2, "failed": 2} and list(tmp_path.glob(".*.tmp")) == []
    assert_right(tmp_path, "hsnb-after", 40)
    (second,) = children()
    assert second.pid != first.pid


def test_a_process_that_is_stopped_is_felt_as_a_disk_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(rings, "PATIENCE_S", 0.3)
    capture = made(tmp_path, monkeypatch)
    run(capture, (req("hsnb-before", 5), 0, 5))
    capture.writer.settle()
    (process,) = children()
    process.suspend()
    for n in range(9):
        run(capture, (req(f"hsnb-{n}", 160), 0, 160))
    assert said(capture)[1] == ["hsnb-8: TimeoutError: the ring of 1 MiB is full and nothing was written for 0.3 s"]
    process.resume()
    capture.writer.settle()
    assert said(capture)[0] == {"captured": 9, "failed": 1}
    for n in range(8):
        assert_right(tmp_path, f"hsnb-{n}", 160)


def test_real_faults_of_the_disk_reach_the_client_from_the_process(tmp_path, monkeypatch):
    """A limit on file sizes, a name that is taken by a folder, a spool that is gone."""
    capture = made(tmp_path, monkeypatch)
    run(capture, (req("hsnb-before", 5), 0, 5))
    capture.writer.settle()
    (process,) = children()
    process.rlimit(psutil.RLIMIT_FSIZE, (60_000, -1))
    run(capture, (req("hsnb-large", 500), 0, 500), (req("hsnb-small", 20), 0, 20))
    capture.writer.settle()
    process.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    taken = tmp_path / f"{file_stem('hsnb-taken')}.safetensors"
    (taken / "x").mkdir(parents=True)
    run(capture, (req("hsnb-taken", 5), 0, 5))
    capture.writer.settle()
    counts, failures = said(capture)
    assert counts == {"captured": 2, "failed": 2} and list(tmp_path.glob(".*.tmp")) == []
    assert failures[0] == "hsnb-large: OSError: [Errno 27] File too large" and "hsnb-taken: IsADirectoryError" in failures[1]
    assert_right(tmp_path, "hsnb-small", 20)
    shutil.rmtree(tmp_path)
    run(capture, (req("hsnb-gone", 5), 0, 5))
    capture.writer.settle()
    assert [f["error"] for f in capture.armed.armed.failures][-1].startswith("FileNotFoundError: [Errno 2] No such file")
    tmp_path.mkdir()


def test_the_process_ends_with_its_scheduler_however_that_ends(tmp_path):
    """Killed in the middle of a prompt: nothing runs on, and what was begun is removed."""
    code = """
import sys, time
from pathlib import Path
import pytest
from tests.test_writer import made, req, run
with pytest.MonkeyPatch.context() as patch:
    capture = made(Path(sys.argv[1]), patch)
    run(capture, (req("hsnb-a", 5), 0, 5), (req("hsnb-b", 60), 0, 30))
    capture.writer.settle()
    print("ready", flush=True)
    time.sleep(60)
"""
    scheduler = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert scheduler.stdout.readline() == "ready\n"
    (process,) = psutil.Process(scheduler.pid).children()
    assert process.cmdline()[1:3] == ["-m", "hsnb.patch"] and len(list(tmp_path.glob(".*.tmp"))) == 1
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)  # as a terminal sends it to a whole group: the scheduler may still have rows for it
    time.sleep(0.2)
    assert process.is_running()
    scheduler.kill()
    scheduler.wait()
    scheduler.stdout.close()
    process.wait(10)
    assert list(tmp_path.glob(".*.tmp")) == [] and len(list_dumps(tmp_path)) == 1


def test_rows_that_come_while_the_end_of_the_process_is_still_being_told_cost_no_part_of_the_ring(tmp_path, monkeypatch):
    """A chunk of a prompt that is lost already, and not yet known to be: its piece has no user."""
    capture, go = made(tmp_path, monkeypatch), threading.Event()
    failed = capture.writer.failed
    capture.writer.failed = lambda *args: (go.wait(10), failed(*args))
    long = req("hsnb-long", 90)
    run(capture, (long, 0, 30))
    capture.writer.settle()
    (first,) = children()
    first.kill()
    until = time.monotonic() + 10
    while not capture.writer._process.dead and time.monotonic() < until:
        time.sleep(0.01)
    run(capture, (long, 30, 60))
    assert [p for p in children() if p.is_running()], "another one was started for it"
    go.set()
    capture.writer.settle()
    for n in range(30):  # more than the ring holds
        run(capture, (req(f"hsnb-{n}", 160), 0, 160))
    capture.writer.settle()
    counts, failures = said(capture)
    assert counts.pop("ring_full_ms", 0) >= 0 and counts == {"captured": 30, "failed": 1} and failures[0].startswith("hsnb-long: ")
    assert not capture.writer.ring._slots


def test_an_armed_file_that_cannot_be_written_is_nobodys_end(tmp_path, monkeypatch):
    """Not the model's, whose answer is as ever, and not the threads': what comes after it is captured and told."""
    capture = made(tmp_path, monkeypatch)
    run(capture, (req("hsnb-before", 5), 0, 5))
    capture.writer.settle()
    update = capture.armed.update
    capture.armed.update = lambda: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    taken = tmp_path / f"{file_stem('hsnb-taken')}.safetensors"
    (taken / "x").mkdir(parents=True)
    result = run(capture, (req("hsnb-taken", 5), 0, 5), (req("other", 3), 0, 3))
    assert result[:5, 0].tolist() == [11.0, 12.0, 13.0, 14.0, 15.0]
    capture.writer.settle()
    capture.armed.update = update
    run(capture, (req("hsnb-after", 5), 0, 5))
    capture.writer.settle()
    assert_right(tmp_path, "hsnb-after", 5)
    assert said(capture)[0]["captured"] == 2 and len(children()) == 1 and not capture.writer.ring._slots


def test_as_many_failures_are_kept_as_a_client_has_in_flight(tmp_path):
    file = ArmedFile(tmp_path, Armed(state="armed"))
    ids = [f"hsnb-shard-0004-of-0016-0a1b2c3d-{n}-1" for n in range(256)]
    for rid in ids:
        file.fail(rid, "OSError: [Errno 28] No space left on device")
    file.fail("hsnb-\ud800", "a name that is no text")  # as JSON may have it
    assert [f["request_id"] for f in read_armed(tmp_path)[0].failures] == [*ids, "hsnb-\ud800"]
    assert len(file_stem("hsnb-\ud800")) == 32


def children() -> list[psutil.Process]:
    """Return the writing processes of this one."""
    return [p for p in psutil.Process().children() if p.cmdline()[1:3] == ["-m", "hsnb.patch"]]


def test_a_disk_that_takes_neither_rows_nor_a_removal_is_told(tmp_path, monkeypatch):
    def dead(*_):
        raise OSError(30, "Read-only file system")

    capture = inside(tmp_path, monkeypatch)
    monkeypatch.setattr(SafetensorsRequest, "put", dead)
    monkeypatch.setattr(SafetensorsRequest, "discard", dead)
    run(capture, (req("hsnb-a", 5), 0, 5))
    capture.writer.settle()
    assert said(capture) == ({"failed": 1}, ["hsnb-a: OSError: [Errno 30] Read-only file system"])


def test_the_error_of_an_attempt_that_was_given_up_is_not_told_of_the_next_one(tmp_path, monkeypatch):
    """A prompt is retracted between its chunks while the disk fails under its first rows: its second try is whole, and is no failure."""
    capture, begun, go = inside(tmp_path, monkeypatch), threading.Event(), threading.Event()
    put = Scribe.put

    def first_fails(self, request, part):
        if (part.start, part.n) == (0, 30):
            begun.set()
            go.wait(5)
            raise OSError(5, "Input/output error")
        put(self, request, part)

    monkeypatch.setattr(Scribe, "put", first_fails)
    one = req("hsnb-a", 90)
    run(capture, (one, 0, 30))
    assert begun.wait(5)
    run(capture, (one, 0, 60))
    go.set()
    run(capture, (one, 60, 90))
    capture.writer.settle()
    assert said(capture) == ({"captured": 1}, []) and list(tmp_path.glob(".*.tmp")) == []
    assert_right(tmp_path, "hsnb-a", 90)


def test_a_file_that_cannot_be_closed_never_gets_its_name(tmp_path, monkeypatch):
    """Network file systems tell of a write that failed when the file is closed."""
    capture, close = inside(tmp_path, monkeypatch), os.close

    def refusing(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if path.endswith(".tmp"):
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", refusing)
    run(capture, (req("hsnb-a", 5), 0, 5))
    capture.writer.settle()
    counts, failures = said(capture)
    assert counts == {"failed": 1} and "Disk quota exceeded" in failures[0]
    assert list_dumps(tmp_path) == [] and list(tmp_path.glob(".*.tmp")) == []


def test_the_largest_piece_of_any_width_fits_the_ring():
    ring = Ring(1 << 16)
    writer = Writer(Path(), ring, None, layout="safetensors", meta={}, failed=None)
    for width in range(1, 200):
        rows = writer.rows_at_once(2 * width)
        assert -(-rows * width * 2 // 8) * 8 + 8 * rows <= ring.largest, width


class Clock:
    """The client's clock, in place of the machine's, which may stand still for a second: a look takes 0.1 s, and `each` is called after it."""

    def __init__(self, each):
        self.now, self.each = 1e9, each

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, _: float) -> None:
        self.now += 0.1
        self.each()


def test_the_client_waits_for_a_long_dump_that_is_still_written_and_not_for_one_that_stands_still(tmp_path, monkeypatch):
    """One file for longer than the timeout: no other is published meanwhile. A piece is written every 0.8 s of the client's clock."""
    capture, put = inside(tmp_path, monkeypatch, threads=1), Scribe.put
    begun, go, done, pieces = (*(threading.Semaphore(0) for _ in range(3)), iter(range(3)))

    def touch():
        (path,) = tmp_path.glob(".*.tmp")
        os.utime(path, (clock.now, clock.now))

    def stepped(*args):
        touch()
        begun.release()
        go.acquire(timeout=60)
        put(*args)
        touch()
        done.release()

    def each():
        if round((clock.now - 1e9) / 0.1) % 8 == 0 and (piece := next(pieces, None)) is not None:
            go.release()
            assert done.acquire(timeout=60)
            if piece == 2:
                capture.writer.settle()

    clock = Clock(each)
    monkeypatch.setattr("hsnb.collect.time", clock)
    monkeypatch.setattr(Scribe, "put", stepped)
    run(capture, (req("hsnb-a", 1000), 0, 1000))  # three pieces
    assert collect(tmp_path, "hsnb-a", timeout_s=1.0).suffix == ".safetensors"
    assert clock.now - 1e9 == pytest.approx(3 * 0.8)
    assert_right(tmp_path, "hsnb-a", 1000)
    while begun.acquire(blocking=False):
        pass
    run(capture, (req("hsnb-b", 5), 0, 5))
    assert begun.acquire(timeout=60)
    before = clock.now
    with pytest.raises(CaptureError, match=r"no dump of request hsnb-b in .* after 1 s"):
        collect(tmp_path, "hsnb-b", timeout_s=1.0)
    assert clock.now - before < 1.5
    go.release()


def test_columns_are_put_side_by_side_as_torch_does_and_never_stretched():
    """numpy would repeat a single row without a word."""
    packed = torch.randn(7, 3 * 8).to(torch.bfloat16)  # DeepSeek's aux states: chunks of one tensor
    columns = [*packed.chunk(3, dim=-1), torch.randn(7, 8).to(torch.bfloat16)]
    states, here = States(columns), torch.zeros(3, 4, 8, dtype=torch.bfloat16)
    states.copy_to(here, slice(2, 5))
    assert torch.equal(here, torch.stack(columns, dim=1)[2:5]) and torch.equal(states.rows(slice(2, 5)), here)
    with pytest.raises(ValueError, match=r"different kinds: .'torch\.bfloat16.1, 8.', 'torch\.bfloat16.7, 8.'"):
        States([columns[0], columns[1][:1]])
    with pytest.raises(ValueError, match=r"torch\.float32"):
        States([columns[0], columns[1].float()])
