"""What the plug-in writes is what the readers read, in both layouts; what is not a whole dump is refused."""

import json
import os
import pickle
import shutil
import threading

import pytest
import torch
from safetensors.torch import save_file

from hsnb.dumps import UNKNOWN, dump_path, list_dumps, open_dump
from hsnb.errors import DumpError
from hsnb.patch.armed import MAX_FAILURES, Armed, ArmedFile, read_armed, refuse
from hsnb.patch.spool import LAYOUTS, bits, dtype_name, remove_leftovers

S, K, H = 10, 3, 16
META = {
    "hsnb_format": "1", "boundaries": "[2, 4, 6]", "final": "pre", "dtype": "bfloat16", "model": "m", "sglang_version": "0.5.23",
    "patch_version": "0.1.0", "tp_rank": "0", "tp_size": "1",
}  # fmt: skip


def written(spool, layout="safetensors", rid="hsnb-1", dtype=torch.bfloat16, chunks=((0, 4), (4, 10)), kind="data"):
    torch.manual_seed(len(rid))
    states, ids = torch.randn(S, K + 1, H).to(dtype), torch.arange(100, 100 + S)
    request = LAYOUTS[layout](rid, S, kind, K + 1, H, dtype_name(dtype), {**META, "dtype": dtype_name(dtype)})
    request.begin(spool)
    for a, b in chunks:
        request.put(a, bits(states)[a:b], ids.numpy()[a:b])
    assert request.whole
    request.publish(spool)
    return states, ids


