"""One shard on a real server: every sample once, verified, with its own rows; resumed, retried, and never mixed."""

import json
import os
import shutil
import signal
import sqlite3
from collections import Counter
from dataclasses import replace

import psutil
import pytest
import torch
import xxhash
import yaml
from datasets import load_from_disk
from safetensors.torch import load_file, save_file

from hsnb import extract, probe
from hsnb.cli import main
from hsnb.data import prepare
from hsnb.dumps import open_dump
from hsnb.errors import BoundaryError, ExtractError, ParamsError, ServerError
from hsnb.extract import asking
from hsnb.extract.canary import Canary
from hsnb.ledger import read_ledgers
from hsnb.server import Server
from hsnb.verify import verify
from tests.conftest import SETTINGS
from tests.helpers import prompt_ids, take
from tests.project import make_project
from tests.reference import relative_l2

pytestmark = pytest.mark.engine("tiny")

SAMPLES, SHARDS = 30, 4


@pytest.fixture
def server(engine):
    server = engine("tiny")
    probe.ensure(server)
    return server


@pytest.fixture
def data(server, tmp_path):
    """Thirty samples of 5 to 150 tokens, one too long and skipped."""
    file = tmp_path / "samples.jsonl"
    with open(file, "w") as out:
        for n in range(SAMPLES):
            ids = prompt_ids(300 if n == 8 else 5 + 5 * n, 500, seed=n)
            out.write(json.dumps({"input_ids": ids, "loss_mask": [0] * 2 + [1] * (len(ids) - 2)}) + "\n")
    deployment = server.deployment.model_copy(update={"data": server.deployment.data.model_copy(update={"source": str(file)})})
    return prepare(deployment, tmp_path / "data", max_length=200, too_long="skip")


def run(server, data, shard=0, num_shards=SHARDS, **options):
    return extract.run(server, data, shard=shard, num_shards=num_shards, **options)


def files(data) -> dict[int, str]:
    """Return {row: xxh3-128} of the published files."""
    paths = (data.path / "hidden_states").glob("hs_*.safetensors")
    return {int(p.stem[3:]): xxhash.xxh3_128_hexdigest(p.read_bytes()) for p in paths}


def test_a_shard_is_what_the_server_gives(server, data):
    before = set(server.spool.iterdir())
    result = run(server, data)
    rows = [r for r in range(0, SAMPLES, SHARDS) if r != 8]
    assert (result.samples, result.skipped, result.done_before, result.failed, result.ok) == (len(rows), 1, 0, {}, True)
    assert sorted(files(data)) == rows
    assert set(server.spool.iterdir()) == before  # every dump was freed
    table = load_from_disk(str(data.path))
    tokens = 0
    for row in rows:
        published = open_dump(data.path / f"hidden_states/hs_{row}.safetensors")
        assert torch.equal(published.token_ids, table[row]["input_ids"])
        assert (published.dtype, published.boundaries, published.final) == (torch.bfloat16, tuple(range(9)), "pre")
        alone = take(server, table[row]["input_ids"].tolist())
        assert (
            relative_l2(published.states(), alone.states()).max() < 2**-8
        )  # bf16 rounds by half of 2^-8 at most, batches move the last bit
        alone.path.unlink()
        tokens += published.num_tokens
    assert result.tokens == result.new_tokens == tokens
    entries = read_ledgers(data.path, json.loads((data.path / "hsnb.json").read_text())["fingerprint"])
    assert {r: e.xxh3_128 for r, e in entries.items()} == files(data)
    assert sum(e.bytes for e in entries.values()) == result.bytes == sum((data.path / e.file).stat().st_size for e in entries.values())
    about = json.loads((data.path / "hsnb.json").read_text())
    assert (about["target_layer_ids"], about["final"], about["layout"]) == (list(range(9)), "pre", "speculators")


def test_nothing_is_done_twice_and_the_number_of_shards_may_change(server, data):
    run(server, data)
    once = files(data)
    again = run(server, data)
    assert (again.done_before, again.new_tokens, again.samples) == (7, 0, 7)
    half = run(server, data, shard=0, num_shards=2)  # rows 0, 2, 4, ...: those of shard 0 of 4 are among them
    assert (half.samples, half.done_before) == (14, 7)
    assert {r: h for r, h in files(data).items() if r in once} == once
    rest = run(server, data, shard=1, num_shards=2)
    assert sorted(files(data)) == [r for r in range(SAMPLES) if r != 8]
    assert (rest.done_before, rest.ok) == (0, True)


