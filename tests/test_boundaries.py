"""The words: boundaries, and every tool's ids turned into them and back (FORMATS of the field, as measured)."""

import pytest

from hsnb.boundaries import (
    CONVENTIONS,
    check_boundaries,
    default_boundaries,
    from_boundaries,
    late,
    model_family,
    telling_boundaries,
    to_boundaries,
)
from hsnb.errors import BoundaryError

KIMI = {"num_layers": 61, "family": "deepseek"}
SMOL = {"num_layers": 30, "family": "llama"}


def test_boundaries_come_back_ascending():
    assert check_boundaries([27, 2, 15], 30) == (2, 15, 27)
    assert check_boundaries([0, 30], 30) == (0, 30)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "at least one"),
        ([31], "each in 0..30"),
        ([-1], "each in 0..30"),
        ([2, 2], "each boundary once"),
        ([True], "at least one"),
        (["2"], "at least one"),
    ],
)
def test_what_is_no_boundary_is_refused(given, words):
    with pytest.raises(BoundaryError, match=words):
        check_boundaries(given, 30)


def test_the_default_is_the_canonical_triple():
    assert default_boundaries(61) == (2, 30, 58)
    assert default_boundaries(30) == (2, 15, 27)


def test_one_late_and_where_it_shows_most():
    assert late([2, 15, 27], 30) == (3, 16, 28)
    assert telling_boundaries(30) == (1, 5, 29) and late(telling_boundaries(30), 30) == (2, 6, 30)
    assert telling_boundaries(61) == (1, 5, 60)
    with pytest.raises(BoundaryError, match=r"each in 0\.\.30"):
        late([2, 30], 30)


@pytest.mark.parametrize(
    ("ids", "convention", "model", "boundaries"),
    [
        ([2, 15, 27], "sglang-eagle3", SMOL, (3, 16, 28)),  # measured on SGLang 0.5.23: Llama shifts every list
        ([2, 4, 6], "sglang-eagle3", {"num_layers": 8, "family": "deepseek"}, (2, 4, 6)),  # measured: as it is
        ([1, 4, 6], "sglang-eagle3", {"num_layers": 8, "family": "deepseek"}, (2, 5, 7)),  # measured: a list that begins with 1 is shifted
        ([2, 30, 58], "sglang-eagle3", KIMI, (2, 30, 58)),
        ([1, 30, 58], "sglang-eagle3", KIMI, (2, 31, 59)),
        ([3, 31, 59], "sglang-layers-to-capture", KIMI, (3, 31, 59)),
        ([2, 30, 58], "vllm", KIMI, (2, 30, 58)),
        ([2, 30, 58], "speculators", KIMI, (2, 30, 58)),
        ([2, 30, 58], "speculators-0.3", KIMI, (3, 31, 59)),
        ([1, 29, 57], "specforge", KIMI, (2, 30, 58)),
        ([1, 14, 26], "specforge", SMOL, (2, 15, 27)),
        ([1, 29, 57], "model-optimizer-hf", KIMI, (2, 30, 58)),
        ([1, 29, 57], "model-optimizer-vllm", KIMI, (1, 29, 57)),
        ([-1, 29], "deepspec", KIMI, (0, 30)),
    ],
)
def test_ids_of_other_tools(ids, convention, model, boundaries):
    assert to_boundaries(ids, convention, **model) == boundaries


@pytest.mark.parametrize("convention", sorted(CONVENTIONS))
@pytest.mark.parametrize("model", [KIMI, SMOL], ids=["kimi", "smollm2"])
def test_there_and_back(convention, model):
    for boundaries in [(2, 15, 27), (3, 16, 28), (5, 9)]:
        ids = from_boundaries(boundaries, convention, **model)
        assert to_boundaries(ids, convention, **model) == boundaries


def test_deepseeks_ids_are_the_boundaries_themselves_unless_shifted():
    assert from_boundaries([2, 30, 58], "sglang-eagle3", **KIMI) == [2, 30, 58]
    assert from_boundaries([3, 31, 59], "specforge", **KIMI) == [3, 31, 59]
    assert from_boundaries([2, 15, 27], "specforge", **SMOL) == [1, 14, 26]


def test_deepseeks_setter_cannot_name_boundary_1_first():
    with pytest.raises(BoundaryError, match="a first boundary other than 1"):
        from_boundaries([1, 30], "sglang-eagle3", **KIMI)
    assert from_boundaries([1, 15], "sglang-eagle3", **SMOL) == [0, 14]


def test_transformers_last_entry_is_no_boundary():
    with pytest.raises(BoundaryError, match=r"norm\(B_L\), not B_L"):
        to_boundaries([2, 30], "hf", **SMOL)


@pytest.mark.parametrize("convention", [None, "", "sglang", "layer id"])
def test_bare_ids_are_refused(convention):
    with pytest.raises(BoundaryError, match="same number names different tensors"):
        to_boundaries([2, 15, 27], convention, **SMOL)


def test_families():
    assert model_family({"architectures": ["KimiK25ForConditionalGeneration"]}) == "deepseek"
    assert model_family({"model_type": "deepseek_v3"}) == "deepseek"
    assert model_family({"architectures": ["MistralLarge3ForCausalLM"]}) == "deepseek"
    assert (
        model_family({"architectures": ["GlmMoeDsaForCausalLM"]})
        == model_family({"architectures": ["Glm4MoeLiteForCausalLM"]})
        == "deepseek"
    )
    assert model_family({"architectures": ["Glm4MoeForCausalLM"]}) == "llama"
    assert model_family({"architectures": ["LlamaForCausalLM"]}) == "llama"
