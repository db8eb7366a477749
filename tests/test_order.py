"""The order in which a shard's rows are sent: each once, like lengths together, within the budget."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hsnb.data import send_batches, send_order
from hsnb.errors import ParamsError


def test_batches_hold_like_lengths_and_keep_to_the_budget():
    lengths = torch.randint(1, 500, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = send_batches(lengths, 2048)
    assert sorted(at for batch in batches for at in batch) == list(range(1000))  # each once
    assert all(sum(lengths[at] for at in batch) <= 2048 for batch in batches)
    assert sum(sum(lengths[at] for at in batch) for batch in batches[:-1]) > 0.8 * 2048 * (len(batches) - 1)  # and well filled
    spans = [(lengths[batch[0]], lengths[batch[-1]]) for batch in batches]
    assert all(first >= last for first, last in spans) and all(a[1] >= b[0] for a, b in pairwise(spans))
    assert send_order(lengths, 2048) == [at for batch in batches for at in batch]


def test_a_sample_over_the_budget_goes_alone_and_equal_lengths_keep_their_order():
    assert send_batches([3, 9, 3, 3, 2], 6) == [[1], [0, 2], [3, 4]]
    assert send_order([4, 4, 4], 100) == [0, 1, 2] and send_order([], 5) == []
    with pytest.raises(ParamsError, match="a budget of 0 tokens"):
        send_order([1], 0)
