"""What fails in the writer must be heard by the client, and must stop nobody else. No engine."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from hsnb.collect import collect
from hsnb.dumps import list_dumps
from hsnb.errors import CaptureError
from hsnb.patch import ring as rings
from hsnb.patch.ring import Ring
from hsnb.patch.spool import SafetensorsRequest
from hsnb.patch.writer import Writer, side_by_side
from tests.test_modes import req, said
from tests.test_writer import assert_right, made, run, slowly


def test_a_disk_that_hangs_is_told_and_does_not_hang_the_model(tmp_path, monkeypatch):
    """The ring is full and nothing comes back: the requests of that batch fail, the next ones at once, and those after the hang are whole."""
    monkeypatch.setattr(rings, "PATIENCE_S", 0.2)
    capture, hang = made(tmp_path, monkeypatch), threading.Event()
    put = capture.writer.put
    capture.writer.put = lambda *args: (hang.wait(20), put(*args))
    for n in range(12):
        run(capture, (req(f"hsnb-{n}", 160), 0, 160))
    counts, failures = said(capture)
    told = [f for f in failures if "TimeoutError: the ring of 1 MiB is full and nothing was written for 0.2 s" in f]
    assert len(told) == counts["failed"] == 4  # eight pieces of 127 KiB fit into it
    before = time.monotonic()
    run(capture, (req("hsnb-again", 160), 0, 160))
    assert time.monotonic() - before < 0.15 and said(capture)[0]["failed"] == 5, "every batch waits anew for a disk that hangs"
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
    run(capture, (req("hsnb-a", 400), 0, 400), (req("hsnb-b", 9), 0, 9))  # 168 rows a piece: the second one fails
    capture.writer.settle()
    counts, failures = said(capture)
    assert counts == {"failed": 2} and all("RuntimeError: CUDA error" in f for f in failures)
    assert not capture.writer.ring._slots and capture.open == {} and list(tmp_path.glob(".*.tmp")) == []
    run(capture, (req("hsnb-c", 400), 0, 400))
    capture.writer.settle()
    assert_right(tmp_path, "hsnb-c", 400)


def test_threads_that_cannot_be_started_are_told_and_tried_again(tmp_path, monkeypatch):
    capture, start = made(tmp_path, monkeypatch), threading.Thread.start

    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    run(capture, (req("hsnb-a", 5), 0, 5))
    assert said(capture) == ({"failed": 1}, ["hsnb-a: RuntimeError: can't start new thread"])
    monkeypatch.setattr(threading.Thread, "start", start)
    run(capture, (req("hsnb-b", 5), 0, 5))
    capture.writer.settle()
    assert said(capture)[0] == {"failed": 1, "captured": 1} and not capture.writer.ring._slots
    assert_right(tmp_path, "hsnb-b", 5)


def test_a_disk_that_takes_neither_rows_nor_a_removal_is_told(tmp_path, monkeypatch):
    def dead(*_):
        raise OSError(30, "Read-only file system")

    capture = made(tmp_path, monkeypatch)
    monkeypatch.setattr(SafetensorsRequest, "put", dead)
    monkeypatch.setattr(SafetensorsRequest, "discard", dead)
    run(capture, (req("hsnb-a", 5), 0, 5))
    capture.writer.settle()
    assert said(capture) == ({"failed": 1}, ["hsnb-a: OSError: [Errno 30] Read-only file system"])


def test_the_error_of_an_attempt_that_was_given_up_is_not_told_of_the_next_one(tmp_path, monkeypatch):
    """A prompt is retracted between its chunks while the disk fails under its first rows: its second try is whole, and is no failure."""
    capture, begun, go = made(tmp_path, monkeypatch), threading.Event(), threading.Event()
    put = capture.writer.put

    def first_fails(request, rows, *args):
        if (rows.start, rows.n) == (0, 30):
            begun.set()
            go.wait(5)
            raise OSError(5, "Input/output error")
        put(request, rows, *args)

    capture.writer.put, one = first_fails, req("hsnb-a", 90)
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
    capture, close = made(tmp_path, monkeypatch), os.close

    def refusing(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if path.endswith(".tmp"):
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", refusing)
    run(capture, (req("hsnb-a", 5), 0, 5))
    capture.writer.settle()
    counts, failures = said(capture)
    assert (counts["captured"], counts["failed"]) == (0, 1) and "Disk quota exceeded" in failures[0]
    assert list_dumps(tmp_path) == [] and list(tmp_path.glob(".*.tmp")) == []


def test_the_largest_piece_of_any_width_fits_the_ring():
    ring = Ring(1 << 16)
    writer = Writer(Path(), ring, put=None, publish=None, failed=None)
    for width in range(1, 200):
        rows = writer.rows_at_once(torch.zeros(1, 1, width, dtype=torch.bfloat16))
        assert -(-rows * width * 2 // 8) * 8 + 8 * rows <= ring.largest, width


def test_the_client_waits_for_a_long_dump_that_is_still_written_and_not_for_one_that_stands_still(tmp_path, monkeypatch):
    """One file for longer than the timeout: no other is published meanwhile."""
    capture = made(tmp_path, monkeypatch)
    slowly(capture, 0.15)
    run(capture, (req("hsnb-a", 1000), 0, 1000))  # six pieces
    assert collect(tmp_path, "hsnb-a", timeout_s=0.4).suffix == ".safetensors"
    assert_right(tmp_path, "hsnb-a", 1000)
    hang = threading.Event()
    capture.writer.put = lambda *_: hang.wait(20)
    run(capture, (req("hsnb-b", 5), 0, 5))
    before = time.monotonic()
    with pytest.raises(CaptureError, match=r"no dump of request hsnb-b in .* after 0.4 s"):
        collect(tmp_path, "hsnb-b", timeout_s=0.4)
    assert time.monotonic() - before < 3
    hang.set()


def test_columns_are_put_side_by_side_as_torch_does_and_never_stretched():
    """numpy would repeat a single row without a word."""
    packed = torch.randn(7, 3 * 8).to(torch.bfloat16)  # DeepSeek's aux states: chunks of one tensor
    columns = [*packed.chunk(3, dim=-1), torch.randn(7, 8).to(torch.bfloat16)]
    assert torch.equal(side_by_side(columns), torch.stack(columns, dim=1))
    with pytest.raises(ValueError, match=r"different kinds: .'torch\.bfloat16.1, 8.', 'torch\.bfloat16.7, 8.'"):
        side_by_side([columns[0], columns[1][:1]])
    with pytest.raises(ValueError, match=r"torch\.float32"):
        side_by_side([columns[0], columns[1].float()])
