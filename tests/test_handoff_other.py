"""The other engine's states of the same samples, without the engine: asked in its numbering, compared with what was asked."""

import json
import types

import pytest
import torch

from hsnb import vllm
from hsnb.drafter.handoff import Variant, _states
from hsnb.drafter.other import VLLM, take_vllm
from hsnb.drafter.plan import plan
from hsnb.drafter.states import Sample
from hsnb.errors import DumpError, ParamsError
from tests.drafter_files import make_target
from tests.test_drafter_accept import texts, write_states

SAMPLES = [Sample((1, 2, 3), (4, 5)), Sample((6,), (7, 8, 9))]


@pytest.fixture
def engine(monkeypatch):
    """vllm.capture that gives the column number times ten plus the token id in every element; `change` alters what it gives."""
    asked = {}

    def capture(model, prompts, ids, *, dtype, out, progress):
        asked.update(ids=list(ids), dtype=dtype, prompts=[list(p) for p in prompts])
        width = json.loads((model / "config.json").read_text())["hidden_size"]

        def dump(prompt):
            states = torch.stack([torch.tensor(prompt).float() + 10 * k for k in range(len(ids))], 1)
            return types.SimpleNamespace(token_ids=torch.tensor(prompt), states=lambda: states[..., None].expand(-1, -1, width))

        boundaries = asked.get("boundaries", tuple(ids))
        return types.SimpleNamespace(dumps=tuple(dump(p) for p in prompts), boundaries=boundaries, vllm_version="0.32.0")

    monkeypatch.setattr(vllm, "capture", capture, raising=False)
    return asked


def test_the_same_samples_in_its_own_numbering(tmp_path, engine):
    target = make_target(tmp_path / "target")
    got = take_vllm(SAMPLES, tmp_path / "out", (5, 2, 4), target)
    layers = got.num_layers
    assert engine["ids"] == [2, 4, 5, layers] and engine["prompts"] == [s.ids for s in SAMPLES] and engine["dtype"] == "float32"
    assert got.boundaries == (2, 4, 5) and got.final == "pre" and got.rows == [0, 1]
    ids, mask, states = got.read(1)
    assert ids.tolist() == [6, 7, 8, 9] and mask.tolist() == [0, 1, 1, 1]
    assert states.dtype == torch.bfloat16 and states[:, :, 0].tolist() == [[t + 10 * k for k in range(4)] for t in (6, 7, 8, 9)]
    assert json.loads((got.path / "hsnb.json").read_text())["engine"] == "vLLM 0.32.0"


def test_other_boundaries_than_asked_are_refused(tmp_path, engine):
    engine["boundaries"] = (3, 5, 6, 8)
    with pytest.raises(DumpError, match=r"boundaries \[3, 5, 6, 8\]"):
        take_vllm(SAMPLES, tmp_path / "out", (2, 4, 5), make_target(tmp_path / "target"))
    assert not list((tmp_path / "out" / "hidden_states").iterdir())


def test_a_comparison_takes_them_for_its_samples(tmp_path, engine):
    states = write_states(tmp_path / "states", make_target(tmp_path / "target"), texts())
    trained, check = _states(states, states, Variant("other", (2, 4, 5), (2, 4, 5), folder=VLLM), SAMPLES, tmp_path / "out")
    assert trained.table[0]["input_ids"].tolist() == SAMPLES[0].ids and check.boundaries == (2, 4, 5)


def test_specforge_is_told_what_to_use_instead():
    with pytest.raises(ParamsError, match="hsnb training DIR prints its command"):
        plan(types.SimpleNamespace(trainer="specforge"), None)
