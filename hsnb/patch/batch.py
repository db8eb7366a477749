"""The states of one batch on their way into the ring: side by side, so that a request's rows are one contiguous piece."""

from __future__ import annotations

import torch

from hsnb.patch.spool import bits


class States:
    """K + 1 states of a batch, each [tokens, H] of the model's dtype. Raises ValueError when they differ in shape or dtype.

    On a GPU they are stacked there, so that one copy takes them all. On a CPU each is copied to its place in the ring.
    """

    def __init__(self, columns: list[torch.Tensor]):
        if len(kinds := {(tuple(c.shape), c.dtype) for c in columns}) > 1:
            raise ValueError(f"states of different kinds: {sorted(f'{dtype}{list(shape)}' for shape, dtype in kinds)}")
        self.columns = columns
        self.tokens, self.hidden_size = columns[0].shape
        self.dtype = columns[0].dtype
        self.row_bytes = len(columns) * self.hidden_size * self.dtype.itemsize
        self.on_gpu = columns[0].device.type != "cpu"
        self.stacked = torch.stack(columns, dim=1) if self.on_gpu else None  # [tokens, K + 1, H]

    def rows(self, part: slice) -> torch.Tensor:
        """Return some rows as a new tensor [n, K + 1, H] in host memory."""
        if self.on_gpu:
            return self.stacked[part].cpu()
        return torch.stack([c[part] for c in self.columns], dim=1)

    def copy_to(self, here: torch.Tensor, part: slice) -> None:
        """Copy some rows into `here` [n, K + 1, H]; from a GPU on the current stream, not waiting for it."""
        if self.on_gpu:
            here.copy_(self.stacked[part], non_blocking=True)
        else:
            there = bits(here)
            for k, column in enumerate(self.columns):
                there[:, k] = bits(column[part])