@pytest.mark.parametrize("layout", ["safetensors", "pt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_written_is_read(layout, dtype, tmp_path):
    states, ids = written(tmp_path, layout, dtype=dtype)
    dump = open_dump(dump_path(tmp_path, "hsnb-1", layout))
    assert (dump.request_id, dump.boundaries, dump.final, dump.kind, dump.dtype) == ("hsnb-1", (2, 4, 6), "pre", "data", dtype)
    assert torch.equal(dump.states(), states)
    assert torch.equal(dump.token_ids, ids)
    for column, boundary in enumerate([2, 4, 6, "final"]):
        assert torch.equal(dump.state(boundary), states[:, column])
    assert dump.nbytes == S * (K + 1) * H * dtype.itemsize
    chunks = dump.metadata["chunks"]
    assert (json.loads(chunks) if isinstance(chunks, str) else chunks) == [[0, 4], [4, 10]]
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_the_pt_layout_to_the_field(tmp_path):
    states, ids = written(tmp_path, "pt")
    folder = tmp_path / "req_0"
    assert sorted(p.name for p in folder.iterdir()) == ["aux_0.pt", "aux_1.pt", "aux_2.pt", "final.pt", "metadata.json"]
    meta = json.loads((folder / "metadata.json").read_text())
    keys = ("request_id", "req", "num_tokens", "layer_ids", "boundaries", "final", "dtype", "token_ids", "kind")
    assert {k: meta[k] for k in keys} == {
        "request_id": "hsnb-1", "req": 0, "num_tokens": S, "layer_ids": [2, 4, 6], "boundaries": [2, 4, 6], "final": "pre",
        "dtype": "bfloat16", "token_ids": ids.tolist(), "kind": "data",
    }  # fmt: skip
    aux = torch.load(folder / "aux_1.pt", weights_only=True)
    assert torch.equal(aux, states[:, 1])
    assert aux.untyped_storage().nbytes() == S * H * 2  # a view would have written all columns


def test_n_goes_on_after_the_folder_is_emptied(tmp_path):
    for _ in range(3):
        written(tmp_path, "pt")
    for n in range(3):
        shutil.rmtree(tmp_path / f"req_{n}")
    written(tmp_path, "pt")
    assert [p.name for p in list_dumps(tmp_path)] == ["req_3"]
    (tmp_path / ".next").unlink()
    written(tmp_path, "pt")
    assert [p.name for p in list_dumps(tmp_path)] == ["req_3", "req_4"]


def test_rows_come_once_and_in_order(tmp_path):
    request = LAYOUTS["safetensors"]("hsnb-1", S, "data", K + 1, H, "float32", META)
    request.begin(tmp_path)
    states, ids = bits(torch.zeros(S, K + 1, H)), torch.arange(S).numpy()
    with pytest.raises(ValueError, match=r"rows 4\.\.9 arrived, expected row 0 of 10"):
        request.put(4, states[4:], ids[4:])
    request.put(0, states[:4], ids[:4])
    with pytest.raises(ValueError, match=r"rows 0\.\.3 arrived, expected row 4"):
        request.put(0, states[:4], ids[:4])
    with pytest.raises(ValueError, match=r"rows 4\.\.13 arrived"):
        request.put(4, states, ids)
    with pytest.raises(ValueError, match="states are"):
        request.put(4, states[4:, :, :32], ids[4:])
    assert not request.whole
    request.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_request_id_is_never_a_path(tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    for layout in LAYOUTS:
        written(spool, layout, rid="hsnb-../../../x/" + "y" * 300)
        assert open_dump(dump_path(spool, "hsnb-../../../x/" + "y" * 300, layout)).request_id.startswith("hsnb-../")
    assert [p.name for p in tmp_path.iterdir()] == ["spool"]


def test_a_full_disk_is_noticed_before_the_first_row(tmp_path, monkeypatch):
    def full(fd, offset, length):  # stands in for a file system without room; a real one is filled in the engine tests
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    request = LAYOUTS["safetensors"]("hsnb-1", S, "data", K + 1, H, "float32", META)
    with pytest.raises(OSError, match="No space left"):
        request.begin(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_server_go(tmp_path):
    for layout in LAYOUTS:
        LAYOUTS[layout]("hsnb-1", S, "data", K + 1, H, "float32", META).begin(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- files of others, and damaged ones --------------------------------------------------------------------------


def test_unlabelled_files_stay_unknown(tmp_path):
    file = tmp_path / "cmpl-1.safetensors"  # vLLM's connector and speculators write just these two tensors
    save_file({"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.arange(3)}, file)
    dump = open_dump(file)
    assert (dump.boundaries, dump.final, dump.request_id) == (UNKNOWN, UNKNOWN, "cmpl-1")
    assert torch.equal(dump.column(-1), torch.ones(3, 4))
    with pytest.raises(DumpError, match=r"boundary 2 asked of boundaries unknown.*read it by \.column"):
        dump.state(2)
    assert "unknown" in dump._repr_html_()


def test_the_first_deployments_folder_stays_unknown(tmp_path):
    written(tmp_path, "pt")
    (tmp_path / "req_0" / "metadata.json").write_text(json.dumps({"num_tokens": S, "layer_ids": [3, 31, 59]}))
    dump = open_dump(tmp_path / "req_0")
    assert (dump.boundaries, dump.final, dump.token_ids, dump.columns) == (UNKNOWN, UNKNOWN, None, K + 1)
    (tmp_path / "req_0" / "metadata.json").unlink()
    assert open_dump(tmp_path / "req_0").boundaries == UNKNOWN


def test_a_boundary_that_is_not_held(tmp_path):
    written(tmp_path)
    with pytest.raises(DumpError, match=r"boundary 3 asked of boundaries \[2, 4, 6\].*ask for one of \[2, 4, 6\]"):
        open_dump(dump_path(tmp_path, "hsnb-1")).state(3)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(keep, tmp_path):
    written(tmp_path)
    file = dump_path(tmp_path, "hsnb-1")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DumpError, match="a truncated or foreign file"):
        open_dump(file)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"x": torch.ones(2)}, "expected hidden_states and token_ids"),
        ({"hidden_states": torch.ones(3, 4), "token_ids": torch.arange(3)}, r"expected \[S,K\+1,H\]"),
        ({"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.arange(2)}, r"token_ids \[2\]"),
    ],
)
def test_foreign_safetensors_are_refused(tensors, words, tmp_path):
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(DumpError, match=words):
        open_dump(tmp_path / "x.safetensors")


def test_labels_must_fit_the_columns(tmp_path):
    save_file({"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.arange(3)}, tmp_path / "x.safetensors", {"boundaries": "[2, 4, 6]"})
    with pytest.raises(DumpError, match=r"2 columns for boundaries \[2, 4, 6\]"):
        open_dump(tmp_path / "x.safetensors")


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/hsnb-evil",))


@pytest.mark.parametrize("payload", ["pickle", "torch", "number", "truncated", "shape", "missing", "ids"])
def test_damaged_pt_folders_are_refused_and_nothing_runs(payload, tmp_path):
    written(tmp_path, "pt")
    folder, words = tmp_path / "req_0", "a truncated or foreign file"
    file = folder / "aux_1.pt"
    match payload:
        case "pickle":
            file.write_bytes(pickle.dumps(Evil()))
        case "torch":
            torch.save(Evil(), file)
        case "number":
            torch.save(7, file)
        case "truncated":
            file.write_bytes(file.read_bytes()[:200])
        case "shape":
            torch.save(torch.ones(S - 1, H).bfloat16(), file)
            words = "tensors of different shapes"
        case "missing":
            file.unlink()
            words = "expected aux_0.pt, aux_1.pt"
        case "ids":
            meta = json.loads((folder / "metadata.json").read_text())
            (folder / "metadata.json").write_text(json.dumps({**meta, "token_ids": [1, 2]}))
            words = "2 token ids for 10 rows"
    with pytest.raises(DumpError, match=words):
        open_dump(folder)
    assert not os.path.exists("/tmp/hsnb-evil")


def test_what_is_not_there_or_of_another_kind(tmp_path):
    with pytest.raises(DumpError, match="no such dump"):
        open_dump(tmp_path / "req_7")
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(DumpError, match=r"a \.npy"):
        open_dump(tmp_path / "x.npy")
    assert dump_path(tmp_path, "hsnb-none") is None


# -- armed files ------------------------------------------------------------------------------------------------


def test_armed_is_read_while_it_is_rewritten(tmp_path):
    file = ArmedFile(tmp_path, Armed(state="armed", rank=1, boundaries=[2, 4], env={"NCCL_ALGO": "Ring"}))
    stop = threading.Event()

    def write():
        while not stop.is_set():
            file.count("captured")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [read_armed(tmp_path)[0].counts.get("captured", 0) for _ in range(200)]
    finally:
        stop.set()
        writer.join()
    assert seen == sorted(seen)
    assert read_armed(tmp_path)[0] == file.armed


def test_armed_keeps_the_latest_failures_within_its_room(tmp_path):
    file = ArmedFile(tmp_path, Armed(state="armed"))
    size = file.path.stat().st_size
    for n in range(MAX_FAILURES + 10):
        file.fail(f"hsnb-{n}-" + "x" * 500, "ü\n" * 500)
    armed = read_armed(tmp_path)[0]
    assert armed.counts == {"captured": 0, "failed": MAX_FAILURES + 10}
    assert len(armed.failures) <= MAX_FAILURES
    assert armed.failures[-1]["request_id"].startswith(f"hsnb-{MAX_FAILURES + 9}-")
    assert file.path.stat().st_size == size  # laid out once: a full disk cannot stop an update


def test_a_refusal_can_be_read(tmp_path):
    refuse(tmp_path / "spool", "SGLang 0.5.10, expected 0.5.17 or newer")
    (armed,) = read_armed(tmp_path / "spool")
    assert (armed.state, armed.error) == ("refused", "SGLang 0.5.10, expected 0.5.17 or newer")
    assert read_armed(tmp_path / "nowhere") == []
