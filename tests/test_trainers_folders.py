"""Folders of every tool's layout are found by name, read lazily, and say no more than their files say."""

import gzip
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from hsnb.errors import DumpError
from hsnb.patch.spool import LAYOUTS as SPOOLS
from hsnb.patch.spool import bits
from hsnb.trainers import open_folder
from tests.training_files import AUX, WRITERS, H, samples, write_deepspec, write_model_optimizer, write_speculators, write_speculators_pt

MASKED = {"speculators", "speculators-0.4", "specforge", "model-optimizer", "deepspec"}
META = {"hsnb_format": "1", "boundaries": "[2, 15, 27]", "final": "pre", "model": "some/model"}


@pytest.mark.parametrize("layout", WRITERS)
def test_every_layout_is_found_and_read_bit_for_bit(layout, tmp_path):
    made = samples()
    WRITERS[layout](tmp_path / "x", made)
    folder = open_folder(tmp_path / "x")
    assert (folder.layout, len(folder)) == (layout, len(made))
    for k, (ids, mask, states) in enumerate(made):
        got = folder.sample(k)
        assert got.name == folder.name(k)
        assert got.column_names == ("aux_0", "aux_1", "aux_2", "final")
        assert torch.equal(torch.stack(got.columns, 1), states) and got.columns[0].dtype == torch.bfloat16
        assert torch.equal(got.token_ids, ids) and got.token_ids.dtype == torch.int64
        if layout in MASKED:
            assert torch.equal(got.loss_mask, mask) and got.loss_mask.dtype == torch.int64
        else:
            assert got.loss_mask is None
        assert (got.num_tokens, got.hidden_size) == (len(ids), H)
    with pytest.raises(IndexError):
        folder.sample(len(made))


@pytest.mark.parametrize("layout", SPOOLS)
def test_a_spool_of_ours_says_what_it_holds(layout, tmp_path):
    for k, (ids, _, states) in enumerate(samples()):
        request = SPOOLS[layout](f"r{k}", len(ids), "data", AUX + 1, H, "bfloat16", {**META, "dtype": "bfloat16"})
        request.begin(tmp_path)
        request.put(0, bits(states), ids.numpy())
        request.publish(tmp_path)
    (tmp_path / "armed-0.json").write_text("{}")
    folder = open_folder(tmp_path)
    assert folder.layout == f"spool-{layout}"
    assert (folder.claims["boundaries"], folder.claims["final"]) == ((2, 15, 27), "pre")
    if layout == "pt":
        assert torch.equal(torch.stack(folder.sample(3).columns, 1), samples()[3][2])


@pytest.mark.parametrize("layout", WRITERS)
def test_what_a_folder_does_not_say_is_unknown(layout, tmp_path):
    WRITERS[layout](tmp_path / "x", samples())
    claims = open_folder(tmp_path / "x").claims
    assert (claims["boundaries"], claims["final"]) == ("unknown", "unknown")
    assert ("ids" in claims) == (layout == "deepspec")


def test_what_a_folder_does_say(tmp_path):
    write_speculators_pt(tmp_path / "a", samples(), [2, 15, 27, 29])
    assert open_folder(tmp_path / "a").claims == {
        "boundaries": "unknown", "final": "pre", "ids": [2, 15, 27], "convention": "speculators-0.3"
    }  # fmt: skip
    write_deepspec(tmp_path / "b", samples())
    assert {"ids": [1, 14, 26], "convention": "deepspec"}.items() <= open_folder(tmp_path / "b").claims.items()
    for flag, final in ((True, "pre"), (False, "post")):
        write_model_optimizer(tmp_path / final, samples(), prenorm=flag)
        assert open_folder(tmp_path / final).claims["final"] == final
    write_speculators(tmp_path / "c", samples(), {"hsnb_format": "1", "boundaries": "[2, 15, 27]", "final": "pre"})
    assert open_folder(tmp_path / "c").claims["boundaries"] == (2, 15, 27)
    (tmp_path / "c" / "hsnb.json").write_text(json.dumps({"boundaries": [2, 15, 27], "final": "pre", "num_layers": 30}))
    assert open_folder(tmp_path / "c").claims == {"boundaries": (2, 15, 27), "final": "pre", "num_layers": 30}


