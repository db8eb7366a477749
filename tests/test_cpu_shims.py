"""What cpu_shims does on a CPU: the ops of chain speculation, one by one (tests/test_handoff_engine.py runs them inside SGLang), and start-up."""

import gc
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from tests.project import ROOT


def load(name: str) -> ModuleType:
    """Return a module of cpu_shims, which need not be installed."""
    spec = importlib.util.spec_from_file_location("shim_under_test", ROOT / "cpu_shims" / "src" / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ops():
    return load("sgl_kernel/speculation.py")


def test_leading_drafts_that_are_the_targets_choice_are_accepted(ops):
    candidates = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 8], [1, 2, 3, 4]])  # the root, then three drafts
    target = torch.tensor([[6, 7, 8, 9], [6, 7, 8, 9], [9, 3, 4, 5]])  # what the target says behind each
    index = torch.arange(12).view(3, 4)
    predicts, accept_index = torch.zeros(12, dtype=torch.int32), torch.full((3, 4), -1, dtype=torch.int32)
    accepted = torch.zeros(3, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(predicts, accept_index, accepted, candidates, index, index, index, target)
    assert accepted.tolist() == [3, 1, 0]
    assert accept_index.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    assert predicts.tolist() == [6, 7, 8, 9, 6, 7, 0, 0, 9, 0, 0, 0]  # a later hit behind a miss (8 in row 1) does not count
    tokens = predicts.view(3, 4)
    bonus = torch.zeros(3, dtype=torch.int64)
    ops.fill_bonus_tokens_cpu(tokens, accepted + 1, bonus, 4)
    assert bonus.tolist() == [9, 7, 9]


def test_a_chain_is_laid_out(ops):
    positions, index = torch.zeros(6, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    following, mask = torch.full((2, 3), -1), torch.zeros(18, dtype=torch.bool)
    lengths = torch.tensor([10, 4])
    ops.build_tree_kernel_efficient_cpu(None, None, lengths, mask, positions, index, following, following.clone(), 1, 2, 3, 0)
    assert positions.tolist() == [10, 11, 12, 4, 5, 6]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]] and following.tolist() == [[1, 2, -1], [1, 2, -1]]
    assert mask.view(2, 3, 3)[1].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        ops.build_tree_kernel_efficient_cpu(None, None, lengths, mask, positions, index, following, following, 2, 2, 3, 0)


def test_cache_slots(ops):
    pool = torch.arange(40).view(4, 10)
    rows, out = torch.tensor([2, 0]), torch.zeros(5, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(rows, pool, torch.tensor([1, 3]), torch.tensor([3, 6]), out, 10)
    assert out.tolist() == [21, 22, 3, 4, 5]
    out = torch.zeros(6, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(rows, pool, torch.tensor([4, 7]), out, 10, 1, 3)
    assert out.tolist() == [24, 25, 26, 7, 8, 9]
    packed = torch.zeros(3, dtype=torch.int64)
    ops.fill_accept_out_cache_loc_cpu(torch.tensor([[0, -1], [2, 3]]), torch.tensor([50, 51, 52, 53]), packed)
    assert packed.tolist() == [50, 52, 53]


def test_kv_rows_are_copied_even_when_they_overlap(ops):
    layers = [torch.arange(12.0).view(6, 2), torch.arange(12.0, 24.0).view(6, 2)]
    wanted = [x.clone() for x in layers]
    for x in wanted:
        x[[1, 2]] = x[[0, 1]].clone()
    addresses, sizes = torch.tensor([x.data_ptr() for x in layers]), torch.tensor([8, 8])
    ops.copy_all_layer_kv_cache_cpu(addresses, sizes, torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert all(torch.equal(a, b) for a, b in zip(layers, wanted, strict=True))


@pytest.mark.parametrize(
    ("argv", "given", "waits"),
    [
        (["python", "-m", "sglang.launch_server", "--port", "1"], {"SGLANG_USE_CPU_ENGINE": "1"}, True),
        (
            ["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"],
            {"SGLANG_USE_CPU_ENGINE": "1"},
            True,
        ),  # a scheduler
        (["python", "-m", "hsnb.patch", "3"], {"SGLANG_USE_CPU_ENGINE": "1"}, False),  # the process that writes: no plug-in would end it
        (["python", "-m", "sglang.launch_server", "--port", "1"], {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "hsnb"}, False),
        (["python", "-m", "sglang.launch_server", "--port", "1"], {}, False),
    ],
)
def test_the_garbage_collector_waits_for_the_plug_ins_only(argv, given, waits, monkeypatch):
    shims = load("hsnb_cpu_shims.py")
    monkeypatch.setattr(sys, "orig_argv", argv)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("SGLANG_USE_CPU_ENGINE", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    try:
        shims.install()
        assert gc.isenabled() is not waits
        monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
        shims.register()
        assert gc.isenabled()
    finally:
        gc.enable()
