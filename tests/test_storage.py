"""Finished files go to a store: uploaded, compared, freed; nothing is counted that is not there, and a run goes on anywhere."""

import json
import shutil
import uuid
from types import SimpleNamespace

import fsspec
import pytest
import xxhash

from hsnb import extract
from hsnb.cli import main
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


class Killed(BaseException):
    """Caught by no retry: nothing more is uploaded, as by a process that was killed."""


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
    folder = tmp_path / name / "outputs" / "run" / "data"
    folder.parent.mkdir(parents=True)
    return make_data(folder, LENGTHS)


def spoil(url: str, row: int, how) -> None:
    """Change a sample's file at the store by `how(bytes) -> bytes`."""
    fs, root = fsspec.core.url_to_fs(f"{url}/run")
    name = f"{root}/hidden_states/hs_{row}.safetensors"
    fs.pipe_file(name, how(fs.cat_file(name)))


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def asked_since(server, before: int) -> list[int]:
    """Return the rows that the server was asked for since so many requests."""
    return sorted(int(rid.split("-")[-2]) for rid in server.asked[before:] if "canary" not in rid)


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


def test_a_machine_killed_in_an_upload_leaves_half_a_file_that_never_counts(server, tmp_path, url, monkeypatch):
    """Its disk is gone with it. What it had sent stays; the half file and what only it had entered are extracted again elsewhere."""
    first, second = machine(tmp_path, "a"), machine(tmp_path, "b")
    monkeypatch.setattr("hsnb.storage.EXPORTS_S", 0.0)  # the ledger follows each file, and tells of some that are not there yet
    whole = Store._put

    def dies(self, file):
        if file.endswith("hs_6.safetensors"):
            self.fs.pipe_file(f"{self.root}/{file}", (self.folder / file).read_bytes()[:100])
            raise Killed("the machine is gone")
        whole(self, file)

    monkeypatch.setattr(Store, "_put", dies)
    with pytest.raises((Killed, ExtractError), match="the machine is gone"):
        run(server, first, url, in_flight_tokens=1)
    shutil.rmtree(first.path)
    monkeypatch.setattr(Store, "_put", whole)
    sent = {int(f.split("_")[-1].split(".")[0]) for f in at(url) if f.startswith("hidden_states")} - {6}
    assert sent and len(at(url)["hidden_states/hs_6.safetensors"]) == 100
    before = len(server.asked)
    result = run(server, second, url)
    assert (result.ok, result.done_before) == (True, len(sent))
    assert asked_since(server, before) == sorted({0, 2, 4, 6, 8, 10} - sent)
    run(server, second, url, shard=1)
    assert verify(second.path).ok


def test_damage_at_the_store_is_found_taken_off_and_made_again(server, tmp_path, url):
    data = machine(tmp_path, "a")
    for shard in (0, 1):
        run(server, data, url, shard=shard)
    spoil(url, 3, flip)
    spoil(url, 6, lambda content: content[:-7])
    kept = verify(data.path, keep=True)
    assert (sorted(kept.damaged), kept.withdrawn, redo_rows(data)) == ([3, 6], False, [])
    assert "a flipped bit" in kept.damaged[3] and "bytes" in kept.damaged[6]
    found = verify(data.path)
    assert sorted(found.damaged) == [3, 6] and found.withdrawn and redo_rows(data) == [3, 6]
    assert not {f"hidden_states/hs_{row}.safetensors" for row in (3, 6)} & at(url).keys()
    extract.run(server, data, only=redo_rows(data), limits=Limits(store=url))
    assert verify(data.path).ok
    other = machine(tmp_path, "b")
    assert run(server, other, url).done_before == run(server, other, url, shard=1).done_before == 6


def test_hsnb_verify_and_redo_mend_a_store_from_a_machine_that_extracted_nothing(server, tmp_path, url, monkeypatch, capsys):
    first, second = machine(tmp_path, "a"), machine(tmp_path, "b")
    for shard in (0, 1):
        run(server, first, url, shard=shard)
    shutil.copy(first.path / "hsnb.json", second.path)  # all that it has besides the data set
    spoil(url, 5, flip)
    fs, root = fsspec.core.url_to_fs(f"{url}/run")
    fs.pipe_file(f"{root}/hidden_states/hs_77.safetensors", b"whose?")

    monkeypatch.setenv("HSNB_ROOT", str(tmp_path / "b"))
    monkeypatch.setattr("hsnb.commands.redo.deployment_of", lambda p: SimpleNamespace(extract=Limits(store=url)))
    monkeypatch.setattr("hsnb.commands.redo.open_servers", lambda p, deployment, prove: [server])
    assert main(["verify", str(second.path)]) == 1
    told = capsys.readouterr().out
    assert "damaged: row 5: its checksum is" in told and f"no ledger has {url}/run/hidden_states/hs_77.safetensors" in told
    before = len(server.asked)
    assert main(["redo", "params/x.yaml", "--run", "run"]) == 0
    assert asked_since(server, before) == [5]
    fs.rm(f"{root}/hidden_states/hs_77.safetensors")
    assert main(["verify", str(second.path)]) == 0
    assert main(["redo", "params/x.yaml", "--run", "run"]) == 0 and "nothing is owed" in capsys.readouterr().out

    assert verify(first.path).ok  # whose own ledger still has the older entry
    again = run(server, first, url, shard=1)
    assert (again.done_before, again.new_tokens) == (6, 0) and verify(first.path).ok


