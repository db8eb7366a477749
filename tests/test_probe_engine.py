"""The probe on a real server: PASS on the untouched one, and FAIL naming the culprit when its files are changed on disk in between."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hsnb import probe
from hsnb.dumps import open_dump
from hsnb.errors import CaptureError, ExtractError
from hsnb.probe.witness import SENTENCE
from hsnb.weights import Head
from tests.conftest import llama_boundaries

pytestmark = pytest.mark.engine("smollm2")


@pytest.fixture(scope="module")
def server(engine):
    return engine("smollm2")


@pytest.fixture(scope="module")
def folder(server):
    return server.deployment.model_path()


@pytest.fixture(scope="module")
def asked(server, folder, tmp_path_factory):
    """All that the probe asks, with a prompt as long as the sentence beside it: only values can tell the two apart. And its files as they were."""
    prompts = probe.fixed_prompts(folder)
    twin = tuple(reversed(prompts[1].token_ids))
    gathered = probe.gather(server, [*prompts, probe.Prompt("twin", twin)])
    kept = tmp_path_factory.mktemp("as they were")
    every = (*gathered.witnesses, gathered.greedy, gathered.batched, gathered.long, *gathered.bystanders)
    files = {kept / str(n): path for n, path in enumerate(p for w in every for p in (w.dump, w.tap, *w.ranks) if p)}
    for copy, path in files.items():
        shutil.copyfile(path, copy)
    yield gathered, files
    gathered.free()


@pytest.fixture
def evidence(asked):
    """What was asked, its files undamaged: each test damages them on disk, between server and probe."""
    gathered, files = asked
    for copy, path in files.items():
        shutil.copyfile(copy, path.with_suffix(".back"))
        os.replace(path.with_suffix(".back"), path)  # not written in place: the test before may still have the old file mapped
    return gathered


def at(boundary: int) -> int:
    """Return the column of a boundary."""
    return llama_boundaries(30).index(boundary)


def change(witness, edit) -> None:
    """Rewrite the dump's hidden_states on disk; ids and labels stay."""
    meta = open_dump(witness.dump).metadata
    tensors = load_file(witness.dump)
    tensors["hidden_states"] = edit(tensors["hidden_states"].clone()).contiguous()
    save_file(tensors, witness.dump, meta)


def judge(evidence, folder, **options):
    result = probe.judge(evidence, folder, **options)
    assert (result.verdict == "PASS") == (not result.failed)
    return result


def failed(evidence, folder) -> dict[str, str]:
    """Return {check: value} of what failed."""
    result = judge(evidence, folder)
    assert result.verdict == "FAIL"
    return {c.name: c.value for c in result.failed}


def exchange(one, two) -> None:
    os.rename(one, one.with_suffix(".away"))
    os.rename(two, one)
    os.rename(one.with_suffix(".away"), two)


def test_the_untouched_server_passes(evidence, folder):
    result = judge(evidence, folder)
    assert (result.verdict, result.failed) == ("PASS", [])
    assert result.layer_witnesses == ("the second tap", "transformers")
    names, columns = [c.name for c in result.checks], llama_boundaries(30)
    assert {f"layer: B_{k} by {witness}" for k in columns for witness in ("the second tap", "transformers")} <= set(names)
    errors = torch.tensor(result.logprob_errors["fox sentence"])
    assert len(errors) == 24  # the sentence has 24 tokens on SmolLM2
    assert 0 < errors.max() < 1e-3
    long = next(c for c in result.checks if c.name == "same: alone = at the beginning of a prompt in chunks")
    assert "88 tokens in 2 chunks" in long.value
    assert all(c.threshold for c in result.checks)


