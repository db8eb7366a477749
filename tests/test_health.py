"""The health page on a prepared folder that is bad in every way it looks for, and on a good one."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from hsnb.errors import ParamsError
from hsnb.health import examine
from hsnb.health.examine import spread
from hsnb.health.measure import Sums, measure, position_bins
from hsnb.report.health import write_health
from hsnb.trainers.folder import make_sample

H, COLUMNS = 32, ("B_2", "B_4", "B_6", "final (pre)")


def write_folder(path, samples, boundaries=(2, 4, 6)):
    """Write samples (ids [S], mask [S], states [S, K + 1, H]) in speculators' layout, by datasets and safetensors themselves."""
    from datasets import Dataset
    from safetensors.torch import save_file

    rows = [{"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)} for ids, mask, _ in samples]
    Dataset.from_list(rows).with_format("torch").save_to_disk(str(path))
    (path / "hidden_states").mkdir()
    for row, (ids, _, states) in enumerate(samples):
        save_file({"hidden_states": states, "token_ids": ids}, path / "hidden_states" / f"hs_{row}.safetensors")
    about = {"hsnb_format": 1, "boundaries": list(boundaries), "final": "pre", "model": str(path / "no-model"), "num_layers": 8}
    (path / "hsnb.json").write_text(json.dumps(about))


def good(count=12, tokens=24, seed=0):
    """Return samples as a model leaves them: norms that grow by depth, a massive first token, masks with both values."""
    random = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 2.0, 3.5, 5.0])[None, :, None]
    out = []
    for n in range(count):
        size = tokens + n
        states = torch.randn(size, 4, H, generator=random) * scale
        states[0, :, 5] = 300.0
        mask = torch.ones(size, dtype=torch.int64)
        mask[: size // 2] = 0
        out.append((torch.randint(10, 90, (size,), generator=random), mask, states.bfloat16()))
    return out


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    path = tmp_path_factory.mktemp("bad") / "data"
    path.mkdir()
    samples = good()
    samples[1][2][7, 2] = 0  # a zero row of B_6
    samples[2][2][3, 0] = 1.5  # a constant row of B_2
    ids, mask, states = samples[3]
    samples[4] = (torch.flip(ids, [0]), mask, states.clone())  # two samples with the same states
    samples[5][2][9, 1, 4] = float("nan")
    samples[6][1][:] = 1  # a mask of ones
    samples[7][1][:] = 0
    samples[8][2][11] = samples[8][2][10]  # a row twice
    samples[9] = (samples[9][0], samples[9][1], (samples[9][2].float() * 20).bfloat16())
    for _, _, states in samples:
        states[:, 1] *= 10  # B_4, ten times its neighbours
    write_folder(path, samples)
    return examine(path, samples=0)


@pytest.mark.parametrize(
    ("kind", "level", "count", "where"),
    [
        ("zero row", "FAIL", 1, "hidden_states/hs_1.safetensors, row 7 of B_6"),
        ("constant row", "FAIL", 1, "hidden_states/hs_2.safetensors, row 3 of B_2"),
        ("nan row", "FAIL", 1, "hidden_states/hs_5.safetensors, row 9 of B_4"),
        ("same states", "FAIL", 1, "hidden_states/hs_4.safetensors is hidden_states/hs_3.safetensors"),
        ("repeated row", "FAIL", 1, "hidden_states/hs_8.safetensors, row 11 is row 10"),
        ("mask of ones", "look", 1, "hidden_states/hs_6.safetensors"),
        ("mask of zeros", "look", 1, "hidden_states/hs_7.safetensors"),
    ],
)
def test_what_is_bad_is_found_once_and_where_it_is(bad, kind, level, count, where):
    (found,) = [f for f in bad.findings if f.kind == kind]
    assert (found.level, found.count, found.where) == (level, count, (where,))


def test_a_layer_ten_times_its_neighbours_and_a_sample_of_another_scale_are_found(bad):
    (layer,) = [f for f in bad.findings if f.kind == "norm of a layer"]
    assert layer.what.startswith("B_4 has a median norm of ")
    (sample,) = [f for f in bad.findings if f.kind == "norm of a sample"]
    assert sample.count == 1
    assert sample.where[0].startswith("hidden_states/hs_9.safetensors: B_2 at ")
    assert (bad.verdict, bad.ok) == ("FAIL", False)
    assert [f.level for f in bad.findings] == sorted((f.level for f in bad.findings), key="FAILlook".index)


def test_the_page_has_every_finding_on_top_and_loads_nothing(bad, tmp_path):
    page = write_health(bad, tmp_path).read_text()
    first = page.index("<h2>")
    for finding in bad.findings:
        assert finding.what.replace("'", "&#x27;") in page[:first]
    assert page.count("<img alt=") == 3
    assert 'alt="Norm by state and position (n = 12 samples).' in page
    assert not re.findall(r"<script|<link|https?://|url\(", page)
    assert "<ins>⟦" in page
    tree = json.loads((tmp_path / "health.json").read_text())
    assert tree["ok"] is False
    assert {f["kind"] for f in tree["findings"]} >= {"zero row", "mask of ones"}


def test_a_good_folder_has_nothing(tmp_path):
    samples = good()
    (tmp_path / "d").mkdir()
    write_folder(tmp_path / "d", samples)
    found = examine(tmp_path / "d", samples=4, decode=lambda ids: "".join(chr(i + 32) for i in ids))
    assert found.findings == ()
    assert (found.verdict, found.looked, found.samples, found.columns) == ("PASS", 4, 12, COLUMNS)
    assert "4 of them, spread evenly" in found.about
    ids, mask, _ = samples[0]
    shown = found.texts[0]
    assert [on for on, _ in shown.runs] == [False, True]
    assert "".join(text for _, text in shown.runs) == "".join(chr(i + 32) for i in ids.tolist())
    assert shown.trained == int(mask.sum())
    medians = found.norm_frame().set_index("state")["median"]
    expected = torch.cat([s[2][1:, 1].float().norm(dim=-1) for k, s in enumerate(samples) if k in spread(12, 4)]).median().item()
    assert medians["B_4"] == pytest.approx(expected, rel=0.05)  # of a histogram whose bins are 4.4 % wide
    first = found.massive[0]
    assert (first["position"], first["dimension"], first["largest value"]) == (0, 5, 300.0)
    assert first["rows of this token over ten times the median norm"] >= 1
    assert sum(row["samples with their largest here"] for row in found.massive if row["state"] == first["state"]) <= 4


def test_samples_that_cannot_be_read_are_told_and_the_others_looked_at(tmp_path):
    (tmp_path / "d").mkdir()
    write_folder(tmp_path / "d", good(5))
    file = tmp_path / "d" / "hidden_states" / "hs_2.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = examine(tmp_path / "d")
    assert [(f.kind, f.count) for f in found.findings] == [("unreadable", 1)]
    assert found.looked == 4
    with pytest.raises(ParamsError, match="samples -1, expected 0"):
        examine(tmp_path / "d", samples=-1)


def test_equal_samples_are_only_worth_a_look(tmp_path):
    (tmp_path / "d").mkdir()
    samples = good(4)
    write_folder(tmp_path / "d", [*samples, samples[1]])
    found = examine(tmp_path / "d")
    assert [(f.kind, f.level) for f in found.findings] == [("same states", "look")]
    assert (found.verdict, found.ok) == ("LOOK", True)


def test_a_normed_final_is_not_compared_with_the_boundaries():
    sums = Sums(3)
    states = torch.randn(40, 3, H)
    states[:, 2] *= 100
    for n in range(4):
        ids = torch.arange(40)
        sample = make_sample(None, f"s{n}", ids, ids, [states[:, 0] + n, states[:, 1]], states[:, 2])
        sums.add(sample, measure(sample))
    from hsnb.health.findings import of_norms

    medians = [sums.quantiles(c, slice(1, None), (0.5,))[0] for c in range(3)]
    assert of_norms(sums, ("B_2", "B_4", "final (post)"), medians, True) == []
    (found,) = of_norms(sums, ("B_2", "B_4", "final (pre)"), medians, False)
    assert found.level == "look"


def test_bins_of_positions_and_the_spread_of_samples():
    assert position_bins(np.array([0, 1, 2, 3, 4, 7, 8])).tolist() == [0, 1, 2, 2, 3, 3, 4]
    assert spread(10, 4) == [0, 3, 6, 9]
    assert spread(3, 10) == [0, 1, 2] == spread(3, 0)