def test_a_file_without_an_entry_does_not_count(server, data):
    run(server, data)
    with sqlite3.connect(data.path / "ledger" / "shard-0000-of-0004.sqlite") as db:
        db.execute("DELETE FROM done WHERE row = 4")
    (data.path / "hidden_states" / "hs_4.safetensors").write_bytes(b"half a file")
    (data.path / "hidden_states" / ".hs_4.999.tmp").write_bytes(b"left by a killed writer")
    (data.path / "ledger" / "shard-0000-of-0004.parquet").unlink()  # as if it had been killed before the export
    again = run(server, data)
    assert (again.done_before, again.new_tokens) == (6, 25)
    assert (data.path / "set-aside" / "hidden_states" / "hs_4.safetensors.aside").read_bytes() == b"half a file"
    assert open_dump(data.path / "hidden_states" / "hs_4.safetensors").num_tokens == 25
    assert list((data.path / "hidden_states").glob(".*")) == []


def test_published_files_that_are_gone_or_cut_are_extracted_again(server, data):
    once = run(server, data) and files(data)
    (data.path / "hidden_states" / "hs_4.safetensors").unlink()
    cut = data.path / "hidden_states" / "hs_12.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    again = run(server, data)
    assert (again.damaged, again.done_before, again.ok, again.new_tokens) == (2, 5, True, 25 + 65)
    assert sorted(files(data)) == sorted(once)
    assert open_dump(cut).num_tokens == 65


def test_a_final_that_the_layout_cannot_hold_is_refused_before_anything_starts(server):
    deployment = server.deployment
    extract.check_first(deployment, "speculators")
    post = deployment.model_copy(update={"capture": deployment.capture.model_copy(update={"final": "post"})})
    with pytest.raises(ParamsError, match="speculators applies the final norm itself"):
        extract.check_first(post, "speculators")
    beyond = deployment.model_copy(update={"capture": deployment.capture.model_copy(update={"boundaries": [9]})})
    with pytest.raises(BoundaryError, match=r"each in 0\.\.8"):
        extract.check_first(beyond, "speculators")


def damage(monkeypatch, times: int, edit) -> list[str]:
    """Change the dump of the sample of 25 tokens on disk, between the server and the client, `times` times."""
    collect, hit = asking.acollect, []

    async def damaged(spool, rid, layout):
        path = await collect(spool, rid, layout)
        tensors = load_file(path)
        if len(tensors["token_ids"]) == 25 and len(hit) < times:
            hit.append(rid)
            meta = open_dump(path).metadata
            save_file(edit({k: v.clone() for k, v in tensors.items()}), path, meta)
        return path

    monkeypatch.setattr(asking, "acollect", damaged)
    return hit


def nan(tensors):
    tensors["hidden_states"][3, 1, 0] = float("nan")
    return tensors


def test_a_damaged_dump_is_asked_for_again(server, data, monkeypatch):
    hit = damage(monkeypatch, 2, nan)
    result = run(server, data)
    assert (len(hit), result.ok, result.samples) == (2, True, 7)
    fingerprint = json.loads((data.path / "hsnb.json").read_text())["fingerprint"]
    assert {r: e.attempt for r, e in read_ledgers(data.path, fingerprint).items() if e.attempt > 1} == {4: 3}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (nan, "finite rows is 1 bad, first: row 3 of B_1"),
        (lambda t: {k: v[:-1].contiguous() for k, v in t.items()}, "rows is 24, expected 25"),
        (lambda t: {**t, "token_ids": t["token_ids"] + 1}, "token echo is other ids"),
        (lambda t: {**t, "hidden_states": t["hidden_states"].bfloat16()}, "dtype is bfloat16, expected float32"),
    ],
    ids=["NaN", "a lost row", "another request", "cast before it was checked"],
)
def test_a_sample_that_stays_damaged_is_owed_and_the_others_are_kept(edit, words, server, data, monkeypatch):
    hit = damage(monkeypatch, 99, edit)
    result = run(server, data)
    assert (len(hit), result.ok, list(result.failed)) == (3, False, [4])
    assert words in result.failed[4]
    assert sorted(files(data)) == [0, 12, 16, 20, 24, 28]
    with pytest.raises(ExtractError, match="shard 0: 1 of 7 samples owed, first row 4"):
        result.raise_if_owed()
    monkeypatch.undo()
    mended = run(server, data)
    assert (mended.ok, mended.done_before, mended.new_tokens) == (True, 6, 25)


