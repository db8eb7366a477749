"""The record over several seeds: gone on with, judged seed by seed, and shown as it is."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import handoff_seeds as seeds
from hsnb.drafter.handoff import variants
from tests.drafter_files import make_target
from tests.test_drafter_accept import texts, write_states

SHARES = {
    "right": 0.30,
    "wrong norm": 0.15,
    "one late": 0.29,
    "right, [1, 5, 7]": 0.28,
    "one late, [1, 5, 7]": 0.20,
    "the other engine's": 0.305,
}


@pytest.fixture
def states(tmp_path):
    target = make_target(tmp_path / "target")
    for name in ("training", "held-out"):
        write_states(tmp_path / "handoff" / name, target, texts())
    return tmp_path / "handoff"


@pytest.fixture
def trained(monkeypatch):
    """compare that trains nothing: the share of SHARES, a hundredth more with each seed."""
    asked = []

    def compare(training, held_out, wanted, out, *, minutes, seeds, samples):
        ((name, variant),) = wanted.items()
        asked.append((name, seeds, [s.ids for s in samples]))
        at = list(variants(8, [2, 4, 5], "x")).index(name)
        share = list(SHARES.values())[at]

        def judged(seed):
            accepted, training = (
                SimpleNamespace(accept_length=1 + share),
                SimpleNamespace(last_loss=1.5, validation={"full_acc_0": 0.3}, seconds=2.0),
            )
            return SimpleNamespace(variant=variant, position_0=share + seed / 100, accepted=accepted, training=training)

        return SimpleNamespace(judged={name: tuple(judged(seed) for seed in range(seeds))})

    monkeypatch.setattr(seeds, "compare", compare)
    return asked


def test_what_is_there_is_not_trained_again_and_the_bars_are_of_every_seed(states, trained, tmp_path, capsys):
    file = tmp_path / "record.json"
    line = [str(states), "--seeds", "2", "--other", "x", "--record", str(file)]
    assert seeds.main([*line, "--limit-s", "-1"]) == 1 and json.loads(file.read_text())["comparisons"] == {}
    assert seeds.main(line) == 0
    assert [name for name, _, _ in trained] == list(json.loads(file.read_text())["comparisons"])
    assert len(trained) == 6 and trained[0][2] == [ids.tolist() for ids, *_ in texts()]
    assert seeds.main(line) == 0 and len(trained) == 6
    shown = capsys.readouterr().out
    assert "| right less wrong norm | +0.150, +0.150 | at least 0.1 in every seed |" in shown
    assert "| right less the other engine's | -0.005, -0.005 | reported |" in shown
    assert (
        "| wrong norm | [2, 4, 5] | 1.500 (1.500 to 1.500) | 0.300 (0.300 to 0.300) | 0.155 (0.150 to 0.160) | 1.150 (1.150 to 1.150) |"
        in shown
    )
    record = json.loads(file.read_text())
    record["comparisons"]["wrong norm"][1]["position_0"] = 0.25
    assert seeds.met(record) == [False, True]
    del record["comparisons"]["one late"]
    assert (
        seeds.owed(record) == ["one late"]
        and seeds.table(record).endswith("Not trained: one late.\n")
        and "one late |" not in seeds.table(record).split("position 0 |")[0].splitlines()[4]
    )


def test_the_page_is_changed_between_its_marks_only(states, trained, tmp_path):
    file = tmp_path / "record.json"
    seeds.main([str(states), "--record", str(file)])
    page = f"before\n{seeds.BEGIN}old\n{seeds.END}after\n"
    new = seeds.rendered(page, json.loads(file.read_text()))
    assert new.startswith("before\n") and new.endswith("after\n") and "old" not in new and "| right |" in new
    assert seeds.rendered(new, json.loads(file.read_text())) == new
