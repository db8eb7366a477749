"""`hsnb identify` on files of every tool: right on each column, and honest where nothing can be told."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hsnb import cli
from hsnb.demo import model_folder
from hsnb.divergence.identify import identify
from hsnb.divergence.offsets import Offset
from hsnb.errors import DumpError, HsnbError
from hsnb.weights import Head
from tests import reference
from tests.helpers import prompt_ids
from tests.training_files import (
    WRITERS,
    write_deepspec,
    write_model_optimizer,
    write_req,
    write_specforge,
    write_speculators,
    write_speculators_pt,
)

TINY, LAYERS = "tiny-deepseek", 8


def states(columns, name=TINY, vocab=480, normed=False, n=4, tokens=24, dtype=torch.bfloat16):
    """Return [(ids, mask, states [S, K + 1, H])] of the given boundaries, by transformers in float32, stored in `dtype`."""
    made, head = [], Head.load(model_folder(name))
    for seed in range(n):
        ids = torch.tensor(prompt_ids(tokens + seed, vocab, seed=seed))
        all_of_them = reference.boundaries(name, ids)
        last = head.normed(all_of_them[-1]) if normed else all_of_them[-1]
        parts = [all_of_them[k] if k < len(all_of_them) - 1 else last for k in columns]
        made.append((ids, torch.ones_like(ids), torch.stack(parts, dim=1).to(dtype)))
    return made


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize(("normed", "final"), [(False, "pre"), (True, "post")])
def test_every_layout_before_and_after_the_norm(layout, normed, final, tmp_path):
    says = {"layer_ids": (1, 3, 4)} if layout == "deepspec" else {}  # a manifest always names ids: these are B_2, B_4, B_5
    WRITERS[layout](tmp_path / "data", states([2, 4, 5, LAYERS], normed=normed), **says)
    found = identify(tmp_path / "data", model_folder(TINY))
    assert (found.verdict, found.boundaries, found.final) == ("identified", (2, 4, 5), final)
    takes = {"speculators": "pre", "speculators-0.4": "pre", "specforge": "post", "model-optimizer": "post", "deepspec": "post"}.get(layout)
    assert found.wrong == (takes is not None and takes != final)
    if found.wrong:
        assert f"; it is {'B_8, before' if final == 'pre' else 'norm(B_8), after'} the norm." in found.text()


def test_shuffled_columns_and_shifted_ones_are_named(tmp_path):
    write_req(tmp_path / "shuffled", states([5, 2, 4, LAYERS]))
    found = identify(tmp_path / "shuffled", model_folder(TINY))
    assert found.boundaries == (5, 2, 4)
    assert not found.ok
    assert "not ascending: [5, 2, 4]" in found.text()


def test_our_own_claim_is_checked_not_believed(tmp_path):
    write_speculators(tmp_path, states([3, 5, 6, LAYERS]))
    (tmp_path / "hsnb.json").write_text(json.dumps({"boundaries": [2, 4, 5], "final": "pre", "model": str(model_folder(TINY))}))
    found = identify(tmp_path, model_folder(TINY))
    assert [(c.verdict, c.offset) for c in found.columns] == [("shifted", 1), ("shifted", 1), ("shifted", 1), ("right", 0)]
    assert not found.ok
    assert "The folder says boundaries [2, 4, 5]" in found.text()
    assert cli.main(["identify", str(tmp_path)]) == 1  # the model is named by hsnb.json


def test_one_layer_early_and_the_ids_of_each_tool(tmp_path):
    write_model_optimizer(tmp_path / "hf", states([2, 5, 6, LAYERS], normed=True))  # its transformers dump asked for 1, 4, 5
    found = identify(tmp_path / "hf", model_folder(TINY))
    assert found.ids["model-optimizer-hf"] == [1, 4, 5]
    write_model_optimizer(tmp_path / "vllm", states([1, 4, 5, LAYERS]))  # its vLLM dump, asked for the same: a layer early, before the norm
    found = identify(tmp_path / "vllm", model_folder(TINY))
    assert (found.boundaries, found.final) == ((1, 4, 5), "pre")
    assert found.ids["model-optimizer-vllm"] == [1, 4, 5]
    write_specforge(tmp_path / "specforge", states([2, 5, 6, LAYERS], normed=True))
    assert identify(tmp_path / "specforge", model_folder(TINY)).ids == {"specforge": [2, 5, 6]}  # DeepSeek's setter takes them as they are
    write_speculators_pt(tmp_path / "old", states([3, 5, 6, LAYERS]))
    assert identify(tmp_path / "old", model_folder(TINY)).ids == {"speculators-0.3": [2, 4, 5]}


def test_random_tensors_and_another_models_states_are_unknown(tmp_path):
    noise = torch.Generator().manual_seed(0)
    made = [(ids, mask, torch.randn(s.shape, generator=noise).to(s.dtype)) for ids, mask, s in states([2, 4, 5, LAYERS])]
    write_req(tmp_path / "random", made)
    found = identify(tmp_path / "random", model_folder(TINY))
    assert found.verdict == "unknown"
    assert found.boundaries == (None, None, None)
    assert found.final == "unknown"
    assert "unknown: the best fit" in found.text()

    write_req(tmp_path / "other", [(ids.flip(0), mask, s) for ids, mask, s in states([2, 4, 5, LAYERS])])  # these are other tokens' states
    assert identify(tmp_path / "other", model_folder(TINY)).verdict == "unknown"


def test_exactly_between_two_boundaries_nothing_is_told(tmp_path):
    halfway = [(i, m, torch.cat([(s[:, :1] + s[:, 1:2]) / 2, s[:, 1:]], 1)) for i, m, s in states([6, 7, LAYERS, LAYERS])]
    write_req(tmp_path, halfway)
    found = identify(tmp_path, model_folder(TINY))
    assert found.columns[0].verdict in ("undecided", "unknown")
    assert found.boundaries == (None, 7, 8)
    assert not found.ok


def test_what_noise_hides_is_undecided():
    """The same fit, judged beside a small noise and beside one that is as large as the margin over three."""
    fit = {"column": "aux_0", "said": None, "fits": "B_4", "fits_number": 4, "error": 0.02, "runner_up": "B_5", "runner_up_error": 0.26}
    assert Offset(**fit, distance=0.25, noise=0.015).verdict == "found"
    assert Offset(**fit, distance=0.25, noise=0.081).verdict == "undecided"
    assert (
        Offset(**{**fit, "error": 0.2}, distance=0.25, noise=0.01).verdict == "unknown"
    )  # nearer to no boundary than they are to each other
    assert Offset(**{**fit, "error": float("nan")}, distance=0.25, noise=0.01).verdict == "unknown"


def test_one_sample_of_another_norm_is_called_mixed(tmp_path):
    right, wrong = states([2, 4, 5, LAYERS]), states([2, 4, 5, LAYERS], normed=True)
    write_req(tmp_path, [*right[:3], wrong[3]])
    found = identify(tmp_path, model_folder(TINY))
    assert found.verdict == "mixed"
    assert found.mixed == ("req_3",)
    assert not found.ok


def test_bad_input_is_refused_in_four_parts(tmp_path, capsys):
    with pytest.raises(DumpError, match=r"expected one of"):
        identify(tmp_path, model_folder(TINY))
    write_req(tmp_path / "data", states([2, 4, 5, LAYERS]))
    assert cli.main(["identify", str(tmp_path / "data")]) == 2
    assert "no --model, expected the folder of the model" in capsys.readouterr().err
    assert cli.main(["identify"]) == 2
    with pytest.raises(HsnbError, match=r"expected 576, the model's"):
        identify(tmp_path / "data", model_folder("smollm2-fp32"))


def test_a_drafter_is_told_what_it_would_be_fed(tmp_path, capsys):
    write_speculators(tmp_path / "data", states([2, 4, 5, LAYERS]))
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    for name, ids, status in (("right", [2, 4, 5], 0), ("shifted", [1, 4, 5], 1)):
        drafter = tmp_path / name
        drafter.mkdir()
        eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
        (drafter / "config.json").write_text(json.dumps({**config, "eagle_config": eagle}))
        argv = ["identify", str(tmp_path / "data"), "--model", "demo:tiny-deepseek", "--drafter", str(drafter), "--json"]
        assert cli.main(argv) == status
        answer = json.loads(capsys.readouterr().out)
        assert answer["boundaries"] == [2, 4, 5]
        assert answer["fed"]["sglang"]["boundaries"] == ([2, 4, 5] if name == "right" else [2, 5, 6])
    assert "the drafter would see other layers" in " ".join(answer["said"])


def test_layer_ids_that_a_folder_states_are_checked_too(tmp_path):
    write_speculators_pt(tmp_path / "lie", states([2, 4, 5, LAYERS]), layer_ids=[2, 4, 5, 7])  # speculators 0.3: B_3, B_5, B_6
    found = identify(tmp_path / "lie", model_folder(TINY))
    assert found.boundaries == (2, 4, 5)
    assert not found.ok
    assert "The folder says the speculators-0.3 ids [2, 4, 5]" in found.text()
    write_deepspec(tmp_path / "other", states([2, 4, 5, LAYERS], normed=True), layer_ids=(1, 14, 26))
    assert "the deepspec ids [1, 14, 26], which a model of 8 layers has not" in identify(tmp_path / "other", model_folder(TINY)).text()
    write_speculators_pt(tmp_path / "true", states([3, 5, 6, LAYERS]), layer_ids=[2, 4, 5, 7])
    assert identify(tmp_path / "true", model_folder(TINY)).ok


def test_samples_that_begin_alike_and_folders_of_many(tmp_path):
    made = states([2, 4, 5, LAYERS], n=1, tokens=80)
    ids, mask, all_of_it = made[0]
    same_start = [(ids[:n], mask[:n], all_of_it[:n]) for n in (70, 72, 76, 80)]  # the model is causal: these are right, too
    write_speculators_pt(tmp_path / "alike", same_start)
    found = identify(tmp_path / "alike", model_folder(TINY))
    assert (found.verdict, found.boundaries) == ("identified", (2, 4, 5))
    write_speculators_pt(tmp_path / "many", states([2, 4, 5, LAYERS], n=1) * 4100)
    assert identify(tmp_path / "many", model_folder(TINY)).boundaries == (2, 4, 5)


def test_folders_unfit_for_training_are_said_to_be(tmp_path):
    write_req(tmp_path / "twice", states([2, 2, 5, LAYERS]))
    found = identify(tmp_path / "twice", model_folder(TINY))
    assert not found.ok and found.ids == {}
    assert "A boundary is there twice: [2, 2, 5]" in found.text()
    broken = states([2, 4, 5, LAYERS])
    broken[0][2][3, 1] = float("nan")
    write_req(tmp_path / "nan", broken)
    with pytest.raises(DumpError, match=r"req_0: 1 of 96 rows are not finite"):
        identify(tmp_path / "nan", model_folder(TINY))
    right, wrong = states([2, 4, 5, LAYERS]), states([2, 4, 5, LAYERS], normed=True)
    write_req(tmp_path / "mixed", [*right[:3], wrong[3]])
    assert "req_3 hold other boundaries than the rest" in identify(tmp_path / "mixed", model_folder(TINY)).text()


def test_another_models_ids_and_broken_models_are_refused_in_four_parts(tmp_path):
    made = [(ids + 600, mask, s) for ids, mask, s in states([2, 4, 5, LAYERS])]
    write_req(tmp_path / "ids", made)
    with pytest.raises(HsnbError, match=r"expected ids below 512, the model's vocabulary"):
        identify(tmp_path / "ids", model_folder(TINY))
    write_req(tmp_path / "data", states([2, 4, 5, LAYERS]))
    for name, content, words in (("m1", "{}", "no object with num_hidden_layers"), ("m2", "[]", "no object with num_hidden_layers")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
        with pytest.raises(HsnbError, match=words):
            identify(tmp_path / "data", tmp_path / name)
    broken = tmp_path / "broken"
    shutil.copytree(model_folder(TINY), broken)
    (broken / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(HsnbError, match=r"expected a checkpoint that transformers loads"):
        identify(tmp_path / "data", broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(HsnbError, match=r"no \*\.safetensors"):
        identify(tmp_path / "data", broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_boundary_of_a_trained_model_is_right(dtype, tmp_path):
    """SmolLM2's 31 boundaries: neighbours differ by 15 to 40 %, bfloat16 by 1 to 2 %."""
    columns = [*range(30), 30]
    write_req_wide(tmp_path, states(columns, name="smollm2-fp32", vocab=40000, dtype=dtype, n=2))
    found = identify(tmp_path, model_folder("smollm2-fp32"))
    assert found.boundaries == tuple(range(30))
    assert found.final == "pre"


def write_req_wide(folder: Path, made):
    """speculators' .pt layout takes any number of columns."""
    write_speculators_pt(folder, made)
