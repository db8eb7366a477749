"""Rows that no forward pass gives are found by their bits, as torch's own comparisons find them."""

import pytest
import torch

from hsnb.checks import row_faults

NAN, INF = float("nan"), float("inf")
BIG, TINY = "big", "tiny"  # of the dtype
ROWS = [  # a row and its fault
    ((0.0, 0.0, 0.0), "zero"),
    ((-0.0, 0.0, -0.0), "zero"),
    ((1.5, 1.5, 1.5), "constant"),
    ((-1.5, -1.5, -1.5), "constant"),
    ((NAN, 1.0, 2.0), "wild"),
    ((1.0, -NAN, 2.0), "wild"),
    ((NAN, NAN, NAN), "wild"),
    ((INF, 1.0, 2.0), "wild"),
    ((-1.0, -INF, -2.0), "wild"),
    ((-INF, -INF, -INF), "wild"),
    ((1.0, 2.0, 3.0), ""),
    ((-1.0, -2.0, -3.0), ""),
    ((1.0, -1.0, 1.0), ""),
    ((-0.0, 0.0, TINY), ""),
    ((0.0, "-tiny", -0.0), ""),
    ((BIG, "-big", 0.0), ""),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_kind_of_row(dtype):
    limits = torch.finfo(dtype)
    names = {BIG: limits.max, TINY: limits.tiny, "-big": -limits.max, "-tiny": -limits.tiny}
    rows = torch.tensor([[names.get(x, x) for x in row] for row, _ in ROWS], dtype=torch.float64).to(dtype)
    for name, found in zip(("wild", "zero", "constant"), row_faults(rows[:, None, :].expand(-1, 2, -1).contiguous()), strict=True):
        assert found.shape == (len(ROWS), 2)
        assert found[:, 0].tolist() == found[:, 1].tolist() == [fault == name for _, fault in ROWS], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_same_as_torch_on_many_rows_of_every_bit_pattern(dtype):
    """Blocks end in the middle of the rows, and one in a few is at fault."""
    generator, size = torch.Generator().manual_seed(3), torch.finfo(dtype).bits // 8
    states = torch.randint(0, 256, (700, 3, 48 * size), generator=generator, dtype=torch.uint8).view(dtype)
    states = torch.where(states.float().isfinite() & (torch.arange(700)[:, None, None] % 3 > 0), states, torch.ones((), dtype=dtype) * 7)
    states[::7, 0, 5], states[::11, 1], states[::13, 2] = NAN, 0, -2.5
    low, high = states.amin(-1), states.amax(-1)
    wild = ~(low.isfinite() & high.isfinite())
    expected = wild, (low == 0) & (high == 0), (low == high) & (low != 0) & ~wild
    for found, right in zip(row_faults(states), expected, strict=True):
        assert right.any() and torch.equal(found, right)
