"""One shard on a stub of the server (tests/stub.py): what is owed, retried, refused, recovered, and how the time and memory go."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from hsnb import extract
from hsnb.dumps import open_dump
from hsnb.errors import ExtractError, ServerError
from hsnb.extract import Limits
from hsnb.extract.output import checksum
from hsnb.ledger import Ledger, read_ledgers
from hsnb.server.client import Generated
from tests.stub import StubServer, make_data, states_of

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = [5 + 3 * (n % 9) for n in range(40)]


@pytest.fixture
def server(tmp_path):
    return StubServer(tmp_path)


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path / "data", LENGTHS)


def files(data) -> dict[int, str]:
    return {int(p.stem[3:]): checksum(p) for p in (data.path / "hidden_states").glob("hs_*.safetensors")}


def spooled(server) -> list[str]:
    return sorted(p.name for p in server.spool.glob("*.safetensors"))


def prints(data) -> dict:
    return json.loads((data.path / "hsnb.json").read_text())["fingerprint"]


def test_a_shard_is_published_entered_and_freed(server, data):
    result = extract.run(server, data, shard=1, num_shards=4)
    rows = list(range(1, 40, 4))
    assert (result.samples, result.failed, result.tokens) == (10, {}, sum(LENGTHS[r] for r in rows))
    assert sorted(files(data)) == rows and spooled(server) == []
    for row in rows:
        dump = open_dump(data.path / f"hidden_states/hs_{row}.safetensors")
        ids = data.dataset()[row]["input_ids"]
        assert torch.equal(dump.token_ids, ids)
        assert torch.equal(dump.states(), states_of(ids.tolist(), 3, 8).bfloat16())
    entries = read_ledgers(data.path, prints(data))
    assert {r: e.xxh3_128 for r, e in entries.items()} == files(data)
    assert not (data.path / ".staging").exists()
    assert result.canaries == 2 and result.other_requests == 0
    assert {e.server for e in entries.values()} == {"http://stub"}


def test_the_union_of_all_ledgers_is_what_is_done_whatever_the_number_of_shards_and_servers(server, data, tmp_path):
    for shard, shards in ((0, 4), (1, 2), (0, 1)):
        extract.run(server, data, shard=shard, num_shards=shards)
    extract.run([server, StubServer(tmp_path, name="b")], data, shard=2, num_shards=3)
    asked = [rid.split("-")[3] for rid in server.asked if "canary" not in rid]
    assert sorted(map(int, asked)) == list(range(40))  # each once
    assert sorted(files(data)) == list(range(40))


def test_the_export_alone_is_enough_on_another_machine(server, data, tmp_path):
    extract.run(server, data, num_shards=2)
    for path in (data.path / "ledger").glob("*.sqlite*"):
        path.unlink()
    again = extract.run(server, data, num_shards=2)
    assert (again.done_before, again.new_tokens) == (20, 0)
    all_of_it = extract.run(server, data)
    assert (all_of_it.done_before, all_of_it.samples) == (20, 40)


@pytest.mark.parametrize("where", ["noted", "moved", "staged"])
def test_a_writer_killed_between_two_states_is_settled_by_its_checksum(where, server, data):
    extract.run(server, data, num_shards=4)
    before, asked = files(data), len(server.asked)
    name = "shard-0000-of-0004"
    with Ledger(data.path / "ledger" / f"{name}.sqlite", prints(data)) as ledger:
        entry = ledger.done()[8]
        ledger.note_moves([entry])
        ledger._db.execute("DELETE FROM done WHERE row = 8")
        ledger._db.commit()
        ledger.export(data.path / "ledger")
    staged, target = data.path / ".staging" / name / entry.file, data.path / entry.file
    staged.parent.mkdir(parents=True)
    if where != "moved":
        os.rename(target, staged)
    if where == "noted":
        staged.write_bytes(staged.read_bytes()[:-1])
    result = extract.run(server, data, shard=0, num_shards=2 if where == "moved" else 4)  # whoever comes next settles it
    again = [rid for rid in server.asked[asked:] if "-8-" in rid and "canary" not in rid]
    assert len(again) == (1 if where == "noted" else 0)
    assert result.ok and {r: h for r, h in files(data).items() if r in before} == before
    assert not (data.path / ".staging").exists()


def test_files_that_no_ledger_has_are_set_aside_and_not_counted(server, data):
    extract.run(server, data, num_shards=4, limit=3)
    folder = data.path / "hidden_states"
    foreign = (folder / "hs_0.safetensors").read_bytes()
    (folder / "hs_12.safetensors").write_bytes(foreign)
    (folder / "hs_16.safetensors").write_bytes(b"half a file")
    again = extract.run(server, data, num_shards=4)
    assert (again.done_before, again.samples, again.damaged, again.ok) == (3, 10, 0, True)
    aside = data.path / "set-aside" / "hidden_states"
    assert sorted(p.name for p in aside.iterdir()) == ["hs_12.safetensors.aside", "hs_16.safetensors.aside"]
    assert (aside / "hs_12.safetensors.aside").read_bytes() == foreign
    assert open_dump(folder / "hs_12.safetensors").num_tokens == LENGTHS[12]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": {"max_length": 100}}, "max_length was 4096 and is 100"),
        ({"settings": {"chat_template": "other"}}, "chat_template was 'c' and is 'other'"),
        ({"settings": {"tokenizer": "other"}}, "tokenizer was 't' and is 'other'"),
        ({"fingerprint": "reordered"}, "data was 'data-hash' and is 'reordered'"),
        ({"armed": {"boundaries": [1, 3]}}, r"boundaries was \[1, 2\] and is \[1, 3\]"),
        ({"armed": {"config_hash": "other"}}, "model was 'stub' and is 'other'"),
        ({"armed": {"sglang_version": "0.5.24"}}, "sglang was '0.5.23' and is '0.5.24'"),
        ({"armed": {"server_args": {"quantization": "w4"}}}, "flag quantization was None and is 'w4'"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_another_setting_is_refused_by_name_and_writes_nothing(change, words, server, data, monkeypatch):
    extract.run(server, data, num_shards=4)
    before = sorted(p.name for p in (data.path / "ledger").iterdir())
    monkeypatch.setattr("hsnb.extract.job.require_receipt", lambda server: None)
    if "armed" in change:
        server.armed = [replace(server.armed[0], **change["armed"])]
    else:
        data = replace(data, **{**change, **({"settings": data.settings | change["settings"]} if "settings" in change else {})})
    with pytest.raises(ExtractError, match=words) as refused:
        extract.run(server, data, shard=1, num_shards=4)  # a shard that nobody has begun
    assert refused.value.got.count(" was ") == 1
    assert sorted(p.name for p in (data.path / "ledger").iterdir()) == before


def test_other_weights_of_the_same_shape_are_refused(server, data):
    extract.run(server, data, num_shards=4)
    (server.spool.parent / "model" / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ExtractError, match="no probe of this very server"):  # the receipt sees it first
        extract.run(server, data)


def test_two_numbers_of_shards_at_the_same_time_are_refused(server, data):
    extract.run(server, data, shard=0, num_shards=4)
    with Ledger(data.path / "ledger" / "shard-0000-of-0004.sqlite", prints(data)):
        with pytest.raises(ExtractError, match="shard-0000-of-0004 is being written by another process, and has rows of"):
            extract.run(server, data, shard=0, num_shards=2)
        assert extract.run(server, data, shard=1, num_shards=2).ok  # no row in common


# -- faults ------------------------------------------------------------------------------------------------------------


def row_of(rid: str) -> str:
    return "canary" if "canary" in rid else rid.split("-")[3]


def test_what_one_request_can_do_wrong_is_retried_and_then_owed(server, data):
    """Row 4 fails once; row 8 is answered with nothing, row 12 never dumped, row 16 has NaN, row 20 refused: each time."""

    async def behave(rid, ids):
        row, attempt = row_of(rid), rid.rsplit("-", 1)[1]
        if row == "4" and attempt == "1":
            raise ServerError(got="a reset connection", expected="an answer", likely="the network", next="ask again")
        if row == "8":
            return Generated(rid, "", [], 0, 0)
        if row == "12":
            server.file.fail(rid, "RuntimeError: a kernel failed")
            return Generated(rid, "", [0], len(ids), 0)
        if row == "16":
            states = states_of(ids, 3, 8)
            states[1, 1, 1] = float("nan")
            server.dump(rid, states, ids)
            return Generated(rid, "", [0], len(ids), 0)
        if row == "20":
            error = ServerError(got="/generate answered 500", expected="an answer", likely="see the log", next="see the log")
            error.status = 500
            raise error
        return None

    server.behave = behave
    result = extract.run(server, data, num_shards=4)
    assert sorted(result.failed) == [8, 12, 16, 20]
    assert "an answer to 0 tokens" in result.failed[8] and "a kernel failed" in result.failed[12]
    assert "finite rows is 1 bad, first: row 1 of B_2" in result.failed[16] and "answered 500" in result.failed[20]
    assert [sum(row_of(r) == str(n) for r in server.asked) for n in (4, 8, 12, 16, 20)] == [2, 3, 3, 3, 3]
    assert read_ledgers(data.path)[4].attempt == 2
    assert spooled(server) == []
    with pytest.raises(ExtractError, match="shard 0: 4 of 10 samples owed, first row 8"):
        result.raise_if_owed()
    server.behave = None
    mended = extract.run(server, data, num_shards=4)
    assert (mended.ok, mended.done_before) == (True, 6)


def test_a_server_that_is_lost_gives_its_rows_to_the_other_one(server, data, tmp_path):
    other = StubServer(tmp_path, name="b")

    async def dies(rid, ids):
        if sum("canary" not in r for r in server.asked) > 5:
            server.alive = False
            raise server.gone()
        await asyncio.sleep(0.01)

    async def waits(rid, ids):  # so that the first one has its part
        while server.alive and "canary" not in rid:
            await asyncio.sleep(0.01)

    server.behave, other.behave = dies, waits
    result = extract.run([server, other], data)
    assert result.ok and sorted(files(data)) == list(range(40))
    assert not server.alive and result.by_server["http://b"] >= 34


def test_the_only_server_lost_says_so_and_keeps_what_is_done(server, data):
    async def dies(rid, ids):
        if len(server.asked) > 8:
            server.alive = False
            raise server.gone()

    server.behave = dies
    with pytest.raises(ServerError, match=r"the server at http://stub is lost after \d+ of 40 samples .*it goes on where it stopped"):
        extract.run(server, data)
    kept = files(data)
    assert read_ledgers(data.path).keys() == kept.keys() and kept
    server.alive, server.behave = True, None
    result = extract.run(server, data)
    assert (result.ok, result.done_before) == (True, len(kept))
    assert {r: h for r, h in files(data).items() if r in kept} == kept


def test_a_server_that_hangs_is_given_up(server, data):
    async def hangs(rid, ids):
        if len(server.asked) > 16:
            await asyncio.sleep(3600)

    server.behave = hangs
    before = time.monotonic()
    with pytest.raises(ServerError, match=r"no forward for 2 s while \d+ requests wait"):
        extract.run(server, data, limits=Limits(hang_s=2.0))
    assert time.monotonic() - before < 20
    assert len(files(data)) >= 5


def test_an_interrupt_stops_at_once_and_loses_nothing(server, data, monkeypatch):
    async def slow(rid, ids):
        await asyncio.sleep(0.02)

    server.behave = slow
    watch = iter([KeyboardInterrupt])

    def interrupted(job, status, progress):
        time.sleep(0.4)
        raise next(watch)

    monkeypatch.setattr("hsnb.extract.job.watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract.run(server, data, in_flight_tokens=20)
    kept = files(data)
    assert read_ledgers(data.path).keys() == kept.keys() and 0 < len(kept) < 40
    monkeypatch.undo()
    assert extract.run(server, data).done_before == len(kept)


# -- trust -------------------------------------------------------------------------------------------------------------


def test_a_canary_that_is_out_stops_the_server_and_withdraws_what_it_gave_since(server, data):
    async def drifts(rid, ids):
        if sum("canary" not in r for r in server.asked) > 20:
            server.dump(rid, states_of(ids, 3, 8) * 1.001, ids)
            return Generated(rid, "", [0], len(ids), 0)
        return None

    server.behave = drifts
    with pytest.raises(ExtractError, match=r"the canary at http://stub: 0\.001 .*expected at most 1e-05 relative L2, 3 times in a row"):
        extract.run(server, data, limits=Limits(canary_every=10), in_flight_tokens=1)
    trusted = read_ledgers(data.path)
    assert 10 <= len(trusted) <= 20
    for row in trusted:
        want = states_of(data.dataset()[row]["input_ids"].tolist(), 3, 8).bfloat16()
        assert torch.equal(open_dump(data.path / f"hidden_states/hs_{row}.safetensors").states(), want)
    server.behave = None
    result = extract.run(server, data)
    assert result.ok and result.done_before == len(trusted)
    for row in range(40):
        want = states_of(data.dataset()[row]["input_ids"].tolist(), 3, 8).bfloat16()
        assert torch.equal(open_dump(data.path / f"hidden_states/hs_{row}.safetensors").states(), want)


def test_a_server_with_other_states_is_refused_by_the_first_canary(server, data, tmp_path):
    extract.run(server, data, num_shards=2)
    other = StubServer(tmp_path, name="b")

    async def differs(rid, ids):
        other.dump(rid, states_of([i + 1 for i in ids], 3, 8), ids)
        return Generated(rid, "", [0], len(ids), 0)

    other.behave = differs
    with pytest.raises(ExtractError, match="the canary at http://b"):
        extract.run(other, data, shard=1, num_shards=2)
    assert sorted(files(data)) == list(range(0, 40, 2))


def test_requests_of_others_are_counted(server, data):
    async def beside(rid, ids):
        if "canary" not in rid:
            server.file.count("other")
            if row_of(rid) == "4":
                server.dump("hsnb-somebody-else", states_of(ids, 3, 8), ids)

    server.behave = beside
    assert extract.run(server, data, num_shards=4).other_requests == 11


def test_dumps_of_a_killed_client_are_swept_and_those_of_others_are_not(server, data):
    extract.run(server, data, num_shards=4, limit=2)
    with Ledger(data.path / "ledger" / "shard-0000-of-0004.sqlite", prints(data)) as ledger:
        writer = ledger.writer
    for rid in (f"hsnb-{writer}-deadbeef-12-1", "hsnb-another-12-1"):
        server.dump(rid, states_of([1, 2], 3, 8), [1, 2])
    extract.run(server, data, num_shards=4)
    assert [open_dump(server.spool / n).request_id for n in spooled(server)] == ["hsnb-another-12-1"]


# -- what it tells, and how it scales ----------------------------------------------------------------------------------


def test_the_status_file_and_the_command_at_the_end(server, data, tmp_path):
    command = f'echo "$HSNB_STATE" > {tmp_path}/ended; cp "$HSNB_STATUS" {tmp_path}/copy.json'
    extract.run(server, data, num_shards=4, limits=Limits(on_stop=command, status_s=0.01))
    assert (tmp_path / "ended").read_text() == "whole\n"
    tree = json.loads((tmp_path / "copy.json").read_text())
    assert (tree["state"], tree["published"], tree["owed"], tree["tokens_left"]) == ("whole", 10, 0, 0)
    assert tree["servers"][0]["published"] == 10

    async def never(rid, ids):
        return Generated(rid, "", [], 0, 0) if row_of(rid) == "1" else None

    server.behave = never
    extract.run(server, data, shard=1, num_shards=4, limits=Limits(on_stop=command))
    assert (tmp_path / "ended").read_text() == "owed\n"

    async def dies(rid, ids):
        server.alive = False
        raise server.gone()

    server.behave = dies
    with pytest.raises(ServerError):
        extract.run(server, data, shard=2, num_shards=4, limits=Limits(on_stop=command))
    assert (tmp_path / "ended").read_text() == "stopped\n"
    assert "is lost after 0 of 10" in json.loads((tmp_path / "copy.json").read_text())["reason"]


def test_twenty_thousand_samples_take_the_same_time_each_and_no_more_memory():
    """Ledger and writer on a stub of the server: the last thousands cost what the first ones did. In memory: it is not about disks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        done = subprocess.run([sys.executable, "-m", "tests.many_samples", folder, "20000"], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["samples"]) == (True, 20_000)
    early, late = median(found["seconds"][1:8]), median(found["seconds"][-7:])
    more = found["memory"][-1] - found["memory"][4]
    print(f"{found['rate']:,.0f} samples/s; CPU time of a thousand: {early:.2f} s early, {late:.2f} s late; {more / 2**20:.1f} MiB more")
    assert late < 1.5 * early + 0.1
    assert more < 15 * 2**20  # the safetensors package (0.8) keeps some 30 bytes of each tensor that it reads, 0.4 KiB a sample in all
