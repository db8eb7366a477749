"""The probe on a real server: PASS on the untouched one, and FAIL naming the culprit when its dumps are changed on disk in between."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from hsnb import probe
from hsnb.errors import CaptureError
from hsnb.probe.witness import SENTENCE
from hsnb.weights import Head

pytestmark = pytest.mark.engine("smollm2")

TWIN = "A slow green turtle walks under the busy bridge. That was another sample of several words to check hidden state extraction."


@pytest.fixture(scope="module")
def server(engine):
    return engine("smollm2")


@pytest.fixture(scope="module")
def head(server):
    return Head.load(server.deployment.model_path())


@pytest.fixture
def asked(server):
    """Two prompts of equal length (so that only the values can tell them apart) and the fixed ones."""
    prompts = probe.fixed_prompts(server.deployment.model_path())
    twin = next(p for p in probe.fixed_prompts(server.deployment.model_path(), [TWIN + " " * 0]) if p.name == "prompt 1")
    ids = (twin.token_ids * 2)[: len(prompts[1].token_ids)]
    return probe.ask(server, [*prompts, probe.Prompt("twin", ids)])


def change(witness, edit) -> None:
    """Rewrite the dump's hidden_states on disk; ids and labels stay."""
    from hsnb.dumps import open_dump

    meta = open_dump(witness.dump).metadata
    tensors = load_file(witness.dump)
    tensors["hidden_states"] = edit(tensors["hidden_states"].clone()).contiguous()
    save_file(tensors, witness.dump, meta)


def failed(witnesses, server, head) -> list[str]:
    result = probe.judge(witnesses, server.armed[0], head)
    assert (result.verdict == "FAIL") == bool(result.failed)
    return [c.name for c in result.failed]


def test_the_untouched_server_passes(server, asked, head):
    result = probe.judge(asked, server.armed[0], head)
    assert (result.verdict, result.failed) == ("PASS", [])
    errors = torch.tensor(result.logprob_errors["fox sentence"])
    assert len(errors) == 24  # the sentence has 24 tokens on SmolLM2; 23 of them predicted, and the answer's first
    assert 0 < errors.max() < 1e-3
    assert next(w.prompt.token_ids for w in asked) == tuple(range(1, 11))


def test_run_asks_judges_and_frees(server):
    before = set(server.spool.iterdir())
    result = probe.run(server, [SENTENCE.upper(), list(range(40, 60))], repeat=2)
    assert result.ok
    names = {c.name.split(":")[0] for c in result.checks}
    assert names == {"ids 1..10", "fox sentence", "prompt 1", "prompt 2"}
    assert set(server.spool.iterdir()) == before
    assert json.loads(json.dumps(result.as_dict()))["verdict"] == "PASS"


def test_the_norm_applied_and_stored_as_before_it(server, asked, head):
    def edit(states):
        states[:, -1] = head.normed(states[:, -1])
        return states

    change(asked[1], edit)
    assert failed(asked, server, head) == ["fox sentence: rebuilt logprobs, mean error", "fox sentence: rebuilt logprobs, largest error"]


def test_one_layer_early(server, asked, head):
    def edit(states):
        states[:, -1] = states[:, 29]  # B_29 labelled final: this server captures every boundary
        return states

    change(asked[1], edit)
    assert failed(asked, server, head) == ["fox sentence: rebuilt logprobs, mean error", "fox sentence: rebuilt logprobs, largest error"]


def test_two_dumps_exchanged(server, asked, head):
    one, two = asked[1].dump, asked[2].dump
    os.rename(one, one.with_suffix(".tmp"))
    os.rename(two, one)
    os.rename(one.with_suffix(".tmp"), two)
    names = failed(asked, server, head)
    assert {"fox sentence: token echo", "fox sentence: rebuilt logprobs, largest error", "twin: token echo"} <= set(names)


def test_the_states_of_two_requests_exchanged_under_the_right_ids(server, asked, head):
    one, two = (load_file(w.dump)["hidden_states"].clone() for w in asked[1:3])
    change(asked[1], lambda _: two)
    change(asked[2], lambda _: one)
    names = failed(asked, server, head)
    assert names == [f"{prompt}: rebuilt logprobs, {which} error" for prompt in ("fox sentence", "twin") for which in ("mean", "largest")]


def test_different_lengths_exchanged(server, asked, head):
    one, two = asked[0].dump, asked[1].dump
    os.rename(one, one.with_suffix(".tmp"))
    os.rename(two, one)
    os.rename(one.with_suffix(".tmp"), two)
    names = failed(asked, server, head)
    assert {"ids 1..10: rows", "fox sentence: rows", "fox sentence: token echo", "fox sentence: rebuilt logprobs, mean error"} <= set(names)


@pytest.mark.parametrize(
    ("edit", "culprit"),
    [
        (lambda s: s[:-1], "readable"),
        (lambda s: s.bfloat16(), "fox sentence: dtype"),
        (lambda s: s.index_fill(0, torch.tensor([3]), 0.0), "fox sentence: rows not zero"),
        (lambda s: s.index_fill(0, torch.tensor([3]), 2.0), "fox sentence: rows not constant"),
        (lambda s: s.index_fill(0, torch.tensor([3]), float("nan")), "fox sentence: finite rows"),
        (lambda s: s[:, :-1], "readable"),
    ],
    ids=["a lost row", "another dtype", "a zero row", "a constant row", "NaN", "a lost column"],
)
def test_other_damage_is_named(edit, culprit, server, asked, head):
    change(asked[1], edit)
    names = failed(asked, server, head)
    assert any(culprit in name for name in names), names
    assert all(name.startswith("fox sentence") for name in names)


def test_where_a_bad_row_is(server, asked, head):
    def edit(states):
        states[5, 7] = 0
        return states

    change(asked[1], edit)
    (check,) = probe.judge(asked, server.armed[0], head).failed
    assert check.value == "1 bad, first: row 5 of B_7"


def test_a_dump_that_is_gone(server, asked, head):
    asked[1].dump.unlink()
    result = probe.judge(asked, server.armed[0], head)
    assert [c.name for c in result.failed] == ["fox sentence: readable"]
    with pytest.raises(CaptureError, match=r"the probe's verdict is FAIL: fox sentence: readable is .*no such dump"):
        result.require()
