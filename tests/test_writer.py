"""The ring and the writer: nothing lost, nothing twice, nothing unbounded, however slow the disk and whatever fails. No engine.

`made` starts the real process that writes. `inside` lets its code run in a thread of this process instead, so that a disk can be
made slow or broken in ways that no real one can be asked for.
"""

import gc
import json
import os
import random
import threading
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch

from hsnb.dumps import dump_path, list_dumps, open_dump
from hsnb.patch import ring as rings
from hsnb.patch import writer as writers
from hsnb.patch.armed import Armed, ArmedFile, read_armed
from hsnb.patch.bodies import Body
from hsnb.patch.capture import Capture
from hsnb.patch.ring import Ring, ring_bytes
from hsnb.patch.rows import Rows, cuts
from hsnb.patch.scribe import Scribe, serve
from hsnb.patch.settings import Settings
from hsnb.patch.spool import SafetensorsRequest
from hsnb.patch.writer import writing_threads
from tests.test_modes import TwoLayers, batch, req, said

WIDTH = 64  # of the body's states
_MADE: list[Capture] = []


@pytest.fixture(autouse=True)
def closed():
    """End every writing process that a test started."""
    yield
    while _MADE:
        _MADE.pop().writer.close()


class Inside:
    """What stands for the writing process: its code in a thread."""

    pid = -1

    def __init__(self, connection, ring: int, armed: int):
        copies = os.dup(connection.fileno()), os.dup(ring), os.dup(armed)
        self.thread = threading.Thread(target=lambda: serve(Connection(copies[0]), *copies[1:]), daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """A thread ends when its connection does."""

    def wait(self) -> int:
        self.thread.join(5)
        return 0


def inside(tmp_path, monkeypatch, **more) -> Capture:
    """Return a capture whose files are written in this process."""
    monkeypatch.setattr(writers, "start_process", Inside)
    return made(tmp_path, monkeypatch, **more)


def made(tmp_path, monkeypatch, mib: int = 1, layout: str = "safetensors", threads: int = 2) -> Capture:
    """Return a capture over a body of two layers, with a ring of `mib` MiB."""
    monkeypatch.setenv(rings.VARIABLE, str(mib))
    monkeypatch.setenv("SGLANG_HS_DUMP_THREADS", str(threads))
    armed = Armed(state="armed", dtype="float32", num_layers=2, hidden_size=WIDTH)
    settings = Settings(tmp_path, (0, 1), "pre", layout, "hsnb-")
    capture = Capture(TwoLayers(), settings, ArmedFile(tmp_path, armed), writes=True, warmup=False, spec=Body())
    capture.body.forward = capture
    _MADE.append(capture)
    return capture


def run(capture, *parts):
    """Run one batch: the state of a token at B_0 is its id and its column's number."""
    asked = batch(*parts)
    capture.note_lengths([r for r, *_ in parts])
    embeds = asked.input_ids[:, None].float() + torch.arange(WIDTH)[None, :] / 1024
    return capture(None, None, asked, embeds)


def assert_right(spool: Path, rid: str, n: int, layout: str = "safetensors") -> None:
    dump = open_dump(dump_path(spool, rid, layout))
    expected = torch.arange(n)[:, None].float() + torch.arange(WIDTH)[None, :] / 1024
    assert dump.token_ids.tolist() == list(range(n))
    assert torch.equal(dump.state(0), expected) and torch.equal(dump.state(1), expected + 1)
    assert torch.equal(dump.state("final"), expected + 1 + 10)


# -- the ring -----------------------------------------------------------------------------------------------------


def test_pieces_never_overlap_and_the_memory_never_grows():
    ring, rng, held = Ring(1 << 16), random.Random(0), []
    address = ring.memory.data_ptr()
    for n in range(5000):
        while held and (len(held) > 6 or rng.random() < 0.4):
            slot, mark = held.pop(rng.randrange(len(held)))
            assert (ring.memory[slot.start : slot.end] == mark).all(), "another piece was put over this one"
            ring.give(slot)
        size = rng.randrange(1, ring.largest)
        if ring._room(-(-size // 512) * 512) is None:  # it would wait
            continue
        slot, waited = ring.take(size)
        assert 0 <= slot.start < slot.end <= 1 << 16 and slot.start % 512 == 0 and waited == 0
        ring.memory[slot.start : slot.end] = n % 251
        held.append((slot, n % 251))
    assert ring.memory.data_ptr() == address


def test_a_full_ring_makes_the_taker_wait_for_the_oldest():
    ring = Ring(1 << 16)
    slots = [ring.take(ring.largest)[0] for _ in range(4)]
    taken = []
    thread = threading.Thread(target=lambda: taken.append(ring.take(ring.largest)))
    thread.start()
    ring.give(slots[2])  # not the oldest: its space is in the middle
    time.sleep(0.05)
    assert taken == []
    ring.give(slots[0])
    ring.give(slots[1])
    thread.join(5)
    slot, waited = taken[0]
    assert (slot.start, slot.end) == (0, ring.largest) and waited >= 0.05


def test_a_ring_holds_four_pieces_all_the_time():
    ring = Ring(1 << 16)
    slots = [ring.take(ring.largest)[0] for _ in range(4)]
    for _ in range(9):
        assert ring._room(512) is None
        ring.give(slots.pop(0))
        slots.append(ring.take(ring.largest)[0])
    assert sorted(s.start for s in slots) == [0, 1 << 14, 2 << 14, 3 << 14]
    for slot in slots:
        ring.give(slot)
    assert ring._room(512) == 0


def test_a_piece_larger_than_may_be_names_the_variable():
    with pytest.raises(ValueError, match=r"at most 16,384 of a ring of 65,536: raise SGLANG_HS_DUMP_RING_MIB"):
        Ring(1 << 16).take(16385)


def test_the_size_of_the_ring(monkeypatch):
    monkeypatch.delenv(rings.VARIABLE, raising=False)
    assert ring_bytes(8192, 57_352) == 4 * (8192 * 57_352 + 4096)  # Kimi's shape: 1.8 GiB
    assert (ring_bytes(8192, 57_352) // 4 // 512 * 512 - 7) // 57_352 == 8192, "a chunk and its ids are one piece"
    assert (ring_bytes(1, 1), ring_bytes(65536, 57_352)) == (64 << 20, 2 << 30)
    monkeypatch.setenv(rings.VARIABLE, "300")
    assert ring_bytes(8192, 57_352) == 300 << 20
    for wrong in ("0", "-1", "1.5", "2G"):
        monkeypatch.setenv(rings.VARIABLE, wrong)
        with pytest.raises(ValueError, match=rf"SGLANG_HS_DUMP_RING_MIB is '{wrong}'"):
            ring_bytes(1, 1)
    monkeypatch.setenv("SGLANG_HS_DUMP_THREADS", "0")
    with pytest.raises(ValueError, match="SGLANG_HS_DUMP_THREADS is '0'"):
        writing_threads()


# -- through the capture ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["safetensors", "pt"])
def test_a_prompt_of_many_pieces_and_chunks_is_whole_and_names_its_chunks(tmp_path, monkeypatch, layout):
    """776 bytes a row and a ring of 1 MiB: a piece has at most 337 rows, and some have the rows of both prompts."""
    capture = made(tmp_path, monkeypatch, layout=layout)
    one, other = req("hsnb-a", 1000), req("hsnb-b", 40)
    run(capture, (other, 0, 40), (one, 0, 600))
    run(capture, (one, 600, 1000))
    capture.writer.settle()
    assert said(capture) == ({"captured": 2}, [])
    assert_right(tmp_path, "hsnb-a", 1000, layout)
    assert_right(tmp_path, "hsnb-b", 40, layout)
    chunks = open_dump(dump_path(tmp_path, "hsnb-a", layout)).metadata["chunks"]
    assert (json.loads(chunks) if isinstance(chunks, str) else chunks) == [[0, 600], [600, 1000]]


def slowly(monkeypatch, seconds: float) -> None:
    """Make the disk slow."""
    put = Scribe.put

    def slow(*args):
        time.sleep(seconds)
        put(*args)

    monkeypatch.setattr(Scribe, "put", slow)


def test_a_slow_disk_is_not_waited_for_until_the_ring_is_full_and_that_is_told(tmp_path, monkeypatch):
    capture = inside(tmp_path, monkeypatch)
    run(capture, (req("hsnb-warm", 1), 0, 1))
    capture.writer.settle()
    put, go, went = Scribe.put, threading.Event(), []
    monkeypatch.setattr(Scribe, "put", lambda *args: (went.append(go.wait(30)), put(*args)))
    run(capture, (req("hsnb-a", 160), 0, 160), (req("hsnb-b", 160), 0, 160))
    assert "ring_full_ms" not in said(capture)[0]
    go.set()
    capture.writer.settle()
    assert len(went) > 1 and all(went), "the forward waited for the disk"
    monkeypatch.setattr(Scribe, "put", put)
    slowly(monkeypatch, 0.2)
    for n in range(12):
        run(capture, (req(f"hsnb-{n}", 160), 0, 160))
    assert said(capture)[0]["ring_full_ms"] >= 100
    capture.writer.settle()
    assert said(capture)[0]["captured"] == 15 and len(list_dumps(tmp_path)) == 15
    for n in range(12):
        assert_right(tmp_path, f"hsnb-{n}", 160)


def test_what_the_model_does_next_with_its_buffers_changes_nothing(tmp_path, monkeypatch):
    """The states and the token ids are poisoned as soon as the forward is over, while the disk has not begun."""
    capture = inside(tmp_path, monkeypatch)
    slowly(monkeypatch, 0.1)
    kept = []
    borrow = capture.borrow

    def remembering(*args, **kwargs):
        states, hidden = borrow(*args, **kwargs)
        kept.extend(states.values())
        return states, hidden

    capture.borrow = remembering
    asked = batch((req("hsnb-a", 50), 0, 50))
    capture.note_lengths([req("hsnb-a", 50)])
    embeds = asked.input_ids[:, None].float() + torch.arange(WIDTH)[None, :] / 1024
    capture(None, None, asked, embeds)
    for tensor in (*kept, embeds, asked.input_ids):
        tensor.fill_(-7)
    capture.writer.settle()
    assert_right(tmp_path, "hsnb-a", 50)


def test_what_is_copied_from_is_kept_until_it_is_and_no_longer(tmp_path, monkeypatch):
    """A GPU's copy comes late: an event that waits stands in for it, and is used again. On a GPU, `benchmarks.gpu --steps kept` looks."""
    capture, go, seen, refs = made(tmp_path, monkeypatch), threading.Semaphore(0), [], []
    copy = capture.writer._copy

    class Event:
        def synchronize(self):
            assert go.acquire(timeout=30)
            seen.append((id(self), refs[len(seen)]() is not None))

    def queued(here, ids, states, token_ids, part):
        copy(here, ids, states, token_ids, part)
        refs.append(weakref.ref(token_ids))
        return capture.writer._events.popleft() if capture.writer._events else Event()

    monkeypatch.setattr(capture.writer, "_copy", queued)
    for n in range(3):
        run(capture, (req(f"hsnb-{n}", 40), 0, 40))
        gc.collect()
        assert refs[n]() is not None and dump_path(tmp_path, f"hsnb-{n}", "safetensors") is None
        go.release()
        capture.writer.settle()
        assert refs[n]() is None, "the model's memory is held by a thread that has nothing to do"
        assert_right(tmp_path, f"hsnb-{n}", 40)
    assert [alive for _, alive in seen] == [True] * 3 and len({event for event, _ in seen}) == 1


def test_a_thread_that_hangs_keeps_few_batches_of_the_gpus_memory(tmp_path, monkeypatch):
    """On a process that was stopped, say. There is no GPU here: what would be asked of its tensors is noted."""
    capture, go, recorded = made(tmp_path, monkeypatch), threading.Event(), []
    copy = capture.writer._copy

    class Event:
        def synchronize(self):
            assert go.wait(30)

    def queued(here, ids, states, token_ids, part):
        copy(here, ids, states, token_ids, part)
        states.stacked = torch.zeros(1)
        return Event()

    monkeypatch.setattr(capture.writer, "_copy", queued)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(self))
    for n in range(8):
        run(capture, (req(f"hsnb-{n}", 40), 0, 40))
    queue = capture.writer._to_send
    kept = [len(tensors) for _, _, tensors, _ in [queue.get() for _ in range(queue.qsize())]]  # the thread has the first, now or before
    assert kept[:3] == [2] * 3 and kept.count(2) <= 4 and kept.count(0) == len(kept) - kept.count(2) >= 3
    assert len(recorded) == 2 * kept.count(0)
    go.set()


def test_a_prompt_that_starts_again_while_its_first_rows_are_still_written(tmp_path, monkeypatch):
    capture = inside(tmp_path, monkeypatch, threads=4)
    slowly(monkeypatch, 0.05)
    one = req("hsnb-a", 90)
    run(capture, (one, 0, 30))
    run(capture, (one, 0, 60))  # retracted between its chunks, twice
    run(capture, (one, 0, 90))
    capture.writer.settle()
    assert said(capture) == ({"captured": 1}, []) and list(tmp_path.glob(".*.tmp")) == []
    assert_right(tmp_path, "hsnb-a", 90)


def test_one_failing_file_is_told_once_and_its_neighbours_are_whole(tmp_path, monkeypatch):
    capture, put = inside(tmp_path, monkeypatch), Scribe.put

    def full(self, request, part):
        if request.request_id == "hsnb-b" and part.start >= 300:
            raise OSError(28, "No space left on device")
        put(self, request, part)

    monkeypatch.setattr(Scribe, "put", full)
    bad = req("hsnb-b", 900)
    run(capture, (req("hsnb-a", 20), 0, 20), (bad, 0, 500), (req("hsnb-c", 30), 0, 30))
    capture.writer.settle()
    run(capture, (bad, 500, 900))
    capture.writer.settle()
    counts, failures = said(capture)
    assert counts == {"captured": 2, "failed": 1} and failures == ["hsnb-b: OSError: [Errno 28] No space left on device"]
    assert list(tmp_path.glob(".*.tmp")) == [] and len(list_dumps(tmp_path)) == 2
    assert_right(tmp_path, "hsnb-c", 30)
    monkeypatch.setattr(Scribe, "put", put)  # the thread and the ring live on: more than the ring holds
    for n in range(10):
        run(capture, (req(f"hsnb-{n}", 500), 0, 500))
    capture.writer.settle()
    assert said(capture)[0]["captured"] == 12


def test_a_rename_that_fails_is_not_counted_as_captured(tmp_path, monkeypatch):
    capture = inside(tmp_path, monkeypatch)
    monkeypatch.setattr(SafetensorsRequest, "publish", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    run(capture, (req("hsnb-a", 5), 0, 5))
    capture.writer.settle()
    counts, failures = said(capture)
    assert counts == {"failed": 1} and "PermissionError" in failures[0]
    assert list(tmp_path.glob(".*.tmp")) == []


def test_a_row_that_no_ring_holds_is_told(tmp_path, monkeypatch):
    capture = made(tmp_path, monkeypatch)
    capture.writer.ring = Ring(2048)
    run(capture, (req("hsnb-a", 5), 0, 5))
    assert "raise SGLANG_HS_DUMP_RING_MIB" in said(capture)[1][0] and capture.open == {}


def test_the_count_is_there_before_the_file(tmp_path, monkeypatch):
    """A client that sees its dump may ask at once how many were captured."""
    capture = inside(tmp_path, monkeypatch)
    seen, publish = [], SafetensorsRequest.publish

    def looking(self, spool):
        seen.append(read_armed(tmp_path)[0].counts["captured"])
        publish(self, spool)

    monkeypatch.setattr(SafetensorsRequest, "publish", looking)
    for n in range(3):
        run(capture, (req(f"hsnb-{n}", 5), 0, 5))
        capture.writer.settle()
    assert seen == [1, 2, 3]


def test_many_requests_from_a_slow_and_a_fast_side(tmp_path, monkeypatch):
    """200 prompts of random lengths in random batches and chunks: every row once, nothing left, no memory beyond the ring."""
    capture, rng = made(tmp_path, monkeypatch, threads=4), random.Random(1)
    prompts = {f"hsnb-{n}": rng.choice((1, 7, 64, 200, 450)) for n in range(200)}
    waiting = [req(rid, n) for rid, n in prompts.items()]
    chunked, at = None, 0
    while waiting or chunked:
        parts, room = [], rng.randrange(50, 500)
        while room > 0 and (chunked or waiting):
            one, start = (chunked, at) if chunked else (waiting.pop(0), 0)
            end = min(prompts[one.rid], start + room)
            parts.append((one, start, end))
            room -= end - start
            chunked, at = (one, end) if end < prompts[one.rid] else (None, 0)
        run(capture, *parts)
        capture.let_go({p[0].rid for p in parts} | ({chunked.rid} if chunked else set()))
    capture.writer.settle()
    assert said(capture)[0]["captured"] == 200 and said(capture)[1] == [] and capture.open == {}
    for rid, n in prompts.items():
        assert_right(tmp_path, rid, n)
    assert list(tmp_path.glob(".*.tmp")) == [] and not capture.writer.ring._slots


def test_a_batch_is_cut_into_few_pieces_and_every_row_is_in_one():
    rows = [Rows(f"hsnb-{i}", offset, start, n, "data") for i, (offset, start, n) in enumerate([(0, 0, 3), (3, 5, 4), (9, 0, 2)])]
    found = list(cuts(rows, 5))  # rows 7 and 8 are somebody else's
    assert found == [(0, 5, [0, 1]), (5, 7, [1]), (9, 11, [2])]
    second = [rows[1].within(first, end) for first, end, _ in found[:2]]
    assert [(r.offset, r.start, r.n, r.goes_on) for r in second] == [(3, 5, 2, False), (5, 7, 2, True)]
    assert list(cuts(rows, 100)) == [(0, 7, [0, 1]), (9, 11, [2])] and list(cuts([], 5)) == []


def test_neither_process_nor_thread_before_the_first_rows(tmp_path, monkeypatch):
    before, children = threading.active_count(), psutil.Process().children()
    made(tmp_path, monkeypatch)
    assert threading.active_count() == before and psutil.Process().children() == children


def test_ten_thousand_requests_leave_no_memory_behind(tmp_path, monkeypatch):
    """Beyond the ring, which is there from the first batch on. Measured: what is held after a collection, as the kernel counts it."""
    me = psutil.Process()
    others = set(me.children())  # what earlier tests left, multiprocessing's tracker for one
    capture = made(tmp_path, monkeypatch)

    def thousand(first: int) -> tuple[int, int]:
        for n in range(first, first + 1000, 50):
            run(capture, *((req(f"hsnb-{i}", 6), 0, 6) for i in range(n, n + 50)))
            capture.writer.settle()
            for path in list_dumps(tmp_path):
                path.unlink()
        gc.collect()
        (writing,) = set(me.children()) - others
        return me.memory_info().rss, writing.memory_info().rss

    held, written = zip(*(thousand(n) for n in range(0, 10_000, 1000)), strict=True)
    assert said(capture) == ({"captured": 10_000}, []) and len(capture.lengths) == 10_000 and capture.open == {}
    assert held[-1] - held[1] < 8 << 20, [h >> 10 for h in held]  # 8,000 requests: what is known of each (600 bytes) and no states
    assert written[-1] - written[1] < 1 << 20, [h >> 10 for h in written]  # the process that writes keeps nothing
