"""The divergence analysis without an engine: folders of known states against transformers and against each other."""

import json

import nbformat
import pytest
import torch

from hsnb import divergence, notebook
from hsnb.demo import model_folder
from hsnb.divergence.measure import distances, linear_cka
from hsnb.divergence.states import States
from hsnb.errors import BoundaryError, DumpError, HsnbError, ParamsError
from tests.project import BIN, make_project, shell
from tests.test_identify import LAYERS, TINY, states
from tests.training_files import write_req, write_speculators


@pytest.fixture
def project(tmp_path, monkeypatch):
    root = make_project(tmp_path / "project")
    (root / "params" / "tiny.yaml").write_text(
        "name: tiny\nmodel: demo:tiny-deepseek\nserver: {device: cpu, dtype: float32}\ncapture: {boundaries: [2, 4, 5]}\n"
    )
    monkeypatch.setenv("HSNB_ROOT", str(root))
    return root


def labelled(folder, made, boundaries, final="pre"):
    write_speculators(folder, made)
    (folder / "hsnb.json").write_text(json.dumps({"boundaries": boundaries, "final": final, "model": str(model_folder(TINY))}))
    return folder


def study_of(project, a, b, **more):
    return divergence.begin(notebook.check("02_divergence", {"params": "params/tiny.yaml", "run": "x", "a": str(a), "b": str(b), **more}))


def compared(project, a, b):
    study = study_of(project, a, b)
    sides = [divergence.take(study, str(party)) for party in (a, b)]
    found = divergence.measure(study, *sides, divergence.witness(study))
    return study, found, divergence.conclude(study, found)


def test_a_folder_that_says_what_it_holds_agrees_with_transformers(project, tmp_path):
    folder = labelled(tmp_path / "right", states([2, 4, 5, LAYERS]), [2, 4, 5])
    _, found, said = compared(project, folder, "transformers")
    assert found.verdict == "agree"
    assert [o.offset for o in found.offsets] == [0, 0, 0, 0]
    assert [f.state for f in found.finals] == ["pre", "pre"]
    assert said.verdict == "THESE TWO AGREE: look elsewhere"
    assert "these two captures are not the reason" in said.text()
    assert all(c.ok for c in said.checks)


def test_a_folder_that_is_a_layer_late_is_told_so(project, tmp_path):
    folder = labelled(tmp_path / "late", states([3, 5, 6, LAYERS]), [2, 4, 5])
    _, found, said = compared(project, folder, "transformers")
    assert found.verdict == "shifted"
    assert [o.offset for o in found.offsets] == [1, 1, 1, 0]
    assert said.verdict == "THESE TWO COUNT LAYERS DIFFERENTLY"
    assert "aux_0 is B_3, B_2 is B_2; aux_1 is B_5, B_4 is B_4" in said.text()
    assert not all(c.ok for c in said.checks)


@pytest.mark.parametrize("model", [TINY, "smollm2-fp32"])
def test_two_folders_a_layer_apart_do_not_agree(model, project, tmp_path):
    """On SmolLM2 the columns of a folder are so far apart that the next layer's state is nearer than half the way to any other."""
    layers, vocab, aux = (8, 480, [2, 4, 5]) if model == TINY else (30, 40000, [2, 15, 27])
    (project / "params" / "tiny.yaml").write_text(f"name: x\nmodel: demo:{model}\ncapture: {{boundaries: {aux}}}\n")
    late = [aux[0] + 1, aux[1] + 1 if model != TINY else aux[1], aux[2] + 1 if model != TINY else aux[2]]
    made = [states([*c, layers], name=model, vocab=vocab, n=2) for c in (aux, late)]
    folders = [labelled(tmp_path / name, m, aux) for name, m in zip(("right", "late"), made, strict=True)]
    _, found, said = compared(project, *folders)
    assert [(p.a_is, p.b_is) for p in found.pairs] == [(f"B_{i}", f"B_{j}") for i, j in zip([*aux, layers], [*late, layers], strict=True)]
    assert found.verdict == "shifted"
    assert said.verdict == "THESE TWO COUNT LAYERS DIFFERENTLY"
    assert f"late (speculators) does not hold what it says: by transformers its {aux[0]} is B_{late[0]}" in said.text()
    assert "not the reason" not in said.text()