def test_run_asks_judges_frees_and_leaves_a_receipt(server):
    before = {p for p in server.spool.iterdir() if p.name != "receipt.json"}
    result = probe.run(server, [SENTENCE.upper(), list(range(40, 60))], repeat=2)
    assert result.ok
    assert {"ids 1..10", "fox sentence", "prompt 1", "prompt 2", "same", "norm", "layer"} <= {c.name.split(":")[0] for c in result.checks}
    assert {p for p in server.spool.iterdir() if p.name != "receipt.json"} == before
    assert json.loads(json.dumps(result.as_dict()))["verdict"] == "PASS"
    assert probe.require_receipt(server).verdict == "PASS"

    other = replace(server.armed[0], pid_created=server.armed[0].pid_created + 60)
    assert probe.read_receipt(replace(server, armed=[other])) is None  # the same pid after a restart is another server
    (server.spool / "receipt.json").write_text((server.spool / "receipt.json").read_text().replace("PASS", "FAIL"))
    with pytest.raises(ExtractError, match=r"the probe of .* said FAIL, expected a PASS bound to its processes"):
        probe.require_receipt(server)
    (server.spool / "receipt.json").unlink()
    with pytest.raises(ExtractError, match="no probe of this very server"):
        probe.require_receipt(server)


@pytest.mark.parametrize(("move", "fits"), [(1, "B_16"), (-1, "B_14")])
def test_a_boundary_replaced_by_its_neighbour_is_named(move, fits, evidence, folder):
    def edit(states):
        states[:, at(15)] = states[:, at(15 + move)]
        return states

    change(evidence.sentence, edit)
    culprits = failed(evidence, folder)
    assert {"layer: B_15 by the second tap", "layer: B_15 by transformers"} <= set(culprits)
    assert f"fits {fits}" in culprits["layer: B_15 by the second tap"]
    assert f"fits {fits}" in culprits["layer: B_15 by transformers"]
    assert all("B_15" in name or name.startswith("same") for name in culprits)
    assert not any("logprobs" in name for name in culprits)  # they cannot see it: the layer checks are needed


def test_the_norm_applied_and_stored_as_before_it(evidence, folder):
    head = Head.load(folder)

    def edit(states):
        states[:, -1] = head.normed(states[:, -1])
        return states

    change(evidence.sentence, edit)
    culprits = failed(evidence, folder)
    assert {"fox sentence: rebuilt logprobs, mean error", "fox sentence: rebuilt logprobs, largest error", "norm: norm state found"} <= set(
        culprits
    )
    assert culprits["norm: norm state found"].startswith("post ")
    assert not any("B_" in name for name in culprits)


def test_a_final_before_the_norm_labelled_after_it(evidence, folder):
    """The label is wrong, not the tensor: in the dump and in what the server says it armed."""
    for witness in (*evidence.witnesses, evidence.greedy, evidence.batched, evidence.long):
        meta = {**open_dump(witness.dump).metadata, "final": "post"}
        tensors = {k: v.clone() for k, v in load_file(witness.dump).items()}
        save_file(tensors, witness.dump, meta)
    said = replace(evidence, armed=(replace(evidence.armed[0], final="post"),))
    culprits = failed(said, folder)
    assert culprits["norm: norm state found"].startswith("pre ")
    assert "layer: final by the second tap" in culprits and "fox sentence: rebuilt logprobs, mean error" in culprits


def test_the_final_one_layer_early(evidence, folder):
    def edit(states):
        states[:, -1] = states[:, at(29)]
        return states

    change(evidence.sentence, edit)
    change(evidence.greedy, edit)
    culprits = failed(evidence, folder)
    assert {
        "fox sentence: rebuilt logprobs, mean error",
        "fox sentence: rebuilt logprobs, largest error",
        "layer: final by transformers",
    } <= set(culprits)
    assert "fits B_29" in culprits["layer: final by transformers"]
    assert float(culprits["norm: teacher top-1 on the greedy text"].split()[0]) < 0.9


def test_two_dumps_exchanged(evidence, folder):
    exchange(evidence.sentence.dump, evidence.witnesses[2].dump)
    culprits = failed(evidence, folder)
    assert {
        "fox sentence: token echo",
        "fox sentence: rebuilt logprobs, largest error",
        "twin: token echo",
        "same: alone = in a batch of eight",
    } <= set(culprits)


def test_the_states_of_two_requests_exchanged_under_the_right_ids(evidence, folder):
    one, two = (load_file(w.dump)["hidden_states"].clone() for w in evidence.witnesses[1:3])
    change(evidence.sentence, lambda _: two)
    change(evidence.witnesses[2], lambda _: one)
    culprits = failed(evidence, folder)
    assert {f"{prompt}: rebuilt logprobs, {which} error" for prompt in ("fox sentence", "twin") for which in ("mean", "largest")} <= set(
        culprits
    )
    assert "fox sentence: token echo" not in culprits
    assert "layer: B_2 by the second tap" in culprits


