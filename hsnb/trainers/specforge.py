"""SpecForge 0.2: rows_{g}-{g+2000}/data_{i}.ckpt, torch-saved, with the final AFTER the norm (its head is bare). Its reader was run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import torch
import yaml

from hsnb.paths import replace_text
from hsnb.trainers.folder import FileFolder, load_pt, split_packed, tensors, without_batch
from hsnb.trainers.layout import Layout, Row, Training, save_torch

GROUP = 2000  # files a folder
VOCABULARY, CONFIG = "vocab_mapping/vocab_mapping.pt", "specforge.yaml"
_ROWS = re.compile(r"rows_\d+-\d+")
_FILE = re.compile(r"data_(\d+)\.ckpt(\.gz)?")


class SpecForgeFolder(FileFolder):
    """Samples in the order of their numbers."""

    layout = "specforge"
    looked_for = "rows_{g}-{g+2000}/data_{i}.ckpt"
    trainer_final = "post"
    conventions = ("specforge",)

    @classmethod
    def is_here(cls, path: Path, names: set[str]) -> bool:
        return any(_ROWS.fullmatch(n) for n in names) or any(_FILE.fullmatch(n) for n in names)

    def list_files(self) -> list[str]:
        inner = [p for p in self.path.iterdir() if _ROWS.fullmatch(p.name) and p.is_dir()]
        found = [f"{d.name}/{p.name}" for d in inner for p in d.iterdir() if _FILE.fullmatch(p.name)]
        found += [p.name for p in self.path.iterdir() if _FILE.fullmatch(p.name)]
        return sorted(found, key=lambda f: (int(_FILE.fullmatch(f.rpartition("/")[2])[1]), f))

    def read(self, file: Path):
        return read_ckpt(file)


def read_ckpt(file: Path):
    """Return ids, mask, aux columns and the final of one file. Raises DumpError when it is not a whole one."""
    tree = load_pt(file, "input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
    ids, mask, aux, final = tensors(file, tree, "input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
    final = without_batch(file, final)
    return ids, mask, split_packed(file, without_batch(file, aux), final), final


class SpecForgeLayout(Layout):
    """Written during extraction or by the exporter. The final is normed with the checkpoint's weight and eps, then rounded to bfloat16."""

    name = "specforge"
    folder = SpecForgeFolder
    final = "post"
    convention = "specforge"
    why = "SpecForge's head is bare: it takes the final as normed"
    direct = True

    def sample_file(self, row: int) -> str:
        first = row // GROUP * GROUP
        return f"rows_{first}-{first + GROUP}/data_{row}.ckpt"

    def save(self, path: Path, row: Row) -> None:
        aux, final = row.states[:, :-1].flatten(1)[None], row.states[:, -1][None]
        tree = {"input_ids": row.token_ids, "loss_mask": row.loss_mask, "aux_hidden_state": aux, "hidden_state": final}
        save_torch(path, {k: v.clone(memory_format=torch.contiguous_format) for k, v in tree.items()})  # of a view all would be saved

    def read(self, path: Path):
        ids, mask, aux, final = read_ckpt(path)
        return ids, mask, torch.stack([*aux, final], dim=1)

    def save_vocabulary(self, folder: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> list[Path]:
        path = folder / VOCABULARY
        path.parent.mkdir(exist_ok=True)
        save_torch(path, {"d2t": d2t, "t2d": t2d})
        return [path]

    def training(self, folder: Path, about: dict[str, Any], vocab: int) -> Training:
        """Write specforge.yaml beside the samples and return the command that takes it."""
        ids = self.layer_ids(about)
        model = {"target_model_path": str(about["model"]), "aux_hidden_state_layer_ids": ids}
        model |= {"vocab_mapping_path": str(folder / VOCABULARY)} if vocab else {}
        tree = {"model": model, "data": {"hidden_states_path": str(folder)}, "training": {"strategy": "eagle3"}}
        replace_text(folder / CONFIG, yaml.safe_dump(tree, sort_keys=False))
        notes = (
            f"`specforge export` does not write these layer ids: put eagle_aux_hidden_state_layer_ids {ids} into the exported eagle_config",
            "its trainer wants a sharded checkpoint of the target, with a model.safetensors.index.json",
        )
        if len(ids) != 3 or min(ids) < 0:
            notes += (f"it trains on three layers from 0 on, these are {ids}: hsnb export --boundaries K K K chooses among them",)
        if vocab:
            notes += (f"the draft model's config must have draft_vocab_size {vocab} (model.draft_model_config)",)
        return Training(shlex.join(["specforge", "train", "--config", str(folder / CONFIG)]), notes)
