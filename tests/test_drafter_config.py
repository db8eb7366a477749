"""Which boundaries an engine would feed to a drafter, from its config.json alone: every way such a config is written."""

import json

import pytest

from hsnb.drafter.config import IDS, fed, read_drafter, trained_on
from hsnb.errors import BoundaryError, ModelError, ParamsError

SMOL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 30}
KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"num_hidden_layers": 61}}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 24}
MINIMAX = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "text_config": {"num_hidden_layers": 60}}


def sglang(ids="absent", **more) -> dict:
    """Return a drafter's config in SGLang's style."""
    eagle = {} if ids == "absent" else {"eagle_config": {"use_aux_hidden_state": True, IDS: ids}}
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **eagle, **more}


def speculators(ids, version="0.9.0") -> dict:
    """Return a drafter's config as speculators saves it."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": version,
        IDS: ids,
        "transformer_layer_config": {"model_type": "llama"},
    }


@pytest.mark.parametrize(
    ("config", "target", "boundaries", "where"),
    [
        (sglang([1, 14, 26]), SMOL, (2, 15, 27), f"eagle_config.{IDS}"),
        (sglang([2, 15, 27]), SMOL, (3, 16, 28), f"eagle_config.{IDS}"),  # served: accept length 1.373, not 1.390
        (sglang([26, 1, 14]), SMOL, (2, 15, 27), f"eagle_config.{IDS}"),  # columns come ascending, whatever the order
        (sglang([2, 30, 58]), KIMI, (2, 30, 58), f"eagle_config.{IDS}"),
        (sglang([1, 29, 57]), KIMI, (2, 30, 58), f"eagle_config.{IDS}"),
        (sglang([30, 1, 58]), KIMI, (1, 30, 58), f"eagle_config.{IDS}"),  # only the FIRST id decides
        (sglang(), SMOL, (2, 15, 27), ""),
        (sglang(**{IDS: [1, 5, 29]}), SMOL, (2, 15, 27), ""),  # a list at the top level is not read
        (sglang(None), SMOL, (2, 15, 27), ""),
        (sglang(eagle_config=["a list"]), SMOL, (2, 15, 27), ""),  # the except takes the default
        (sglang(eagle_config={}), KIMI, (2, 30, 58), ""),
        (sglang([1, 5, 22]), GPT_OSS, (2, 6, 23), f"eagle_config.{IDS}"),
        (sglang([1, 5, 24]), GPT_OSS, (1, 5, 24), f"eagle_config.{IDS}"),
        (sglang(), MINIMAX, (3, 31, 58), ""),
        (speculators([2, 15, 27]), SMOL, (2, 15, 27), ""),  # by luck: the default
        (speculators([1, 5, 29]), SMOL, (2, 15, 27), ""),
    ],
)
def test_what_sglang_feeds(config, target, boundaries, where):
    got = fed(config, "sglang", "0.5.23", target_config=target)
    assert (got.boundaries, got.where) == (boundaries, where)
    assert got.ids == (None if not where else config["eagle_config"][IDS])


@pytest.mark.parametrize(
    ("config", "target", "boundaries", "where"),
    [
        (speculators([2, 15, 27]), SMOL, (2, 15, 27), IDS),
        (speculators([1, 5, 29]), SMOL, (1, 5, 29), IDS),
        (speculators(None, "0.3.0"), SMOL, (2, 15, 27), ""),
        (sglang([1, 14, 26]), SMOL, (1, 14, 26), f"eagle_config.{IDS}"),  # SGLang's own drafter, one early in vLLM
        (sglang([1, 14, 26], **{IDS: [2, 15, 27]}), SMOL, (2, 15, 27), IDS),
        (sglang([2, 30, 58]), KIMI, (2, 30, 58), f"eagle_config.{IDS}"),
        (sglang(), KIMI, (2, 30, 58), ""),
        (sglang("2,15,27"), SMOL, (2, 15, 27), ""),
        (sglang([1, 14, 30]), SMOL, (1, 14, 30), f"eagle_config.{IDS}"),  # vLLM can feed B_L
    ],
)
def test_what_vllm_feeds(config, target, boundaries, where):
    got = fed(config, "vllm", "0.32.0", target_config=target)
    assert (got.boundaries, got.where) == (boundaries, where)


def test_the_reasons_are_said():
    assert "the top level's [1, 5, 29] is not read" in fed(sglang(**{IDS: [1, 5, 29]}), target_config=SMOL).why
    assert "passes over without a word" in fed(sglang(eagle_config=["x"]), target_config=SMOL).why
    got = fed(speculators([2, 15, 27]), target_config=SMOL)
    assert not got.loads and "hsnb drafter convert" in got.why
    assert "come one early here" in fed(sglang([1, 14, 26]), "vllm", target_config=SMOL).why
    assert got.as_dict()["boundaries"] == [2, 15, 27]


def test_no_aux_states_at_all():
    config = sglang(eagle_config={"use_aux_hidden_state": False, IDS: [1, 14, 26]})
    assert fed(config, "sglang", target_config=SMOL).boundaries == fed(config, "vllm", target_config=SMOL).boundaries == ()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "list of whole numbers"),
        (5, "list of whole numbers"),
        (["1", "14"], "list of whole numbers"),
        ([1, 14, 29], "no layer after the last"),  # boundary 30 of 30: SGLang would hand back one state fewer
        ([1, 14, 30], "each in 0..30"),
        ([1, 14, 14], "each boundary once"),
    ],
)
def test_ids_that_an_engine_dies_of_or_drops(ids, words):
    with pytest.raises(BoundaryError, match=words):
        fed(sglang(ids), target_config=SMOL)


def test_only_versions_and_engines_whose_rule_was_read():
    with pytest.raises(ParamsError, match=r"0\.5\.13 or newer"):
        fed(sglang([1, 14, 26]), "sglang", "0.5.10", target_config=SMOL)
    with pytest.raises(ParamsError, match="one of: sglang, vllm"):
        fed(sglang([1, 14, 26]), "trt", target_config=SMOL)


def test_what_the_trainer_says():
    assert trained_on(speculators([1, 5, 29]), target_config=SMOL).boundaries == (1, 5, 29)
    assert trained_on(speculators(None), target_config=SMOL) is None
    assert trained_on(speculators([1, 14, 26], "0.4.0"), target_config=SMOL) is None  # typed in for the conversion, not by a training
    assert trained_on(sglang([1, 14, 26]), target_config=SMOL).boundaries == (2, 15, 27)
    assert trained_on(sglang(), target_config=SMOL) is None


def test_reading_folders_and_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(speculators([2, 15, 27])))
    config = read_drafter(tmp_path)
    assert (config.kind, config.version, config.top_ids) == ("speculators", "0.9.0", [2, 15, 27])
    assert read_drafter(tmp_path / "config.json").raw == config.raw
    assert fed(tmp_path, "vllm", target_config=SMOL).boundaries == (2, 15, 27)


@pytest.mark.parametrize("content", ["[]", "{", json.dumps(SMOL), json.dumps({"speculators_model_type": "dflash"})])
def test_what_is_no_drafter(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"an EAGLE-3 drafter's config\.json"):
        read_drafter(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        read_drafter(tmp_path / "nowhere")
