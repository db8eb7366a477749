"""What is in flight, on a stub of the server (tests/stub.py): the spool's budget, the engine's, a slow disk, a full one."""

import asyncio
import json
import logging
import shutil
import subprocess
import threading
import time

import pytest

from hsnb import extract
from hsnb.errors import ExtractError
from hsnb.extract import Limits
from hsnb.extract.flow import Disk, Flow, hours
from hsnb.extract.work import Work
from hsnb.ledger import read_ledgers
from hsnb.trainers.speculators import SpeculatorsLayout
from tests.stub import StubServer, make_data

MB = 1 << 20


def resize(folder, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}m", folder], check=True)


def test_the_engines_bound_is_its_pool_and_a_prefill_more(tmp_path):
    server = StubServer(tmp_path, max_total_num_tokens=1000, chunked_prefill_size=200, max_running_requests=100)
    flow = Flow(server, Limits())
    sent = 0
    while not flow.full(100):
        flow.sent(100)
        sent += 1
    assert (sent, flow.full(100)) == (12, "engine")
    flow.answered(100)  # its dump is not published yet: the engine can go on
    assert flow.full(100) == ""
    few = Flow(StubServer(tmp_path, name="b", max_total_num_tokens=10**6, max_running_requests=8), Limits())
    while not few.full(1):
        few.sent(1)
    assert few.requests == 16


def test_a_bound_that_was_given_holds_until_the_dump_is_freed(tmp_path):
    flow = Flow(StubServer(tmp_path), Limits(), in_flight_tokens=100)
    flow.sent(60)
    assert flow.full(60) == "engine"
    flow.answered(60)
    assert flow.full(60) == "engine"
    flow.freed(60)
    assert flow.full(500) == ""  # one is always let through


def test_the_spools_bound_is_half_of_what_is_free_above_its_floor(tmp_path, disk):
    spool = disk("small", 64)
    server = StubServer(tmp_path, hidden=4096)  # 3 x 4096 x 4 bytes a token: 48 KiB
    server.spool = spool
    flow = Flow(server, Limits(spool_floor=8 * MB))
    sent = 0
    while not flow.full(100):
        flow.sent(100)  # 4.9 MB
        sent += 1
    assert (sent, flow.full(100)) == (6, "spool")
    (spool / "somebody else's").write_bytes(b"\0" * (50 * MB))
    for _ in range(6):
        flow.answered(100)
        flow.freed(100)
    assert flow.full(100) == ""  # 14 MB are free, 8 stay: one more
    (spool / "more").write_bytes(b"\0" * (4 * MB))
    assert flow.full(100) == "spool"
    assert Flow(server, Limits(spool_floor=0)).never(1500) and not Flow(server, Limits(spool_floor=0)).never(1000)


def test_each_worker_takes_its_part_of_what_is_left():
    work = Work(range(10), [10] * 10)
    work.join("a")
    work.join("b")
    assert [work.take(n * 10) for n in range(5)] == [0, 1, 2, 3, 4]
    assert work.take(50) is None and work.take(0) == 5
    work.put_back(0)
    assert work.take(0) == 0
    work.leave("b")  # its server is lost
    assert work.take(60) == 6
    assert not work.finished


@pytest.mark.parametrize(("seconds", "words"), [(19200, "5 h 20 min"), (75, "1 min 15 s"), (3.4, "3 s")])
def test_times_are_said_in_words(seconds, words):
    assert hours(seconds) == words


def test_how_long_the_disk_lasts_is_known_before_it_is_full(tmp_path, monkeypatch):
    disk = Disk(tmp_path, 10 * MB, 0)
    free = [100 * MB]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000 * MB, 0, free[0]))
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    disk._written.clear()
    for second in range(4):
        clock[0] = 1000.0 + second
        disk.note(second * 2 * MB)
        free[0] = 100 * MB - second * 2 * MB
    assert disk.lasts_s(50 * MB) is None  # all that is to come fits
    assert disk.lasts_s(500 * MB) == pytest.approx((94 - 10) / 2)
    disk.promise(4 * MB)
    assert disk.lasts_s(500 * MB) == pytest.approx((94 - 10 - 4) / 2)


def test_a_slow_disk_slows_the_requests_and_fills_nothing(tmp_path, disk, monkeypatch):
    """Fifty dumps of 4.9 MB through a spool of 64 MB, on a disk that takes 30 ms for each: never more than half is used."""
    server = StubServer(tmp_path, hidden=4096)
    spool = disk("spool64", 64)
    for path in server.spool.iterdir():
        shutil.copy(path, spool)
    server.spool = spool
    data = make_data(tmp_path / "data", [100] * 50)
    slow, most = SpeculatorsLayout.publish, []

    def publish(*args):
        most.append(shutil.disk_usage(spool).used)
        time.sleep(0.03)
        return slow(*args)

    monkeypatch.setattr(SpeculatorsLayout, "publish", publish)
    result = extract.run(server, data, limits=Limits(canary_every=0))
    assert result.ok and result.paused_s == 0
    assert max(most) <= 32 * MB
    assert max(most) > 10 * MB  # the engine worked ahead while there was space


