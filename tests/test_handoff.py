"""The hand-off without a trainer or a server: the comparisons, their bars, the sentences, what is picked, the converted command line."""

import json
import re

import pytest

from hsnb import cli
from hsnb.boundaries import late
from hsnb.checks import Check
from hsnb.drafter.accept import Acceptance
from hsnb.drafter.handoff import Handoff, Judged, compare, needed, variants
from hsnb.drafter.served import check_served, require_served
from hsnb.drafter.texts import decoded, pick
from hsnb.drafter.train import Training
from hsnb.drafter.verdict import Verdict
from hsnb.errors import CaptureError, DataError, ExtractError, ParamsError
from tests.drafter_files import DRAFT, make_speculators, make_target
from tests.test_drafter_accept import texts, write_states

NAMES = ["right", "wrong norm", "one late", "right, [1, 5, 29]", "one late, [1, 5, 29]"]


def result(tmp_path, positions: dict[str, list[float]], losses: dict[str, float] | None = None) -> Handoff:
    """Return a result whose position-0 acceptances (one a seed) are these."""
    wanted = variants(30, [2, 15, 27], other="theirs" if len(positions) > 5 else "")
    judged = {}
    for (name, variant), shares in zip(wanted.items(), positions.values(), strict=True):
        runs = []
        for seed, share in enumerate(shares):
            loss = (losses or {}).get(name, 1.5)
            trained = Training(tmp_path / name, tmp_path, variant.aux, seed, (3.0, loss), 10, 1.0, 5, 0, {"full_acc_0": 0.33})
            hits = round(1000 * share)
            runs.append(Judged(variant, trained, Acceptance((1000 - hits, hits, 0, 0), 4, 99, variant.served, (share, 0.0, 0.0))))
        judged[name] = tuple(runs)
    return Handoff(judged, 99, 5.0, 30)


def test_the_comparisons_and_what_they_need():
    wanted = variants(30, [2, 15, 27])
    assert list(wanted) == NAMES
    assert wanted["one late"].aux == late([2, 15, 27], 30) == (3, 16, 28) and wanted["one late"].served == (2, 15, 27)
    assert wanted["wrong norm"].normed and not wanted["right"].normed
    assert wanted["one late, [1, 5, 29]"].aux == (2, 6, 30) and wanted["one late, [1, 5, 29]"].served == (1, 5, 29)
    assert needed(wanted) == (1, 2, 3, 5, 6, 15, 16, 27, 28, 29, 30)
    assert list(variants(30, [2, 15, 27], "folder"))[5] == "the other engine's"


def test_the_bars_hold_in_every_seed_or_fail(tmp_path):
    good = result(tmp_path, dict(zip(NAMES, [[0.34, 0.33], [0.12, 0.20], [0.32, 0.34], [0.32, 0.31], [0.24, 0.26]], strict=True)))
    norm, told, shifted = good.checks()
    assert norm.ok and norm.value == "+0.220, +0.130" and told.ok and told.value == "+0.080, +0.050"
    assert shifted.ok and shifted.threshold == "reported, no bar" and shifted.value == "+0.020, -0.010"
    bad = result(tmp_path, dict(zip(NAMES, [[0.34, 0.33], [0.12, 0.24], [0.32, 0.34], [0.32, 0.31], [0.24, 0.28]], strict=True)))
    assert [c.ok for c in bad.checks()] == [False, False, True]


def test_the_sentence_has_the_numbers(tmp_path):
    got = result(tmp_path, dict(zip(NAMES, [[0.34], [0.12], [0.32], [0.32], [0.24]], strict=True)), {"right": 1.57, "wrong norm": 1.53})
    assert "The loss is 2.29 on right states, 2.27 with the wrong norm" in got.loss_says
    assert "accept length is 1.34, 1.12, 1.32 (1.32 and 1.24)" in got.loss_says
    frame = got.frame()
    assert list(frame["trained on"]) == NAMES and frame["stored"][1] == "[2, 15, 27], norm(B_L)"
    assert frame["position 0, served"][0] == "0.340"
    assert "<table" in got._repr_html_() and got.as_dict()["variants"]["one late"]["aux"] == (3, 16, 28)
    assert len(got.plot()) == 2


def test_another_engines_states_are_reported(tmp_path):
    got = result(tmp_path, dict(zip([*NAMES, "other"], [[0.34], [0.12], [0.32], [0.32], [0.24], [0.335]], strict=True)))
    last = got.checks()[-1]
    assert last.name == "position 0, right less the other engine's" and last.value == "+0.005" and last.ok


def test_too_little_time_is_refused(tmp_path):
    with pytest.raises(ParamsError, match=r"at least 0\.5 minutes"):
        compare(None, None, variants(30, [2, 15, 27]), tmp_path, minutes=0.1, seeds=3)


def test_a_verdict_fails_by_its_first_check():
    good, bad = Check("a", "1", "1", True), Check("accept length", "1.37 predicted, 1.20 served", "within 2%", False)
    assert Verdict((good,), "").ok and Verdict((good,), "").require() is None
    with pytest.raises(ExtractError, match=r"accept length: 1\.37 predicted, 1\.20 served"):
        Verdict((good, bad), "").require()
    assert "FAIL" in Verdict((good, bad), "the sentence")._repr_html_() and Verdict((good, bad), "").as_dict()["ok"] is False


