"""The data set for trainers of one's own: by sample, with mask, in worker processes, and never with boundaries that are not there."""

import json

import pytest
import torch

import hsnb
from hsnb.errors import BoundaryError, DataError, DumpError
from tests.training_files import AUX, WRITERS, H, samples, write_connector, write_speculators

META = {"hsnb_format": "1", "boundaries": "[2, 15, 27]", "final": "pre"}


@pytest.fixture
def folder(tmp_path):
    write_speculators(tmp_path / "x", samples(), META)
    return tmp_path / "x"


def test_samples_come_as_they_are(folder):
    data = hsnb.StatesDataset(folder)
    assert (len(data), data.boundaries, data.final, data.lengths) == (4, (2, 15, 27), "pre", [5, 9, 1, 12])
    for (ids, mask, states), item in zip(samples(), data, strict=True):
        assert torch.equal(item["input_ids"], ids) and torch.equal(item["loss_mask"], mask)
        assert torch.equal(item["states"], states[:, :-1]) and torch.equal(item["final"], states[:, -1])
    assert torch.equal(data[-1]["final"], samples()[-1][2][:, -1])
    with pytest.raises(IndexError):
        data[4]


def test_batches_come_from_worker_processes(folder):
    data = hsnb.StatesDataset(folder, boundaries=[27, 15], final="pre")
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, collate_fn=data.collate, multiprocessing_context="spawn")
    (batch,) = loader
    assert batch["states"].shape == (4, 12, 2, H) and batch["lengths"].tolist() == [5, 9, 1, 12]
    assert torch.equal(batch["states"][1, :9], samples()[1][2][:, 1:3]) and not batch["states"][1, 9:].any()
    assert batch["loss_mask"].sum() == sum(mask.sum() for _, mask, _ in samples())


@pytest.mark.parametrize("layout", WRITERS)
def test_any_layout_that_has_a_mask(layout, tmp_path):
    WRITERS[layout](tmp_path / "x", samples())
    data = hsnb.StatesDataset(tmp_path / "x")
    if layout in ("spool-pt", "vllm"):
        with pytest.raises(DataError, match="no loss mask"):
            data[0]
    else:
        assert data[3]["states"].shape == (12, AUX, H) and data.boundaries == "unknown"


def test_what_is_not_there_is_refused(folder, tmp_path):
    with pytest.raises(BoundaryError, match=r"boundaries \[2, 15, 27\], expected \[3, 16, 28\]"):
        hsnb.StatesDataset(folder, boundaries=[3, 16, 28])
    with pytest.raises(BoundaryError, match="final pre, expected post"):
        hsnb.StatesDataset(folder, final="post")
    write_connector(tmp_path / "y", samples())
    with pytest.raises(BoundaryError, match=r"boundaries unknown, expected \[2\].*hsnb identify"):
        hsnb.StatesDataset(tmp_path / "y", boundaries=[2])
    with pytest.raises(BoundaryError, match="final unknown"):
        hsnb.StatesDataset(tmp_path / "y", final="pre")
    (tmp_path / "z").mkdir()
    with pytest.raises(DumpError):
        hsnb.StatesDataset(tmp_path / "z")
    (folder / "hsnb.json").write_text(json.dumps({"boundaries": [2, 15, 27], "final": "pre"}))
    assert hsnb.StatesDataset(folder, boundaries=[2], final="pre").boundaries == (2,)
