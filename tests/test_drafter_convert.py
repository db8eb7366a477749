"""A trained drafter as SGLang loads it: what is written, and everything that would load and then draft badly, refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hsnb.drafter.config import IDS, fed, read_drafter
from hsnb.drafter.convert import convert
from hsnb.errors import BoundaryError, ModelError, ParamsError
from tests.drafter_files import DRAFT, LLAMA, VOCAB, H, drafter_tensors, make_specforge, make_speculators, make_target


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target")


def read(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_speculators_drafter_becomes_one_that_sglang_loads(tmp_path, target):
    source = make_speculators(tmp_path / "trained", target, norm_before_fc=True, norm_output=True)
    got = convert(source, tmp_path / "out", target=target)
    config = read(tmp_path / "out")
    assert (got.boundaries, got.ids, got.left_out) == ((2, 4, 5), (1, 3, 4), ("embed_tokens.weight", "t2d"))
    assert config["eagle_config"] == {"use_aux_hidden_state": True, IDS: [1, 3, 4]}  # Llama's setter adds one
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is False  # the target's true would make lm_head the embedding
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_aux_hidden_states"]) == (VOCAB, DRAFT, 3)
    assert (config["norm_before_fc"], config["norm_output"], config["fc_norm"]) == (True, True, False)
    assert config["rope_theta"] == 5000.0 and config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert "target_hidden_size" not in config and IDS not in config and "_name_or_path" not in config
    tensors, trained = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    assert set(tensors) == set(trained) - {"embed_tokens.weight", "t2d"}
    assert tensors["fc.weight"].dtype == torch.bfloat16 and tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["fc.weight"], trained["fc.weight"].bfloat16())
    assert fed(tmp_path / "out", "sglang", "0.5.23", target_config=read(target)).boundaries == (2, 4, 5)
    flags = got.flags(3)
    assert (flags["speculative-num-steps"], flags["speculative-eagle-topk"], flags["speculative-num-draft-tokens"]) == (3, 1, 4)


def test_float32_as_asked(tmp_path, target):
    convert(make_speculators(tmp_path / "trained", target), tmp_path / "out", target=target, dtype="float32")
    assert read(tmp_path / "out")["dtype"] == "float32"
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["norm.weight"], trained["norm.weight"])


def test_deepseeks_ids_are_not_shifted(tmp_path, target):
    config = read(target) | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (target / "config.json").write_text(json.dumps(config))
    got = convert(make_speculators(tmp_path / "trained", target), tmp_path / "out", target=target)
    assert got.ids == (2, 4, 5) and got.family == "deepseek"
    assert fed(tmp_path / "out", target_config=config).boundaries == (2, 4, 5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"norm_before_residual": True}, "--no-norm-before-residual"),
        ({"embed_requires_grad": True}, "the target's embedding"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"transformer_layer_config": {**LLAMA, "model_type": "qwen3"}}, "a qwen3 layer"),
        ({"transformer_layer_config": {**LLAMA, "num_hidden_layers": 2}}, "2 layers"),
    ],
)
def test_what_sglangs_drafter_does_not_have(tmp_path, target, changed, words):
    with pytest.raises(ModelError, match=words):
        convert(make_speculators(tmp_path / "trained", target, **changed), tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_norm_before_fc_needs_a_newer_sglang(tmp_path, target):
    source = make_speculators(tmp_path / "trained", target, norm_before_fc=True)
    with pytest.raises(ModelError, match=r"since 0\.5\.17"):
        convert(source, tmp_path / "out", target=target, sglang="0.5.15")


@pytest.mark.parametrize(
    ("ids", "sglang", "words"),
    [
        ([2, 4, 8], "0.5.23", "no layer after the last"),
        ([0, 4, 5], "0.5.20", "layer 0 does not have yet"),
        ([4], "0.5.23", "skips fc"),
        ([2, 4, 9], "0.5.23", r"each in 0\.\.8"),
    ],
)
def test_boundaries_that_sglang_cannot_feed(tmp_path, target, ids, sglang, words):
    source = make_speculators(tmp_path / "trained", target, **{IDS: ids})
    with pytest.raises(BoundaryError, match=words):
        convert(source, tmp_path / "out", target=target, sglang=sglang)


def test_boundary_0_since_0_5_21(tmp_path, target):
    got = convert(make_speculators(tmp_path / "trained", target, **{IDS: [0, 4, 5]}), tmp_path / "out", target=target, sglang="0.5.23")
    assert got.ids == (-1, 3, 4)


def without(name: str) -> dict:
    return {k: v for k, v in drafter_tensors().items() if k != name}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (without("layers.0.hidden_norm.weight"), r"no layers\.0\.hidden_norm\.weight"),
        (without("d2t"), "no d2t"),
        (drafter_tensors() | {"layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight, which it does not know"),
        (drafter_tensors() | {"input_norm.weight": torch.ones(3 * H)}, "input_norm.weight, which it does not know"),
        (drafter_tensors() | {"fc.weight": torch.ones(H, 2 * H)}, r"fc\.weight \[32, 64\], expected \[32, 96\]"),
        (drafter_tensors() | {"d2t": torch.arange(DRAFT) * 2 + 1}, "offsets are expected"),
        (drafter_tensors() | {"d2t": -torch.arange(DRAFT)}, "names? each of its tokens once"),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path, target, tensors, words):
    with pytest.raises(ModelError, match=words):
        convert(make_speculators(tmp_path / "trained", target, tensors), tmp_path / "out", target=target)


def test_an_embedding_of_its_own_is_refused(tmp_path, target):
    tensors = drafter_tensors() | {"embed_tokens.weight": torch.randn(VOCAB, H)}
    with pytest.raises(ModelError, match="that is not the target's"):
        convert(make_speculators(tmp_path / "trained", None, tensors), tmp_path / "out", target=target)


def test_boundaries_given_and_said_must_agree(tmp_path, target):
    source = make_speculators(tmp_path / "trained", target)
    with pytest.raises(BoundaryError, match=r"--target-layer-ids 3 5 6"):
        convert(source, tmp_path / "out", target=target, boundaries=[3, 5, 6])
    assert convert(source, tmp_path / "out", target=target, boundaries=[5, 4, 2]).boundaries == (2, 4, 5)


def test_an_old_speculators_drafter_has_to_be_told(tmp_path, target):
    source = make_speculators(tmp_path / "trained", target, speculators_version="0.3.0", **{IDS: None})
    with pytest.raises(BoundaryError, match=r"0\.3 and 0\.4 do not write them"):
        convert(source, tmp_path / "out", target=target)
    assert convert(source, tmp_path / "out", target=target, boundaries=[3, 5, 6]).ids == (2, 4, 5)


def test_specforges_traps(tmp_path, target):
    source = make_specforge(tmp_path / "exported", norm_output=True)
    with pytest.raises(BoundaryError, match="not written into SpecForge's export"):
        convert(source, tmp_path / "out", target=target)
    got = convert(source, tmp_path / "out", target=target, boundaries=[3, 5, 6])
    config = read(tmp_path / "out")
    assert config["eagle_config"][IDS] == [2, 4, 5] and "norm_output" not in config
    assert got.left_out == ("t2d",) and "midlayer.hidden_norm.weight" in load_file(tmp_path / "out" / "model.safetensors")
    # what it exported itself, served as it is, would be the default
    assert fed(source, target_config=read(target)).boundaries == (2, 4, 5) != got.boundaries
    with pytest.raises(ModelError, match="norm_output false"):
        convert(make_specforge(tmp_path / "unnormed", norm_output=False), tmp_path / "out", target=target, boundaries=[3, 5, 6])


def test_a_specforge_config_that_names_its_ids_must_still_be_confirmed(tmp_path, target):
    source = make_specforge(tmp_path / "exported", eagle_config={"use_aux_hidden_state": True, IDS: [1, 3, 4]})
    with pytest.raises(BoundaryError, match=r"SpecForge's eagle_config\.\S+ \[1, 3, 4\]"):
        convert(source, tmp_path / "out", target=target)


def test_converting_again_changes_nothing(tmp_path, target):
    convert(make_speculators(tmp_path / "trained", target, norm_output=True), tmp_path / "once", target=target)
    convert(tmp_path / "once", tmp_path / "twice", target=target)
    assert read(tmp_path / "once") == read(tmp_path / "twice") and read(tmp_path / "twice")["norm_output"] is True


def test_unknown_dtype_and_no_weights(tmp_path, target):
    source = make_speculators(tmp_path / "trained", target)
    with pytest.raises(ParamsError, match="one of: bfloat16, float16, float32"):
        convert(source, tmp_path / "out", target=target, dtype="fp8")
    (source / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        convert(source, tmp_path / "out", target=target)
    assert read_drafter(source).kind == "speculators"