def test_other_data_or_another_capture_is_refused(server, data, monkeypatch):
    run(server, data, limit=2)
    monkeypatch.setattr("hsnb.extract.job.require_receipt", lambda server: None)  # the armed entry below is not the receipt's
    armed = server.armed
    try:
        server.armed = [replace(armed[0], boundaries=[1, 2, 3])]
        with pytest.raises(ExtractError, match=r"boundaries was \[0, 1, .* and is \[1, 2, 3\]"):
            run(server, data)
    finally:
        server.armed = armed
    with pytest.raises(ExtractError, match="data was"):
        run(server, replace(data, fingerprint="other"))
    assert sorted(files(data)) == [0, 4]
    assert run(server, data).ok


def test_a_server_without_a_pass_is_refused(server, data):
    receipt = server.spool / "receipt.json"
    kept = receipt.read_text()
    receipt.unlink()
    with pytest.raises(ExtractError, match="no probe of this very server, expected a PASS"):
        run(server, data)
    receipt.write_text(kept)
    assert run(server, data, limit=1).ok


def test_what_must_not_start(server, data, monkeypatch):
    monkeypatch.setattr("hsnb.extract.job.require_receipt", lambda server: None)  # the armed entries below are not the receipt's
    with pytest.raises(ParamsError, match=r"0\.\.3 \(4 shards\)"):
        run(server, data, shard=4)
    with pytest.raises(ParamsError, match="layout is 'spec'"):
        run(server, data, layout="spec")
    armed = server.armed
    try:
        server.armed = [replace(armed[0], final="post")]
        with pytest.raises(ParamsError, match="speculators applies the final norm itself"):
            run(server, data)
    finally:
        server.armed = armed
    info = dict(server.info)
    try:
        server.info["context_length"] = 100
        with pytest.raises(ExtractError, match=r"row 28 has 145 tokens, expected at most 93"):
            run(server, data)
    finally:
        server.info = info
    assert files(data) == {}


@pytest.mark.parametrize("in_flight", [1, 40, 100000])
def test_any_bound_on_what_is_in_flight_gives_the_same_rows(in_flight, server, data):
    result = run(server, data, shard=3, in_flight_tokens=in_flight)
    assert (result.ok, result.samples, sorted(files(data))) == (True, 7, [3, 7, 11, 15, 19, 23, 27])


def test_one_request_in_flight_gives_the_same_bytes_each_time(server, data):
    run(server, data, in_flight_tokens=1)
    once = files(data)
    for path in [*(data.path / "hidden_states").iterdir(), *(data.path / "ledger").iterdir()]:
        path.unlink()
    run(server, data, in_flight_tokens=1)
    assert files(data) == once


def test_the_canary_is_the_same_on_this_server_and_another_prompt_is_not(server, data):
    result = run(server, data, shard=1)
    assert (result.canaries, result.canaries_blurred, result.other_requests) == (2, 0, 0)
    canary = Canary.load(data.path / "ledger", "float32")
    first = open_dump(next((data.path / "ledger").glob("canary*.safetensors")))
    other = take(server, prompt_ids(first.num_tokens, 500, seed=99))
    check = canary.check(other)
    other.path.unlink()
    assert not check.ok and "canary" in check.name and float(check.value.split()[0]) > 0.1
    assert canary.check(first).ok


# -- verify and redo ---------------------------------------------------------------------------------------------------