def test_two_folders_that_are_both_mislabelled_agree_and_are_told(project, tmp_path):
    folders = [labelled(tmp_path / name, states([3, 5, 6, LAYERS]), [2, 4, 5]) for name in "ab"]
    _, found, said = compared(project, *folders)
    assert {p.verdict for p in found.pairs} == {"right"}
    assert said.verdict == "THESE TWO AGREE, AND NEITHER HOLDS WHAT IT SAYS"


def test_another_norm_is_another_norm(project, tmp_path):
    pre = labelled(tmp_path / "pre", states([2, 4, 5, LAYERS]), [2, 4, 5])
    post = labelled(tmp_path / "post", states([2, 4, 5, LAYERS], normed=True), [2, 4, 5], final="post")
    _, found, said = compared(project, pre, post)
    assert [p.verdict for p in found.pairs] == ["right", "right", "right", "norm"]
    assert said.verdict.startswith("THE SAME LAYERS, ANOTHER NORM")
    assert "B_8 in pre (speculators) and norm(B_8) in post (speculators)" in said.text()


def test_two_unlabelled_folders_are_compared_place_by_place(project, tmp_path):
    write_req(tmp_path / "a", states([2, 4, 5, LAYERS]))
    write_req(tmp_path / "b", states([2, 4, 6, LAYERS]))
    _, found, said = compared(project, tmp_path / "a", tmp_path / "b")
    assert [(p.a_is, p.b_is, p.verdict) for p in found.pairs][1:3] == [("B_4", "B_4", "right"), ("B_5", "B_6", "shifted")]
    assert "By transformers a (spool-pt) holds B_2, B_4, B_5, B_8." in said.text()


def test_without_transformers_a_shift_is_not_taken_for_numerics(project, tmp_path):
    """Only the folders' own columns are known then, and none is a neighbour."""
    right = labelled(tmp_path / "right", states([2, 4, 6, LAYERS]), [2, 4, 6])
    late = labelled(tmp_path / "late", states([2, 4, 7, LAYERS]), [2, 4, 6])
    study = study_of(project, right, late)
    found = divergence.measure(study, *(divergence.take(study, str(f)) for f in (right, late)), None)
    assert [p.verdict for p in found.pairs][:2] == ["right", "right"]
    assert found.pairs[2].verdict in ("undecided", "unknown")
    assert found.verdict != "agree"


def test_transformers_against_itself_agrees(project):
    study = divergence.begin(
        notebook.check("02_divergence", {"params": "params/tiny.yaml", "run": "x", "a": "transformers", "b": "transformers"}),
        prompts={"text": list(range(20, 40))},
    )
    one = divergence.take(study, "transformers")
    found = divergence.measure(study, one, one, one[0])
    assert found.verdict == "agree"
    assert len(found.pairs) == 9


def test_an_unlabelled_folder_is_told_by_the_one_that_is_known(project, tmp_path):
    write_req(tmp_path / "first", states([3, 5, 6, LAYERS], normed=True))
    study, found, said = compared(project, "transformers", tmp_path / "first")
    assert found.verdict == "found"
    assert [o.fits for o in found.offsets] == ["B_3", "B_5", "B_6", "norm(B_8)"]
    assert {f.party: f.state for f in found.finals}["first (spool-pt)"] == "post"
    assert "aux_0 is B_3, aux_1 is B_5, aux_2 is B_6, final is norm(B_8)" in said.text()
    assert "after the final norm" in said.text()
    assert divergence.own_settings(study, {}, divergence.witness(study), {}) == ()


