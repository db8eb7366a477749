"""Model-Optimizer (read in its source): {conversation_id}.pt, `hidden_states` the FINAL and `aux_hidden_states` the others, packed.

Its transformers dump and its vLLM dump look the same; they differ by one layer and by the norm, which the files say only where
the key `hidden_states_prenorm` is there (its DFlash reader heeds it, its EAGLE reader takes the state as normed).
"""

from __future__ import annotations

import shlex
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hsnb.paths import write_json
from hsnb.trainers.folder import FileFolder, load_pt, split_packed, tensors, without_batch
from hsnb.trainers.layout import Layout, Row, Training, save_torch

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
        return read_pt(file)


def read_pt(file: Path):
    """Return ids, mask (None where there is none), aux columns and the final of one file. Raises DumpError when it is not a whole one."""
    tree = load_pt(file, "input_ids", "hidden_states", "aux_hidden_states")
    ids, final, aux = tensors(file, tree, "input_ids", "hidden_states", "aux_hidden_states")
    final = without_batch(file, final)
    return ids, tree.get("loss_mask"), split_packed(file, without_batch(file, aux), final), final


class ModelOptimizerLayout(Layout):
    """Written by the exporter: the final normed, since its EAGLE trainer takes it so, and the flag that says so."""

    name = "model-optimizer"
    folder = ModelOptimizerFolder
    final = "post"
    convention = "model-optimizer-hf"
    why = "Model-Optimizer's EAGLE trainer takes the final as normed"
    mask = "optional"

    def sample_file(self, row: int) -> str:
        return f"{_conversation(row)}.pt"

    def save(self, path: Path, row: Row) -> None:
        final, aux = row.states[:, -1].clone(), row.states[:, :-1].flatten(1).clone()
        tree = {"input_ids": row.token_ids.clone(), "hidden_states": final, "aux_hidden_states": aux, PRENORM: row.final == "pre"}
        tree |= {"conversation_id": _conversation(row.number)}
        save_torch(path, tree if row.loss_mask is None else {**tree, "loss_mask": row.loss_mask.clone()})

    def read(self, path: Path):
        ids, mask, aux, final = read_pt(path)
        return ids, mask, torch.stack([*aux, final], dim=1)

    def save_vocabulary(self, folder: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> list[Path]:
        cache = folder.with_name(f"{folder.name}-vocabulary")  # its trainer takes every .pt below the data for a sample
        cache.mkdir(exist_ok=True)
        save_torch(cache / "d2t.pt", d2t)
        return [cache / "d2t.pt"]

    def training(self, folder: Path, about: dict[str, Any], vocab: int) -> Training:
        """Write eagle_config.json beside the samples and return the command that takes it."""
        ids = self.layer_ids(about)
        tree = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
        write_json(folder / "eagle_config.json", tree | ({"draft_vocab_size": vocab} if vocab else {}))
        words = ["./launch_train.sh", "--model", str(about["model"]), "--offline-data", str(folder)]
        words += ["--eagle_config", str(folder / "eagle_config.json"), "--output_dir", f"{folder}-drafter"]
        words += ["--draft_vocab_cache", str(folder.with_name(f"{folder.name}-vocabulary") / "d2t.pt")] if vocab else []
        return Training(shlex.join(words), ("in examples/speculative_decoding of a clone of Model-Optimizer",))


def _conversation(row: int) -> str:
    return f"row-{row:08d}"