def test_a_fast_disk_never_keeps_the_engine_waiting(tmp_path):
    server = StubServer(tmp_path)
    data = make_data(tmp_path / "data", [20] * 200)
    idle, before = [], [0.0]

    async def engine(rid, ids):
        if server.in_flight == len(ids) and before[0]:
            idle.append(time.monotonic() - before[0])
        await asyncio.sleep(0.01)
        before[0] = time.monotonic()

    server.behave = engine
    result = extract.run(server, data, limits=Limits(canary_every=0))
    assert result.ok and server.most_in_flight > 200
    assert sum(idle) < 0.25 * result.seconds


def test_a_full_output_pauses_says_so_and_goes_on(tmp_path, disk, caplog):
    """The output takes 16 of 30 samples of 2.4 MB; once there is room the run goes on by itself."""
    caplog.set_level(logging.WARNING)
    out = disk("out", 48)
    server = StubServer(tmp_path, hidden=4096)
    data = make_data(out / "data", [100] * 30)
    told = tmp_path / "status"
    limits = Limits(canary_every=0, output_floor=8 * MB, patience_s=60, status_s=0.05, on_stop=f'cp "$HSNB_STATUS" {told}')

    def make_room():
        status = data.path / "ledger" / "shard-0000-of-0001.status.json"
        end = time.monotonic() + 50
        while time.monotonic() < end:
            if status.exists() and (tree := json.loads(status.read_text()))["state"] == "paused":
                seen.append(tree)
                seen.append(shutil.disk_usage(out).free)
                time.sleep(0.3)
                return resize(out, 200)
            time.sleep(0.02)
        return None

    seen = []
    thread = threading.Thread(target=make_room)
    thread.start()
    result = extract.run(server, data, limits=limits)
    thread.join()
    assert result.ok and result.samples == 30 and result.paused_s > 0.2
    assert "the output disk is full" in seen[0]["reason"] and seen[0]["published"] < 30
    assert seen[1] >= 8 * MB  # the floor was kept
    assert any("paused: the output disk is full" in r.message and "waiting at most 1 min 0 s" in r.message for r in caplog.records)
    assert any("there is space again: going on" in r.message for r in caplog.records)
    assert any("to come" in r.message for r in caplog.records)  # said before it began
    assert json.loads(told.read_text())["state"] == "whole"


def test_at_the_floor_it_stops_cleanly_and_goes_on_another_time(tmp_path, disk):
    out = disk("out", 40)
    server = StubServer(tmp_path, hidden=4096)
    data = make_data(out / "data", [100] * 30)
    limits = Limits(canary_every=0, output_floor=8 * MB, patience_s=0.5)
    with pytest.raises(ExtractError, match=r"the output disk is full: .* stay free; waited 0 s.*make room and run the same shard again"):
        extract.run(server, data, limits=limits)
    kept = read_ledgers(data.path)
    assert 5 < len(kept) < 20
    assert {p.name for p in (data.path / "hidden_states").iterdir()} == {f"hs_{r}.safetensors" for r in kept}
    assert list(server.spool.glob("*.safetensors")) == []
    resize(out, 200)
    result = extract.run(server, data, limits=limits)
    assert (result.ok, result.done_before) == (True, len(kept))


def test_a_disk_that_is_full_all_at_once_loses_nothing(tmp_path, disk):
    """Without a floor the file system itself says no: the dump waits for room and is not asked for again."""
    out = disk("out", 24)
    server = StubServer(tmp_path, hidden=4096)
    data = make_data(out / "data", [100] * 15)
    timer = threading.Timer(1.5, resize, (out, 100))
    timer.start()
    result = extract.run(server, data, limits=Limits(canary_every=0, output_floor=0, patience_s=60))
    timer.join()
    assert result.ok
    asked = [rid for rid in server.asked if "canary" not in rid]
    assert len(asked) == 15


def test_a_dead_disk_stops_the_run_with_its_own_words(tmp_path, monkeypatch):
    server, data = StubServer(tmp_path), make_data(tmp_path / "data", [10] * 40)
    good, calls = SpeculatorsLayout.publish, []

    def dies(*args):
        calls.append(args)
        if len(calls) > 10:
            raise ExtractError(got="hs_9: Input/output error", expected="room", likely="the disk", next="see dmesg") from OSError(5, "EIO")
        return good(*args)

    monkeypatch.setattr(SpeculatorsLayout, "publish", dies)
    monkeypatch.setattr("hsnb.extract.publish.DISK_TRIES", 2)
    with pytest.raises(ExtractError, match="Input/output error"):
        extract.run(server, data)
    kept = read_ledgers(data.path)
    assert 0 < len(kept) <= 10
    monkeypatch.undo()
    assert extract.run(server, data).done_before == len(kept)


def test_a_disk_that_fails_once_is_tried_again(tmp_path, monkeypatch):
    server, data = StubServer(tmp_path), make_data(tmp_path / "data", [10] * 10)
    good, calls = SpeculatorsLayout.publish, []

    def hiccup(*args):
        calls.append(args)
        if len(calls) == 4:
            raise OSError(5, "Input/output error")
        return good(*args)

    monkeypatch.setattr(SpeculatorsLayout, "publish", hiccup)
    assert extract.run(server, data).ok
    assert len([rid for rid in server.asked if "canary" not in rid]) == 10  # the same dump was written again