def test_what_verify_finds_redo_mends(server, data, tmp_path, monkeypatch):
    """A flipped bit, a truncated file, a file of another run, a sample with NaN, a file that is gone, and one that is nobody's."""
    project = make_project(tmp_path / "project")
    (project / "params" / "all.yaml").write_text(yaml.safe_dump(SETTINGS["tiny"]))
    monkeypatch.setenv("HSNB_ROOT", str(project))
    run_folder = project / "outputs" / "x"
    run_folder.mkdir()
    data.path.rename(run_folder / "data")
    data = replace(data, path=run_folder / "data")
    extract.run(server, data, num_shards=1)
    good, states = files(data), data.path / "hidden_states"
    assert verify(data.path).ok

    flipped = bytearray((states / "hs_3.safetensors").read_bytes())
    flipped[-7] ^= 1
    (states / "hs_3.safetensors").write_bytes(flipped)
    os.truncate(states / "hs_5.safetensors", 1000)
    (states / "hs_7.safetensors").write_bytes((states / "hs_9.safetensors").read_bytes())
    tensors, meta = load_file(states / "hs_11.safetensors"), open_dump(states / "hs_11.safetensors").metadata
    tensors["hidden_states"][4, 2, 1] = float("nan")
    save_file(tensors, states / "hs_11.safetensors", meta)
    (states / "hs_13.safetensors").unlink()
    (states / "hs_999.safetensors").write_bytes(b"whose?")

    assert main(["verify", str(run_folder), "--keep", "--json"]) == 1
    kept = verify(data.path, keep=True)
    assert sorted(kept.damaged) == [3, 5, 7, 11, 13] and kept.foreign == ["hidden_states/hs_999.safetensors"]
    assert "its checksum is" in kept.damaged[3] and "a flipped bit" in kept.damaged[3]
    assert "truncated" in kept.damaged[5] and "1,000 bytes" in kept.damaged[5]
    assert "token echo is other ids" in kept.damaged[7] or "rows is" in kept.damaged[7]
    assert "finite rows is 1 bad, first: row 4 of B_2" in kept.damaged[11]
    assert kept.damaged[13] == "its file is gone"
    assert read_ledgers(data.path).keys() == good.keys()  # only reported

    assert main(["verify", str(run_folder)]) == 1
    assert sorted(read_ledgers(data.path)) == sorted(good.keys() - {3, 5, 7, 11, 13})
    assert main(["redo", "params/all.yaml", "--run", "x", "--server", server.url, "--json"]) == 0
    (states / "hs_999.safetensors").unlink()
    assert main(["verify", str(data.path)]) == 0
    assert {r: h for r, h in files(data).items() if r not in (3, 5, 7, 11, 13)} == {
        r: h for r, h in good.items() if r not in (3, 5, 7, 11, 13)
    }
    for row in (3, 5, 7, 11, 13):
        assert relative_l2(open_dump(states / f"hs_{row}.safetensors").states(), load_states(server, data, row)).max() < 2**-8
    assert main(["redo", "params/all.yaml", "--run", "x"]) == 0  # nothing is owed: no server is started


def load_states(server, data, row):
    dump = take(server, load_from_disk(str(data.path))[row]["input_ids"].tolist())
    states = dump.states()
    dump.path.unlink()
    return states


# -- several servers, lost servers -------------------------------------------------------------------------------------


def test_two_servers_share_a_shard_and_one_that_is_lost_is_started_again(server, data, tmp_path, engine_starts):
    """The second one is killed while it works: it comes back with a new receipt, and nothing is done twice."""
    with Server.start(server.deployment, log_dir=tmp_path) as second:
        engine_starts.note("tiny, a second server", second.sglang_version)
        probe.ensure(second)
        first_url = second.url

        async def killed(spool, rid, layout):
            path = await collect(spool, rid, layout)
            if "canary" not in rid and str(spool).endswith(str(second.port)):
                hit.append(rid)
                if len(hit) == 2:
                    psutil.Process(second.armed[0].pid).kill()
            return path

        collect, hit = asking.acollect, []
        asking.acollect = killed
        try:
            result = run([server, second], data, num_shards=1)
        finally:
            asking.acollect = collect
        engine_starts.note("tiny, a second server again", second.sglang_version)
        assert (result.ok, result.restarts, result.samples) == (True, 1, SAMPLES - 1)
        assert second.running() and second.url != first_url
        assert probe.require_receipt(second).verdict == "PASS"
        assert verify(data.path).ok
        entries, published = read_ledgers(data.path), files(data)
        assert sorted(entries) == sorted(published) == [r for r in range(SAMPLES) if r != 8]  # nothing is missing
        assert {r: e.xxh3_128 for r, e in entries.items()} == published
        assert sum(result.by_server.values()) == SAMPLES - 1  # and nothing was done twice
        by = Counter(e.server for e in entries.values())
        assert by.keys() <= {server.url, first_url, second.url}
        assert by[server.url] >= 5 and by[first_url] >= 2  # each did a share
        assert list(second.spool.glob("*.safetensors")) == []

        os.kill(second.armed[0].pid, signal.SIGSTOP)  # a hang: the port answers, nothing runs
        late = replace(data, path=tmp_path / "late")
        shutil.copytree(data.path, late.path, ignore=shutil.ignore_patterns("hs_*", "ledger"))
        with pytest.raises(ServerError, match=r"no forward for 3 s while \d+ requests wait"):
            extract.run(second, late, num_shards=4, limits=extract.Limits(hang_s=3, restarts=0))
        assert read_ledgers(late.path) == files(late) == {}
        os.kill(second.armed[0].pid, signal.SIGCONT)