def test_what_was_withdrawn_elsewhere_is_owed_here_too(server, tmp_path, url):
    """The machine that extracted it still has it entered, in a ledger of its own."""
    first, second = machine(tmp_path, "a"), machine(tmp_path, "b")
    run(server, first, url)
    shutil.copy(first.path / "hsnb.json", second.path)
    spoil(url, 4, flip)
    assert verify(second.path).withdrawn
    assert "hidden_states/hs_4.safetensors" not in at(url) and redo_rows(first) == [4]
    before = len(server.asked)
    assert run(server, first, url).done_before == 5 and asked_since(server, before) == [4]
    assert redo_rows(second) == []


def test_other_settings_are_refused_at_the_same_store(server, tmp_path, url):
    run(server, machine(tmp_path, "a"), url)
    folder = tmp_path / "b" / "run" / "data"
    folder.parent.mkdir(parents=True)
    with pytest.raises(ExtractError, match="tokenizer was 't' and is 'other'"):
        run(server, make_data(folder, LENGTHS, tokenizer="other"), url)


def test_a_ledger_of_another_run_is_refused_by_verify(server, tmp_path):
    data, other = machine(tmp_path, "a"), make_data(tmp_path / "other", LENGTHS, tokenizer="other")
    extract.run(server, data, num_shards=2)
    extract.run(server, other, shard=1, num_shards=2)
    assert verify(data.path).missing == 6
    shutil.copy(other.path / "ledger/shard-0001-of-0002.parquet", data.path / "ledger")
    with pytest.raises(ExtractError, match="tokenizer was 'other' and is 't'"):
        verify(data.path)


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


def test_a_failure_that_another_machine_found_is_adopted_with_its_reason(server, tmp_path):
    data = machine(tmp_path, "a")
    extract.run(server, data, shard=0, num_shards=2)
    name, shelf = "shard-0000-of-0002", home(data.path)
    shutil.copy(shelf / f"{name}.sqlite", tmp_path / f"{name}.sqlite")
    with Ledger(tmp_path / f"{name}.sqlite", {}) as elsewhere:
        elsewhere.fail(8, "NaN in row 3", 2, "2999-01-01T00:00:00.000+00:00")
        elsewhere.export(data.path / "ledger")
    with Ledger(shelf / f"{name}.sqlite", {}) as ledger:
        assert adopt(ledger, data.path) == 0
        assert sorted(ledger.done()) == [0, 2, 4, 6, 10] and ledger.failed()[8].error == "NaN in row 3"
        assert adopt(ledger, data.path) == 0


def test_verify_on_a_machine_with_an_older_ledger_keeps_what_another_one_entered(server, tmp_path):
    """A shared disk: the shard was begun here and ended there. The export here says more than the sqlite file here."""
    data = machine(tmp_path, "a")
    extract.run(server, data, shard=0, num_shards=2, limit=2)
    mine = home(data.path) / "shard-0000-of-0002.sqlite"
    shutil.copy(mine, tmp_path / "kept")
    extract.run(server, data, shard=0, num_shards=2)
    shutil.copy(tmp_path / "kept", mine)
    path = data.path / "hidden_states" / "hs_0.safetensors"
    path.write_bytes(flip(path.read_bytes()))
    found = verify(data.path)
    assert sorted(found.damaged) == [0] and found.withdrawn and found.entered == 5
    mine.unlink()
    assert sorted(read_ledgers(data.path)) == [2, 4, 6, 8, 10] and redo_rows(data) == [0]


def test_a_disk_too_small_for_the_whole_is_enough_with_a_store(tmp_path):
    tokens = 10**13
    with pytest.raises(ExtractError, match="free at"):
        plan(Deployment.parse(tiny(), origin="test"), tmp_path, tokens=tokens).require()
    tree = {**tiny(), "extract": {"store": "memory://x"}}
    planned = plan(Deployment.parse(tree, origin="test"), tmp_path, tokens=tokens)
    assert planned.require() is planned and 0 < planned.output.need < 10**9