@pytest.fixture
def states(tmp_path):
    return write_states(tmp_path / "states", make_target(tmp_path / "target"), texts())


def test_what_is_trained_on_is_not_judged(states):
    (states.path / "hidden_states" / "hs_1.safetensors").unlink()  # a row of a shard that is not extracted
    samples, prompts = pick(states, training=2, held_out=1, answer_tokens=8)
    assert sorted(s.row for s in samples) == [0, 2] and all(len(s.answer) == 8 for s in samples)
    assert prompts == [states.table[1]["input_ids"][:12].tolist()]
    for sample in samples:
        assert sample.ids == states.table[sample.row]["input_ids"][: len(sample.ids)].tolist()


def test_rows_are_held_out_where_all_are_extracted(states):
    samples, prompts = pick(states, training=5, held_out=1, answer_tokens=8)
    assert len(samples) == 2 and len(prompts) == 1
    for path in (states.path / "hidden_states").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="no row has its states"):
        pick(type(states)(states.path, states.boundaries, "pre", 8, states.model), training=1, held_out=1, answer_tokens=8)


def test_the_command_line(tmp_path, capsys):
    target = make_target(tmp_path / "target")
    states = write_states(tmp_path / "states", target, texts())
    source = make_speculators(tmp_path / "trained", target, norm_output=True)
    assert (
        cli.main(["drafter", "convert", str(source), str(tmp_path / "out"), "--target", str(target), "--dtype", "float32", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["ids"] == [1, 3, 4]
    check = ["drafter", "check", str(tmp_path / "out"), "--target", str(target)]
    assert cli.main([*check, "--boundaries", "2", "4", "5"]) == 0
    assert "feeds it boundaries [2, 4, 5]" in capsys.readouterr().out
    assert cli.main([*check, "--boundaries", "3", "5", "6"]) == 1
    assert "NOT the same" in capsys.readouterr().out
    assert cli.main([*check, "--engine", "vllm", "--boundaries", "2", "4", "5"]) == 1  # SGLang's ids, one early in vLLM
    assert "[1, 3, 4]" in capsys.readouterr().out
    assert cli.main(["drafter", "accept", str(tmp_path / "out"), str(states.path), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["samples"] == 3 and got["boundaries"] == [2, 4, 5] and got["accept_length"] >= 1
    assert got["teacher_top1"] < 0.5 and "these are not the target's greedy answers" in got["text"]
    assert cli.main(["drafter", "check", str(tmp_path / "out")]) == 2
    assert "neither --target nor --states" in capsys.readouterr().err


def reported(tmp_path, drafter, captured, **changed):
    """Write what a server would have written for this drafter, feeding it `captured`."""
    from hsnb.drafter.convert import read_tensors

    report = tmp_path / "report"
    report.mkdir(exist_ok=True)
    sums = {}
    for name, tensor in read_tensors(drafter).items():
        name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name))
        if name != "d2t":
            name = name if name == "lm_head.weight" else f"model.{name}"
            sums[name] = sums.get(name, 0.0) + float(tensor.double().abs().sum())
    target = {"layers_to_capture": captured, "use_aux": True}
    draft = {"model_class": "LlamaForCausalLMEagle3", "num_aux": 3, "norm_before_fc": False, "fc_norm": False, "norm_output": True}
    draft |= {"hot_tokens": DRAFT, "sums": sums | {"model.embed_tokens.weight": 1.0}, **changed}
    (report / "target-0.json").write_text(json.dumps(target))
    (report / "draft-0.json").write_text(json.dumps(draft))
    return report


def test_what_a_server_says_is_compared(tmp_path):
    from hsnb.drafter.convert import convert

    target = make_target(tmp_path / "target")
    out = convert(make_speculators(tmp_path / "trained", target, norm_output=True), tmp_path / "out", target=target, dtype="float32").path
    assert all(c.ok for c in check_served(reported(tmp_path, out, [2, 4, 5]), out, [2, 4, 5]))
    with pytest.raises(CaptureError, match=r"boundaries fed: \[3, 5, 6\] \(B_3 for B_2, B_5 for B_4, B_6 for B_5\)"):
        require_served(reported(tmp_path, out, [3, 5, 6]), out, [2, 4, 5])
    with pytest.raises(CaptureError, match="norm_output: False"):
        require_served(reported(tmp_path, out, [2, 4, 5], norm_output=False), out, [2, 4, 5])
    report = reported(tmp_path, out, [2, 4, 5])
    draft = json.loads((report / "draft-0.json").read_text())
    draft["sums"]["model.layers.0.self_attn.qkv_proj.weight"] *= 0.9  # one of the three skipped
    (report / "draft-0.json").write_text(json.dumps(draft))
    with pytest.raises(CaptureError, match=r"not model\.layers\.0\.self_attn\.qkv_proj\.weight"):
        require_served(report, out, [2, 4, 5])
    with pytest.raises(CaptureError, match="SGLANG_HS_DRAFTER_DIR"):
        require_served(tmp_path / "nothing", out, [2, 4, 5])


def test_decoded_needs_states(states, monkeypatch):
    import transformers

    class Tokenizer:
        def decode(self, ids):
            return f"<{len(ids)}>"

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: Tokenizer())
    shown = decoded(states, rows=1, most=30)
    assert shown.rows == ((0, (("<7>", False), ("<23>", True))),)
    assert "<ins>⟦" in shown._repr_html_() and "&lt;23&gt;" in shown._repr_html_()