def test_a_large_folder_is_opened_without_opening_a_file(tmp_path):
    inner = tmp_path / "hidden_states"
    inner.mkdir()
    (tmp_path / "state.json").write_text("{}")
    for row in range(3000):
        (inner / f"hs_{row}.safetensors").touch()  # not one of them could be read
    (inner / ".hs_7.123.tmp").touch()
    folder = open_folder(tmp_path)
    assert len(folder) == 3000 and folder.name(2999) == "hidden_states/hs_2999.safetensors"


def test_a_folder_of_no_layout_is_refused_and_what_was_looked_for_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DumpError) as error:
        open_folder(tmp_path)
    assert "notes.txt" in error.value.got
    for words in ("hs_{row}.safetensors", "data_{i}.ckpt", "data_config.json", "samples.idx", "req_{N}", "conversation_id", "connector"):
        assert words in error.value.expected
    for other in (tmp_path / "none", tmp_path / "notes.txt"):
        with pytest.raises(DumpError, match="expected a folder of training files"):
            open_folder(other)
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")  # a checkpoint
    with pytest.raises(DumpError):
        open_folder(tmp_path)
    (tmp_path / "rows_0-2000").mkdir()
    with pytest.raises(DumpError, match="no sample of the layout specforge"):
        open_folder(tmp_path)


def test_files_that_are_not_whole_are_named(tmp_path):
    for layout in WRITERS:
        WRITERS[layout](tmp_path / layout, samples())
    for layout in ("speculators", "speculators-0.4", "specforge", "model-optimizer", "vllm"):
        folder = open_folder(tmp_path / layout)
        file = tmp_path / layout / folder.name(1)
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(DumpError, match=file.name):
            folder.sample(1)
        assert folder.sample(0).num_tokens == 5
    shard = tmp_path / "deepspec" / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DumpError, match="shard-00000"):
        open_folder(tmp_path / "deepspec").sample(3)


def test_pickled_code_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"input_ids": Evil(), "hidden_states": 0, "aux_hidden_states": 0}, tmp_path / "a.pt")
    with pytest.raises(DumpError, match=r"a\.pt"):
        open_folder(tmp_path).sample(0)
    assert not (tmp_path / "ran").exists()


def test_foreign_pt_files_are_named_by_their_keys(tmp_path):
    torch.save({"model": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(DumpError, match="keys \\['model'\\], expected input_ids, hidden_states, aux_hidden_states"):
        open_folder(tmp_path).sample(0)


def test_a_gzipped_file_and_one_of_torchs_first_format_are_read(tmp_path):
    WRITERS["specforge"](tmp_path, samples())
    rows = tmp_path / "rows_0-2000"
    with open(rows / "data_0.ckpt", "rb") as plain, gzip.open(rows / "data_0.ckpt.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    (rows / "data_0.ckpt").unlink()
    tree = torch.load(rows / "data_1.ckpt", weights_only=True)
    torch.save(tree, rows / "data_1.ckpt", _use_new_zipfile_serialization=False)
    folder = open_folder(tmp_path)
    for k in (0, 1):
        assert torch.equal(torch.stack(folder.sample(k).columns, 1), samples()[k][2])


def test_states_under_other_ids_are_refused(tmp_path):
    write_speculators(tmp_path / "x", samples())
    ids, _, states = samples(1)[0]
    save_file({"hidden_states": states, "token_ids": ids}, tmp_path / "x/hidden_states/hs_0.safetensors")
    with pytest.raises(DumpError, match="token ids other than the input_ids of row 0"):
        open_folder(tmp_path / "x").sample(0)


def test_files_of_other_boundaries_are_not_mixed_in(tmp_path):
    write_speculators(tmp_path / "x", samples(), {"hsnb_format": "1", "boundaries": "[2, 15, 27]", "final": "pre"})
    ids, _, states = samples()[1]
    about = {"hsnb_format": "1", "boundaries": "[3, 16, 28]", "final": "pre"}
    save_file({"hidden_states": states, "token_ids": ids}, tmp_path / "x/hidden_states/hs_1.safetensors", metadata=about)
    folder = open_folder(tmp_path / "x")
    assert folder.sample(0).num_tokens == 5
    with pytest.raises(DumpError, match=r"boundaries \[3, 16, 28\]"):
        folder.sample(1)
