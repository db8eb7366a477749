"""In which order a shard's rows are sent: like lengths together, so that a batch of prefill is full and done at once.

Files are named by row, so the order of sending leaves no trace in the data set.
"""

from __future__ import annotations

from collections.abc import Sequence

from hsnb.errors import ParamsError


def send_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return positions of `lengths` (tokens a sample) in batches of neighbouring lengths, each of at most `budget` tokens in all.

    Longest first: a sample that does not fit the engine or the spool shows in the first minute and not on the third day, and
    the shard does not end with one long sample in flight alone. A sample longer than the budget is a batch of its own. Equal
    lengths keep their order, so the same input gives the same batches.
    """
    if budget < 1:
        raise ParamsError(got=f"a budget of {budget} tokens", expected="1 or more", likely="a spool without room", next="free the spool")
    batches: list[list[int]] = []
    room = 0
    for at in sorted(range(len(lengths)), key=lambda i: -int(lengths[i])):
        tokens = int(lengths[at])
        if not batches or tokens > room:
            batches.append([])
            room = budget
        batches[-1].append(at)
        room -= tokens
    return batches


def send_order(lengths: Sequence[int], budget: int) -> list[int]:
    """Return the positions of `send_batches` one after the other: each position once."""
    return [at for batch in send_batches(lengths, budget) for at in batch]
