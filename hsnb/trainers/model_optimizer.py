"""Model-Optimizer (read in its source): {conversation_id}.pt, `hidden_states` the FINAL and `aux_hidden_states` the others, packed.

Its transformers dump and its vLLM dump look the same; they differ by one layer and by the norm, which the files say only where
the key `hidden_states_prenorm` is there (its DFlash reader heeds it, its EAGLE reader takes the state as normed).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from hsnb.trainers.folder import FileFolder, load_pt, split_packed, tensors, without_batch

PRENORM = "hidden_states_prenorm"


class ModelOptimizerFolder(FileFolder):
    """Samples in the order of their paths; the trainer takes every .pt below the folder."""

    layout = "model-optimizer"
    looked_for = "{conversation_id}.pt"
    trainer_final = "post"
    conventions = ("model-optimizer-hf", "model-optimizer-vllm")

    @classmethod
    def is_here(cls, path: Path, names: set[str]) -> bool:
        return any(n.endswith(".pt") and n not in ("token_freq.pt", "final.pt") and not n.startswith("aux_") for n in names)

    def list_files(self) -> list[str]:
        return sorted(str(p.relative_to(self.path)) for p in self.path.rglob("*.pt") if not p.name.startswith("."))

    @cached_property
    def _first(self) -> dict[str, Any]:
        return load_pt(self.path / self.files[0]) if self.files else {}

    def claim(self) -> dict[str, Any]:
        flag = self._first.get(PRENORM)
        return {} if flag is None else {"final": "pre" if bool(flag) else "post"}

    def read(self, file: Path):
        tree = load_pt(file, "input_ids", "hidden_states", "aux_hidden_states")
        ids, final, aux = tensors(file, tree, "input_ids", "hidden_states", "aux_hidden_states")
        final = without_batch(file, final)
        return ids, tree.get("loss_mask"), split_packed(file, without_batch(file, aux), final), final
