"""Finished files go to a store: uploaded, compared, freed; nothing is counted that is not there, and a run goes on anywhere."""

import json
import shutil
import uuid

import fsspec
import pytest
import xxhash

from hsnb import extract
from hsnb.errors import ExtractError, ParamsError
from hsnb.extract import Limits
from hsnb.ledger import Ledger, home, read_ledgers
from hsnb.params import Deployment
from hsnb.planning import plan
from hsnb.storage import OTHERS, Store, adopt
from hsnb.verify import redo_rows, verify
from tests.conftest import tiny
from tests.stub import StubServer, make_data

LENGTHS = [20 + n for n in range(12)]


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A store of its own: fsspec's memory, which has no real folders, and the local file system."""
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/store"


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server").mkdir()
    return StubServer(tmp_path / "server")


def machine(tmp_path, name: str):
    """Return the data set as a machine of its own has it: outputs/run/data on its own disk."""
    folder = tmp_path / name / "run" / "data"
    folder.parent.mkdir(parents=True)
    return make_data(folder, LENGTHS)


def run(server, data, url, shard=0, num_shards=2, **options):
    return extract.run(server, data, shard=shard, num_shards=num_shards, limits=Limits(store=url, **options.pop("limits", {})), **options)


def at(url: str) -> dict[str, bytes]:
    """Return {file: content} of what is at the store."""
    fs, root = fsspec.core.url_to_fs(f"{url}/run")
    fs.invalidate_cache()
    return {name[len(fs._strip_protocol(root)) + 1 :]: fs.cat_file(name) for name in fs.find(root)} if fs.exists(root) else {}


def states(data) -> list[str]:
    return sorted(p.name for p in (data.path / "hidden_states").glob("*")) if (data.path / "hidden_states").exists() else []


def test_finished_files_are_at_the_store_and_freed_here(server, tmp_path, url):
    data = machine(tmp_path, "a")
    result = run(server, data, url)
    assert (result.ok, result.samples, states(data)) == (True, 6, [])
    there = at(url)
    entries = read_ledgers(data.path)
    assert sorted(entries) == [0, 2, 4, 6, 8, 10]
    assert {e.file: e.xxh3_128 for e in entries.values()} == {e.file: xxhash.xxh3_128_hexdigest(there[e.file]) for e in entries.values()}
    assert sum(len(there[e.file]) for e in entries.values()) == result.bytes
    assert json.loads(there["hsnb.json"])["store"] == f"{url}/run"
    assert "ledger/shard-0000-of-0002.parquet" in there and any(f.endswith(".arrow") for f in there)

    asked = len(server.asked)
    again = run(server, data, url)
    assert (again.done_before, again.new_tokens, again.damaged, again.tokens) == (6, 0, 0, result.tokens)
    assert len(server.asked) == asked  # nothing was computed again, nor fetched
    run(server, data, url, shard=1)
    whole = verify(data.path)
    assert whole.ok and whole.entered == 12 and whole.bytes == sum(e.bytes for e in read_ledgers(data.path).values()), whole.text()
    assert states(data) == []


def test_another_machine_goes_on_where_the_first_one_was_lost(server, tmp_path, url):
    first, second = machine(tmp_path, "a"), machine(tmp_path, "b")
    run(server, first, url, limit=3)
    shutil.rmtree(first.path)
    asked = len(server.asked)
    result = run(server, second, url)
    assert (result.ok, result.done_before, result.samples) == (True, 3, 6)
    assert len([r for r in server.asked[asked:] if "canary" not in r]) == 3
    third = machine(tmp_path, "c")
    assert run(server, third, url).done_before == 6  # the export that went up last has the entries of both
    run(server, third, url, shard=1)
    assert verify(third.path).ok


def test_a_cut_upload_leaves_the_file_and_the_next_run_sends_it(server, tmp_path, url, monkeypatch):
    data = machine(tmp_path, "a")
    monkeypatch.setattr("hsnb.storage.TRIES", 2)
    monkeypatch.setattr("hsnb.storage.WAIT_S", 0.01)
    whole = Store._put

    def cut(self, file):
        whole(self, file)
        if file.endswith("hs_4.safetensors"):
            self.fs.pipe_file(f"{self.root}/{file}", (self.folder / file).read_bytes()[:-1])

    monkeypatch.setattr(Store, "_put", cut)
    with pytest.raises(ExtractError, match=r"hs_4\.safetensors.*came back as"):
        run(server, data, url)
    assert "hs_4.safetensors" in states(data)
    monkeypatch.setattr(Store, "_put", whole)
    asked = len(server.asked)
    result = run(server, data, url)
    assert result.ok and states(data) == [] and result.done_before >= 1
    assert not [r for r in server.asked[asked:] if "-4-" in r]  # it is sent, not computed again
    assert xxhash.xxh3_128_hexdigest(at(url)["hidden_states/hs_4.safetensors"]) == read_ledgers(data.path)[4].xxh3_128


