"""Every exporter is a round trip: what is written is what that tool's own reader returns, bit for bit, and nothing is guessed."""

import json
import os
import shlex
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hsnb.cli import main
from hsnb.errors import BoundaryError, DataError, DumpError, ExtractError, ModelError, ParamsError
from hsnb.trainers import WRITTEN, open_folder
from hsnb.trainers.export import export
from hsnb.trainers.export_log import LOG
from hsnb.trainers.source import training
from tests.training_files import AUX, WRITERS, H, samples, write_connector, write_deepspec, write_speculators, write_speculators_pt

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = ROOT / ".venv-trainers" / "bin" / "python"
META = {"hsnb_format": "1", "boundaries": "[2, 15, 27]", "final": "pre"}
LAYERS, VOCAB = 30, 1000
POST = [name for name, one in WRITTEN.items() if one.final == "post"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of a norm and a head, Llama's rule."""
    folder = tmp_path_factory.mktemp("model")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}))
    norm = torch.rand(H, generator=torch.Generator().manual_seed(3)) + 0.5
    save_file({"model.norm.weight": norm, "lm_head.weight": torch.zeros(VOCAB, H)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def source(tmp_path):
    write_speculators(tmp_path / "src", samples(), META)
    return tmp_path / "src"


def normed(model, final):
    """norm(final) computed with torch's own RMS norm in float32, bfloat16."""
    from safetensors.torch import load_file

    weight = load_file(model / "model.safetensors")["model.norm.weight"]
    return torch.nn.functional.rms_norm(final.float(), (H,), weight, 1e-5).to(torch.bfloat16)


def ulps(a, b):
    """The largest distance of two bfloat16 tensors in units of the last place."""
    order = [torch.where(v < 0, -32768 - v, v) for v in (a.contiguous().view(torch.int16).int(), b.contiguous().view(torch.int16).int())]
    return (order[0] - order[1]).abs().max().item()


def real(tool, folder, tmp_path):
    """What the tool's own classes return for `folder`, in their environment."""
    assert TRAINERS.exists(), "make setup-trainers"
    out = tmp_path / f"{tool}.pt"
    env = {**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [TRAINERS, ROOT / "tests" / "trainers_readers.py", tool, folder, out]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("layout", WRITTEN)
def test_every_export_is_read_back_bit_for_bit(layout, source, model, tmp_path):
    done = export(source, tmp_path / "out", layout, model=model)
    assert (done.samples, done.tokens, done.done_before, done.damaged) == (4, 27, 0, 0)
    folder = open_folder(tmp_path / "out")
    assert (folder.layout, len(folder)) == (layout, 4)
    assert (folder.claims["boundaries"], folder.claims["final"]) == ((2, 15, 27), WRITTEN[layout].final)
    for k, (ids, mask, states) in enumerate(samples()):
        got = folder.sample(k)
        assert torch.equal(got.token_ids, ids) and torch.equal(got.loss_mask, mask)
        assert torch.equal(torch.stack(got.columns[:-1], 1), states[:, :-1])
        if layout in POST:
            assert ulps(got.columns[-1], normed(model, states[:, -1])) <= 1
            assert not torch.equal(got.columns[-1], states[:, -1])
        else:
            assert torch.equal(got.columns[-1], states[:, -1])
    assert not list((tmp_path / "out").rglob(".*"))  # no temporary file is left


def test_the_real_speculators_reads_it_and_drops_nothing(source, model, tmp_path):
    export(source, tmp_path / "a", "specforge", model=model)  # and the other way is refused, below
    export(source, tmp_path / "out", "speculators", model=model, vocab=64)
    got = real("speculators", tmp_path / "out", tmp_path)
    words = got["vocabulary"]
    assert got["dropped"] == 0 and got["lengths"] == [5, 9, 1, 12] and len(got["items"]) == 4
    for (ids, mask, states), item in zip(samples(), got["items"], strict=True):
        assert torch.equal(item["input_ids"], ids) and torch.equal(item["loss_mask"], mask)
        assert torch.equal(item["hidden_states"], states[:, :-1].flatten(1))
        assert torch.equal(item["verifier_last_hidden_states"], states[:, -1])
    shifted = torch.cat([ids[1:] for ids, _, _ in samples()])
    assert torch.equal(got["batch_ids"][0, : len(shifted)], shifted)
    assert words["size"] == 64
    for own, loaded in zip(words["own"], words["loaded"], strict=True):
        assert torch.equal(own, loaded)
    counts = torch.load(tmp_path / "out" / "token_freq.pt", weights_only=True)
    assert sum(counts.values()) == sum(int(mask.sum()) for _, mask, _ in samples())


def test_the_real_specforge_reads_and_normalises_it(source, model, tmp_path):
    done = export(source, tmp_path / "out", "specforge", model=model, vocab=64)
    got = real("specforge", tmp_path / "out", tmp_path)
    assert got["names"] == [f"rows_0-2000/data_{k}.ckpt" for k in range(4)]
    counts = {}
    for (ids, mask, states), item, raw in zip(samples(), got["items"], got["raw"], strict=True):
        assert set(raw) == {"input_ids", "loss_mask", "aux_hidden_state", "hidden_state"}
        assert torch.equal(item["input_ids"][0], ids)
        assert torch.equal(item["loss_mask"][0, :-1], mask[:-1]) and item["loss_mask"][0, -1] == 0  # its own rule for the last
        assert torch.equal(item["hidden_state"][0], states[:, :-1].flatten(1))
        assert item["target"].shape == (1, len(ids), H) and item["target"].dtype == torch.bfloat16
        assert ulps(item["target"][0], normed(model, states[:, -1])) <= 1
        for token in ids[mask == 1].tolist():
            counts[token] = counts.get(token, 0) + 1
    assert got["counts"] == counts and got["batch"]["hidden_state"].shape == (4, 12, AUX * H)
    config = got["config"]
    assert config["strategy"] == "eagle3" and config["data"]["hidden_states_path"] == str(tmp_path / "out")
    assert config["model"]["aux_hidden_state_layer_ids"] == [1, 14, 26]  # its numbering for B_2, B_15, B_27
    mapping = torch.load(config["model"]["vocab_mapping_path"], weights_only=True)
    assert mapping["d2t"].shape == (64,) and mapping["t2d"].sum() == 64
    assert torch.equal((mapping["d2t"] + torch.arange(64)).sort().values, mapping["t2d"].nonzero()[:, 0])
    assert set(counts) <= set(mapping["t2d"].nonzero()[:, 0].tolist())
    two = export(source, tmp_path / "two", "specforge", model=model, boundaries=[2, 27])
    assert "three layers" in two.notes[-1] and not any("three layers" in note for note in done.notes)
    assert shlex.split(done.command) == ["specforge", "train", "--config", str(tmp_path / "out" / "specforge.yaml")]


def test_deepspec_to_the_byte(source, model, tmp_path):
    """Its reader needs its whole repository: this one is written from its source (target_cache_dataset.py)."""
    export(source, tmp_path / "out", "deepspec", model=model)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["version"], manifest["num_samples"], manifest["target_layer_ids"]) == (2, 4, [1, 14, 26])
    assert manifest["num_shards"] == len(manifest["shards"]) == 1 and manifest["target_model_name_or_path"] == str(model)
    assert (manifest["hidden_dtype"], manifest["token_dtype"], manifest["mask_dtype"]) == ("bfloat16", "int32", "uint8")
    index = (tmp_path / "out" / "samples.idx").read_bytes()
    assert len(index) == 4 * manifest["index_record_size"] == 4 * 56
    shard = (tmp_path / "out" / manifest["shards"][0]["file_name"]).read_bytes()
    assert len(shard) == manifest["shards"][0]["nbytes"] == sum(6 * n + 2 * n * H * (AUX + 1) for n in (5, 9, 1, 12))
    for k, (ids, mask, states) in enumerate(samples()):
        number, where, length, *at = struct.unpack_from("<QIIQQQQQ", index, k * 56)
        assert (number, where, length) == (k, 0, len(ids))
        assert np.frombuffer(shard, np.int32, length, at[0]).tolist() == ids.tolist()
        assert np.frombuffer(shard, np.uint8, length, at[1]).tolist() == [1] * length
        assert np.frombuffer(shard, np.uint8, length, at[2]).tolist() == mask.tolist()
        aux = np.frombuffer(shard, np.int16, length * AUX * H, at[3]).copy()
        assert torch.equal(torch.from_numpy(aux).view(torch.bfloat16).view(length, -1), states[:, :-1].flatten(1))
        last = np.frombuffer(shard, np.int16, length * H, at[4]).copy()
        assert ulps(torch.from_numpy(last).view(torch.bfloat16).view(length, H), normed(model, states[:, -1])) <= 1


def test_model_optimizer_and_old_speculators_to_the_key(source, model, tmp_path):
    """Readers written from the tools' sources: OfflineSupervisedDataset, and standardize_data_v1 of speculators 0.4."""
    export(source, tmp_path / "mo", "model-optimizer", model=model)
    export(source, tmp_path / "old", "speculators-0.4", model=model)
    ids, mask, states = samples()[1]
    tree = torch.load(tmp_path / "mo" / "row-00000001.pt", weights_only=True)
    assert set(tree) == {"input_ids", "hidden_states", "aux_hidden_states", "loss_mask", "conversation_id", "hidden_states_prenorm"}
    assert tree["hidden_states_prenorm"] is False and tree["conversation_id"] == "row-00000001"
    assert torch.equal(tree["aux_hidden_states"], states[:, :-1].flatten(1)) and torch.equal(tree["loss_mask"], mask)
    assert ulps(tree["hidden_states"], normed(model, states[:, -1])) <= 1
    assert json.loads((tmp_path / "mo" / "eagle_config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert len(list((tmp_path / "mo").rglob("*.pt"))) == 4  # its trainer takes every one of them
    tree = torch.load(tmp_path / "old" / "data_1.pt", weights_only=True)
    assert set(tree) == {"input_ids", "hidden_states", "loss_mask"} and torch.equal(tree["input_ids"], ids)
    assert torch.equal(torch.cat(tree["hidden_states"][:-1], -1), states[:, :-1].flatten(1))
    assert torch.equal(tree["hidden_states"][-1], states[:, -1])
    assert json.loads((tmp_path / "old" / "data_config.json").read_text())["hidden_states"]["layer_ids"] == [1, 14, 26, 29]
    assert json.loads((tmp_path / "old" / "sample_lengths.json").read_text()) == {"0": 5, "1": 9, "2": 1, "3": 12}
    assert len(list((tmp_path / "old").rglob("*.pt"))) == 4
    for name in ("mo", "old"):  # a view would have its whole storage saved with it
        file = next((tmp_path / name).glob("*2.pt"))
        assert file.stat().st_size < 4000


@pytest.mark.parametrize("layout", ["speculators-0.4", "specforge", "model-optimizer", "deepspec"])
def test_there_and_back_again(layout, source, model, tmp_path):
    export(source, tmp_path / "there", layout, model=model)
    if layout in POST:
        with pytest.raises(ParamsError, match="normed twice"):
            export(tmp_path / "there", tmp_path / "back", "speculators")
        export(tmp_path / "there", tmp_path / "back", "specforge")
        back, there = open_folder(tmp_path / "back"), open_folder(tmp_path / "there")
    else:
        export(tmp_path / "there", tmp_path / "back", "speculators")
        back, there = open_folder(tmp_path / "back"), open_folder(source)
    for a, b in zip(back, there, strict=True):
        assert torch.equal(torch.stack(a.columns), torch.stack(b.columns)) and torch.equal(a.loss_mask, b.loss_mask)


def test_a_choice_of_boundaries_and_the_command_in_the_tools_own_numbering(source, model, tmp_path, capsys):
    for layout, words in {
        "speculators": "--target-layer-ids 15 27",
        "specforge": "[14, 26]",
        "deepspec": "target_layer_ids [14, 26]",
        "speculators-0.4": "[14, 26]",
    }.items():
        command = ["export", str(source), str(tmp_path / layout), "--layout", layout, "--boundaries", "27", "15", "--model", str(model)]
        assert main(command) == 0
        assert words in capsys.readouterr().out
        folder = open_folder(tmp_path / layout)
        assert folder.claims["boundaries"] == (15, 27)
        assert torch.equal(torch.stack(folder.sample(3).columns[:-1], 1), samples()[3][2][:, 1:3])
    assert main([*command[:-1], str(model), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["samples"] == 4 and result["done_before"] == 4 and result["command"].startswith("python scripts/train.py")
    with pytest.raises(BoundaryError, match=r"boundaries \[14\], expected some of those captured"):
        export(source, tmp_path / "x", "speculators", boundaries=[14, 27], model=model)


def test_how_to_train_on_a_folder_that_was_extracted(source, model, tmp_path, capsys):
    command = ["training", str(source), "--model", str(model), "--vocab", "64"]
    assert main(command) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    words = shlex.split(first)
    assert words[:4] == ["speculators", "train", "--speculator-type", "eagle3"] and "--no-norm-before-residual" in words
    assert words[words.index("--target-layer-ids") + 1 :][:3] == ["2", "15", "27"] and words[words.index("--on-missing") + 1] == "raise"
    assert len(rest) == 2 and np.load(source / "d2t-64.npy").dtype == np.int64 and np.load(source / "t2d-64.npy").sum() == 64
    (source / "hidden_states" / "hs_2.safetensors").unlink()
    assert main([*command[:-2], "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "--on-missing skip" in result["command"] and result["notes"] == ["1 rows have no states and are left out"]
    with pytest.raises(ParamsError, match=r"1\.\.1000"):
        training(source, model=model, vocab=1001)
    write_connector(tmp_path / "x", samples())
    with pytest.raises(ParamsError, match="layout is 'vllm'"):
        training(tmp_path / "x", model=model)


def test_what_is_not_known_is_not_exported(model, tmp_path):
    for layout in ("speculators", "specforge", "model-optimizer", "deepspec"):
        WRITERS[layout](tmp_path / layout, samples())
        with pytest.raises(BoundaryError) as error:
            export(tmp_path / layout, tmp_path / "x", "specforge", model=model)
        assert "final unknown" in error.value.got and "hsnb identify" in error.value.next
    write_speculators_pt(tmp_path / "old", samples(), [1, 14, 26, 29])  # says everything, in its own numbering
    assert export(tmp_path / "old", tmp_path / "out", "speculators", model=model).boundaries == (2, 15, 27)
    done = export(tmp_path / "deepspec", tmp_path / "out2", "specforge", model=model, stated=(None, "post"))
    assert done.boundaries == (2, 15, 27)
    assert json.loads((tmp_path / "out2" / "hsnb.json").read_text())["stated"] == ["final"]
    with pytest.raises(BoundaryError, match="as it says itself"):
        export(tmp_path / "old", tmp_path / "y", "speculators", model=model, stated=([3, 16, 28], None))
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


def test_columns_in_another_order_are_put_in_order(model, tmp_path):
    write_speculators(tmp_path / "src", samples())
    export(tmp_path / "src", tmp_path / "out", "speculators", model=model, stated=([27, 2, 15], "pre"))
    got = open_folder(tmp_path / "out")
    assert got.claims["boundaries"] == (2, 15, 27)
    assert torch.equal(torch.stack(got.sample(3).columns, 1), samples()[3][2][:, [1, 2, 0, 3]])


def test_what_a_layout_needs_and_the_source_has_not_is_named(model, tmp_path):
    write_connector(tmp_path / "src", samples())
    stated = ([2, 15, 27], "pre")
    with pytest.raises(DataError, match="no loss mask"):
        export(tmp_path / "src", tmp_path / "a", "specforge", model=model, stated=stated)
    assert export(tmp_path / "src", tmp_path / "b", "model-optimizer", model=model, stated=stated).samples == 4
    assert "loss_mask" not in torch.load(tmp_path / "b" / "row-00000000.pt", weights_only=True)
    with pytest.raises(ParamsError, match="no model"):
        export(tmp_path / "src", tmp_path / "c", "specforge", stated=stated)
    with pytest.raises(DumpError, match=r"4 columns of width 16, expected 3 \(2 boundaries and the final\) of width 16"):
        export(tmp_path / "src", tmp_path / "d", "model-optimizer", model=model, stated=([2, 15], "pre"))
    (tmp_path / "wide").mkdir()
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(DumpError, match=r"expected 4 .* of width 32, the model's"):
        export(tmp_path / "src", tmp_path / "w", "model-optimizer", model=tmp_path / "wide", stated=stated)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ModelError, match="safetensors"):
        export(tmp_path / "src", tmp_path / "e", "model-optimizer", model=tmp_path / "empty", stated=stated)
    with pytest.raises(ParamsError, match="a folder apart"):
        export(tmp_path / "src", tmp_path / "src" / "out", "specforge", model=model, stated=stated)
    with pytest.raises(ExtractError, match="expected no such folder"):
        export(tmp_path / "src", model, "model-optimizer", model=model, stated=stated)


def prints(folder):
    return {
        p.relative_to(folder): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.suffix in (".ckpt", ".safetensors", ".pt", ".bin")
    }


@pytest.mark.parametrize("layout", WRITTEN)
def test_a_killed_export_goes_on_where_it_was(layout, model, tmp_path):
    """Killed by SIGKILL in the middle, with a torn last line and a half-written file: the end is what an undisturbed run gives."""
    write_speculators(tmp_path / "src", samples(1, range(3, 103)), META)
    export(tmp_path / "src", tmp_path / "whole", layout, model=model)
    out, script = tmp_path / "out", "from hsnb.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "export", tmp_path / "src", out, "--layout", layout, "--model", model]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / LOG).exists() or len((out / LOG).read_bytes().splitlines()) < 12:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = len((out / LOG).read_text().splitlines()) - 1
    with open(out / LOG, "a") as log:
        log.write('{"row": 55, "tok')
    for path in [out / "shard-00000.bin"] if layout == "deepspec" else []:
        with open(path, "ab") as shard:
            shard.write(b"half a row")
    done = export(tmp_path / "src", out, layout, model=model)
    assert lines - 1 <= done.done_before <= lines < 100 and done.samples == 100 and done.damaged == 0
    assert prints(out) == prints(tmp_path / "whole") and len(prints(out))
    again = export(tmp_path / "src", out, layout, model=model, verify=True)
    assert (again.done_before, again.damaged) == (100, 0)


@pytest.mark.parametrize("layout", WRITTEN)
def test_a_flipped_bit_is_found_and_mended(layout, source, model, tmp_path):
    out = tmp_path / "out"
    export(source, out, layout, model=model)
    before = prints(out)
    file = out / json.loads((out / LOG).read_text().splitlines()[2])["file"]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert export(source, out, layout, model=model).damaged == 0  # lengths only: a second call is quick
    done = export(source, out, layout, model=model, verify=True)
    assert (done.damaged, done.verified) == (1, True) and prints(out) == before
    file.unlink()
    assert export(source, out, layout, model=model).damaged == (4 if layout == "deepspec" else 1)
    assert prints(out) == before


def test_a_source_that_changed_is_exported_again_and_other_settings_are_refused(source, model, tmp_path):
    out = tmp_path / "out"
    export(source, out, "specforge", model=model)
    ids, _, states = samples()[1]
    save_file({"hidden_states": states + 1, "token_ids": ids}, source / "hidden_states" / "hs_1.safetensors", metadata=META)
    done = export(source, out, "specforge", model=model)
    assert done.done_before == 3
    assert torch.equal(open_folder(out).sample(1).columns[0], states[:, 0] + 1)
    with pytest.raises(ExtractError, match=r"boundaries was \[2, 15, 27\] and is \[2, 27\]"):
        export(source, out, "specforge", model=model, boundaries=[2, 27])
    write_deepspec(tmp_path / "deep", samples())
    with pytest.raises(ExtractError, match="source was"):
        export(tmp_path / "deep", out, "specforge", model=model, stated=(None, "post"))


def test_a_disk_that_gives_other_bytes_back_is_noticed_before_the_file_has_its_name(source, model, tmp_path, monkeypatch):
    layout = WRITTEN["specforge"]
    save = type(layout).save

    def torn(self, path, row):
        save(self, path, row)
        data = bytearray(path.read_bytes())
        at = data.find(row.states[:, -1].contiguous().view(torch.uint8).numpy().tobytes())
        data[at] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(type(layout), "save", torn)
    with pytest.raises(DumpError, match="other states than were written"):
        export(source, tmp_path / "out", "specforge", model=model)
    assert not list((tmp_path / "out").rglob("*.ckpt")) and not list((tmp_path / "out").rglob(".*.tmp"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_not_copied(bad, model, tmp_path):
    made = samples()
    made[1][2][3, -1, 5] = bad
    write_speculators(tmp_path / "src", made, META)
    with pytest.raises(DumpError, match=r"hs_1\.safetensors: 1 of 9 rows of column final are NaN or infinite"):
        export(tmp_path / "src", tmp_path / "out", "specforge", model=model)
    assert len(list((tmp_path / "out").rglob("*.ckpt"))) == 1  # the sample before it


def test_a_demo_model_is_named_as_everywhere(source, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hsnb.demo.model_folder", lambda name: {"mine": model}[name])
    assert main(["training", str(source), "--model", "demo:mine"]) == 0
    assert str(model) in capsys.readouterr().out
    assert main(["export", str(source), str(tmp_path / "out"), "--layout", "deepspec", "--model", "demo:mine"]) == 0
    assert json.loads((tmp_path / "out" / "hsnb.json").read_text())["model"] == str(model)


def test_float32_states_are_normed_before_they_are_rounded(model, tmp_path):
    rng = torch.Generator().manual_seed(5)
    states = torch.randn(8, AUX + 1, H, generator=rng)
    write_speculators(tmp_path / "src", [(torch.arange(8), torch.ones(8, dtype=torch.int64), states)], META)
    export(tmp_path / "src", tmp_path / "out", "specforge", model=model)
    got = open_folder(tmp_path / "out").sample(0)
    assert ulps(got.columns[-1], normed(model, states[:, -1])) <= 1
    assert torch.equal(got.columns[0], states[:, 0].to(torch.bfloat16))