def test_different_lengths_exchanged(evidence, folder):
    exchange(evidence.witnesses[0].dump, evidence.sentence.dump)
    culprits = failed(evidence, folder)
    assert {"ids 1..10: rows", "fox sentence: rows", "fox sentence: token echo", "fox sentence: rebuilt logprobs, mean error"} <= set(
        culprits
    )


@pytest.mark.parametrize(
    ("edit", "culprit"),
    [
        (lambda s: s[:-1], "readable"),
        (lambda s: torch.cat([s[:4], s[4:5], s[4:-1]]), "fox sentence: rebuilt logprobs, largest error"),
        (lambda s: s.half(), "fox sentence: dtype"),
        (lambda s: s * 0, "fox sentence: rows not zero"),
        (lambda s: s.index_fill(0, torch.tensor([3]), 2.0), "fox sentence: rows not constant"),
        (lambda s: s.index_fill(0, torch.tensor([3]), float("nan")), "fox sentence: finite rows"),
        (lambda s: s[:, :-1], "readable"),
        (lambda s: s * 0.5 + s.roll(1, dims=-1) * 0.1, "layer: B_15 by the second tap"),
    ],
    ids=["a lost row", "a doubled row", "another dtype", "all zero", "a constant row", "NaN", "a lost column", "a partial sum"],
)
def test_other_damage_is_named(edit, culprit, evidence, folder):
    change(evidence.sentence, edit)
    assert any(culprit in name for name in failed(evidence, folder))


def test_a_stale_buffer(evidence, folder):
    """The states are those of the request before, in a buffer that was not copied."""
    before = load_file(evidence.batched.dump)["hidden_states"].clone()
    change(evidence.bystanders[0], lambda _: before)
    change(evidence.batched, lambda s: s.roll(1, dims=0))
    assert "same: alone = in a batch of eight" in failed(evidence, folder)


def test_a_rank_that_differs(evidence, folder):
    tree = json.loads(evidence.sentence.ranks[0].read_text())
    tree["rank"], tree["columns"]["15"] = 1, "0" * 32
    second = evidence.spool / "rank-1.away"
    second.write_text(json.dumps(tree))
    two = replace(evidence.sentence, ranks=(*evidence.sentence.ranks, second))
    armed = (replace(evidence.armed[0], tp_size=2), replace(evidence.armed[0], tp_size=2, rank=1))
    said = replace(evidence, armed=armed, witnesses=(evidence.witnesses[0], two, *evidence.witnesses[2:]))
    assert failed(said, folder) == {"same: every rank has the same states": "2 of 2 ranks, differing: 15"}
    second.unlink()


def test_an_answer_that_the_capture_changed(evidence, folder):
    text, ids, logprobs = evidence.plain[0]
    moved = (text, ids, (logprobs[0] + 1e-7, *logprobs[1:]))
    assert failed(replace(evidence, plain=(moved, moved)), folder) == {"same: answers unchanged by the capture": "different"}
    result = probe.judge(replace(evidence, plain=(evidence.plain[0], moved)), folder)
    assert result.verdict == "NOT PROVED"
    with pytest.raises(CaptureError, match="the probe's verdict is NOT PROVED"):
        result.require()


def test_no_second_tap_proves_nothing(evidence, folder):
    said = replace(evidence, witnesses=(evidence.witnesses[0], replace(evidence.sentence, tap=None), *evidence.witnesses[2:]))
    assert probe.judge(said, folder).verdict == "NOT PROVED"


def test_where_a_bad_row_is(evidence, folder):
    def edit(states):
        states[5, at(7)] = 0
        return states

    change(evidence.sentence, edit)
    assert failed(evidence, folder)["fox sentence: rows not zero"] == "1 bad, first: row 5 of B_7"


def test_a_dump_that_is_gone(evidence, folder):
    evidence.sentence.dump.unlink()
    result = judge(evidence, folder)
    assert "fox sentence: readable and comparable" in [c.name for c in result.failed]
    with pytest.raises(CaptureError, match=r"the probe's verdict is FAIL: fox sentence: readable and comparable is .*no such dump"):
        result.require()
