"""The head read from a checkpoint, and the checks of a dump, on the tiny model's real files."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hsnb.checks import Asked, dump_checks, require
from hsnb.demo import model_folder
from hsnb.dumps import open_dump
from hsnb.errors import DumpError, ModelError
from hsnb.weights import Head, weights_hash
from tests.reference import boundaries, model


@pytest.mark.parametrize("name", ["tiny-deepseek", "smollm2-fp32"])
def test_logprobs_equal_transformers(name):
    ids = torch.tensor([21, 50, 77, 100, 31, 42, 60, 71])
    pre = boundaries(name, ids)[-1]
    head, net = Head.load(model_folder(name)), model(name)
    with torch.no_grad():
        expected = net(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        assert torch.allclose(head.normed(pre), net.model.norm(pre), atol=1e-5)
    assert (head.logprobs(pre[:-1], ids[1:], "pre") - expected).abs().max() < 1e-4
    assert (head.logprobs(head.normed(pre)[:-1], ids[1:], "post") - expected).abs().max() < 1e-4
    assert (head.logprobs(head.normed(pre)[:-1], ids[1:], "pre") - expected).abs().mean() > 1e-3


def test_a_wrapped_language_model_is_found_and_only_its_files_are_read(tmp_path):
    source = model_folder("tiny-deepseek")
    tensors = load_file(source / "model.safetensors")
    wrapped = {f"language_model.{k}": v for k, v in tensors.items()}
    heads = {k: v for k, v in wrapped.items() if "lm_head" in k or k.endswith("model.norm.weight")}
    save_file(heads, tmp_path / "model-00002.safetensors")
    (tmp_path / "model-00001.safetensors").write_bytes(b"never read")
    index = {k: "model-00002.safetensors" if k in heads else "model-00001.safetensors" for k in wrapped}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": config}))
    head = Head.load(tmp_path)
    assert torch.equal(head.head, tensors["lm_head.weight"]) and torch.equal(head.norm, tensors["model.norm.weight"])


@pytest.mark.parametrize(("remove", "words"), [("config.json", "expected a model folder"), ("model.safetensors", r"no \*.safetensors")])
def test_a_folder_that_is_not_whole(remove, words, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(model_folder("tiny-deepseek"), folder)
    (folder / remove).unlink()
    with pytest.raises(ModelError, match=words):
        Head.load(folder)


@pytest.fixture
def dumped(tmp_path):
    torch.manual_seed(0)
    states, ids = torch.randn(6, 4, 8), torch.arange(30, 36)
    meta = {"boundaries": "[2, 4, 6]", "final": "pre", "request_id": "hsnb-1"}

    def write(states=states, ids=ids, **labels):
        save_file({"hidden_states": states.contiguous(), "token_ids": ids}, tmp_path / "x.safetensors", {**meta, **labels})
        return open_dump(tmp_path / "x.safetensors")

    return write, states, Asked(ids, (2, 4, 6), "pre", 8, "float32")


def test_a_right_dump_passes_every_check(dumped):
    write, _, asked = dumped
    checks = dump_checks(write(), asked)
    assert [c.name for c in checks if not c.ok] == []
    assert len(checks) == 11
    require(checks, "row 17", "nothing")


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        (lambda s: {"states": s[:5], "ids": torch.arange(30, 35)}, "rows", "5"),
        (lambda s: {"ids": torch.tensor([30, 31, 32, 33, 34, 36])}, "token echo", "other ids"),
        (lambda s: {"final": "post"}, "final state", "post"),
        (lambda s: {"boundaries": "[2, 4, 7]"}, "boundaries", "[2, 4, 7]"),
        (lambda s: {"states": s.half()}, "dtype", "float16"),
        (lambda s: {"states": s[:, :, :4]}, "hidden size", "4"),
        (lambda s: {"states": torch.where(torch.arange(6)[:, None, None] == 2, torch.inf, s)}, "finite rows", "4 bad, first: row 2 of B_2"),
        (lambda s: {"states": s * (torch.arange(4) != 3)[:, None]}, "rows not zero", "6 bad, first: row 0 of final"),
        (lambda s: {"states": torch.where(torch.arange(4)[:, None] == 1, 5.0, s)}, "rows not constant", "6 bad, first: row 0 of B_4"),
    ],
)
def test_each_damage_fails_its_check(change, name, value, dumped):
    write, states, asked = dumped
    checks = {c.name: c for c in dump_checks(write(**change(states)), asked)}
    assert (checks[name].ok, checks[name].value) == (False, value)
    with pytest.raises(DumpError, match=r"row 17: .*Next: do this"):
        require(list(checks.values()), "row 17", "do this")


def test_weights_are_known_by_what_they_hold_and_not_by_when_they_were_copied(tmp_path):
    """Two machines' copies are one model; a training that keeps sizes and header is another."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    (a / "config.json").write_text("{}")
    save_file({"w": torch.randn(1 << 20)}, a / "model.safetensors")
    shutil.copytree(a, b)
    os.utime(b / "model.safetensors", (1, 1))
    assert weights_hash(a) == weights_hash(b)
    with open(b / "model.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"!")
    changed = weights_hash(b)
    assert changed != weights_hash(a)
    (b / "config.json").write_text("{ }")
    assert weights_hash(b) not in (changed, weights_hash(a))
