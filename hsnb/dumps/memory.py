"""States that were read already, as a dump: what a layout of a trainer's own is checked through."""

from __future__ import annotations

from pathlib import Path

import torch

from hsnb.dumps.dump import UNKNOWN, Dump


class MemoryDump(Dump):
    """States [S, K + 1, H] with their labels, the final last."""

    layout = "memory"

    def __init__(self, path: Path, token_ids: torch.Tensor, states: torch.Tensor, boundaries: tuple[int, ...], final: str):
        self.path, self._ids, self._states = path, token_ids, states
        self.num_tokens, self.columns, self.hidden_size = states.shape
        self.dtype, self.boundaries, self.final = states.dtype, boundaries, final
        self.request_id, self.kind, self.metadata = path.stem, UNKNOWN, {}

    @property
    def token_ids(self) -> torch.Tensor:
        return self._ids

    @property
    def nbytes(self) -> int:
        return self._states.numel() * self._states.itemsize

    def column(self, index: int) -> torch.Tensor:
        return self._states[:, index]

    def states(self) -> torch.Tensor:
        return self._states