def test_folders_of_other_samples_are_refused(project, tmp_path):
    write_req(tmp_path / "a", states([2, 4, 5, LAYERS], n=2))
    write_req(tmp_path / "b", [(ids.flip(0), m, s) for ids, m, s in states([2, 4, 5, LAYERS], n=2)])
    with pytest.raises(DumpError, match=r"no sample to compare, expected samples of 8 tokens or more .* the same in both"):
        study_of(project, tmp_path / "a", tmp_path / "b")


def test_without_vllm_one_line_says_how_to_get_it(project, monkeypatch):
    monkeypatch.setenv("HSNB_VLLM_PYTHON", str(project / "nowhere" / "python"))
    with pytest.raises(HsnbError) as error:
        study_of(project, "sglang", "vllm")
    assert "make setup-vllm" in str(error.value)
    assert "\n" not in str(error.value)


def test_ids_that_a_setter_would_shift_past_the_last_layer_are_refused_first(project):
    with pytest.raises(BoundaryError, match=r"each in 0\.\.8"):
        study_of(project, "sglang", "transformers", ids=[1, 4, 8])


def test_a_party_or_an_id_that_is_none_is_refused_before_anything_starts(project):
    with pytest.raises(ParamsError, match=r"party 'sglan', expected one of sglang, vllm, transformers, a URL"):
        study_of(project, "sglan", "transformers")
    with pytest.raises(BoundaryError, match=r"each in 0\.\.8"):
        study_of(project, "transformers", "transformers", ids=[2, 9])


def test_the_measures_are_what_they_are_called():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, 32, generator=rng)
    far = x * 2 + 0
    a = States("a", (torch.arange(12),), (x,), ("B_0",), (0,))
    b = States("b", (torch.arange(12),), (torch.cat([far, torch.randn(12, 1, 32, generator=rng)], 1),), ("B_0", "B_1"), (0, 1))
    found = distances(a, b)
    assert found.relative_l2[0, 0].item() == pytest.approx(0.5)  # |x - 2x| / |2x|
    assert found.cosine[0, 0].item() == pytest.approx(1.0)
    assert found.max_abs[0, 0].item() == pytest.approx(x[1:].abs().max().item())
    assert found.cka[0, 0].item() == pytest.approx(1.0)
    assert found.cka[0, 1].item() < 0.95
    turn = torch.linalg.qr(torch.randn(32, 32, generator=rng))[0].double()
    y = x[:, 0].double()
    assert linear_cka(y[:, None], (y @ turn)[:, None]).item() == pytest.approx(1.0)  # a rotation is not seen
    assert found.first[0, 0].item() == pytest.approx(0.5)
    assert found.tokens == 11


def test_states_that_are_fewer_than_asked_are_refused():
    with pytest.raises(DumpError, match=r"states \[4, 2, 8\] for 4 tokens and the columns id 2, id 3, id 8"):
        States("vLLM", (torch.arange(4),), (torch.zeros(4, 2, 8),), ("id 2", "id 3", "id 8"), (2, 3, 8))


@pytest.mark.notebook
def test_the_notebook_compares_two_folders(project, tmp_path):
    """No engine is started: nobody loads a large model twice for a figure."""
    right = labelled(tmp_path / "right", states([2, 4, 5, LAYERS]), [2, 4, 5])
    same = labelled(tmp_path / "same", states([2, 4, 5, LAYERS], dtype=torch.float32), [2, 4, 5])
    line = [BIN / "papermill", "02_divergence.ipynb", "-p", "params", "params/tiny.yaml", "-p", "run", "folders"]
    done = shell(*line, "-p", "a", right, "-p", "b", same, cwd=project / "notebooks", timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((project / "outputs" / "folders" / "divergence.json").read_text())
    assert record["verdict"] == "THESE TWO AGREE: look elsewhere"
    assert record["settings"] == []
    executed = nbformat.read(project / "outputs" / "folders" / "02_divergence.ipynb", as_version=4)
    assert "no engine was started here" in json.dumps(executed.cells)