def test_damage_at_the_store_is_found_taken_off_and_made_again(server, tmp_path, url):
    data = machine(tmp_path, "a")
    for shard in (0, 1):
        run(server, data, url, shard=shard)
    fs, root = fsspec.core.url_to_fs(f"{url}/run")
    for file, spoil in {"hs_3": lambda b: b[:-1] + bytes([b[-1] ^ 1]), "hs_6": lambda b: b[:-7]}.items():
        name = f"{root}/hidden_states/{file}.safetensors"
        fs.pipe_file(name, spoil(fs.cat_file(name)))
    found = verify(data.path)
    assert sorted(found.damaged) == [3, 6] and found.withdrawn and redo_rows(data) == [3, 6]
    assert "hidden_states/hs_3.safetensors" not in at(url)
    extract.run(server, data, only=redo_rows(data), limits=Limits(store=url))
    assert verify(data.path).ok
    other = machine(tmp_path, "b")
    assert run(server, other, url).done_before == run(server, other, url, shard=1).done_before == 6


def test_other_settings_are_refused_at_the_same_store(server, tmp_path, url):
    run(server, machine(tmp_path, "a"), url)
    folder = tmp_path / "b" / "run" / "data"
    folder.parent.mkdir(parents=True)
    with pytest.raises(ExtractError, match="tokenizer was 't' and is 'other'"):
        run(server, make_data(folder, LENGTHS, tokenizer="other"), url)


def test_a_url_that_nothing_opens_is_refused_by_its_name(server, tmp_path):
    with pytest.raises(ParamsError, match=r"extract\.store nosuch://x"):
        run(server, machine(tmp_path, "a"), "nosuch://x")


def test_a_shard_that_moves_to_another_machine_keeps_its_entries(server, tmp_path):
    """Without a store: a shared disk, whose sqlite ledgers lie on each machine's own."""
    data = machine(tmp_path, "a")
    extract.run(server, data, shard=0, num_shards=2, limit=3)
    for path in home(data.path).glob("*.sqlite*"):  # the machine is gone; its export and its files are on the shared disk
        path.unlink()
    asked = len(server.asked)
    extract.run(server, data, shard=0, num_shards=2)
    assert len([r for r in server.asked[asked:] if "canary" not in r]) == 3
    for path in home(data.path).glob("*.sqlite*"):
        path.unlink()
    assert sorted(read_ledgers(data.path)) == [0, 2, 4, 6, 8, 10]  # in the export alone


def test_what_failed_later_than_it_was_entered_stays_owed(server, tmp_path):
    data = machine(tmp_path, "a")
    extract.run(server, data, shard=0, num_shards=2)
    name = "shard-0000-of-0002"
    shutil.copy(data.path / f"ledger/{name}.parquet", data.path / f"ledger/{name}{OTHERS}.parquet")
    with Ledger(home(data.path) / f"{name}.sqlite", {}) as ledger:
        ledger.fail(2, "damaged", 1, "2999-01-01T00:00:00.000+00:00")
        assert adopt(ledger, data.path) == 0 and 2 not in ledger.done()
        ledger.fail(2, "damaged", 1, "1999-01-01T00:00:00.000+00:00")
        assert adopt(ledger, data.path) == 1 and 2 in ledger.done()


def test_a_disk_too_small_for_the_whole_is_enough_with_a_store(tmp_path):
    tokens = 10**13
    with pytest.raises(ExtractError, match="free at"):
        plan(Deployment.parse(tiny(), origin="test"), tmp_path, tokens=tokens).require()
    tree = {**tiny(), "extract": {"store": "memory://x"}}
    planned = plan(Deployment.parse(tree, origin="test"), tmp_path, tokens=tokens)
    assert planned.require() is planned and 0 < planned.output.need < 10**9
