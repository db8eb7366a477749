"""SpecForge 0.2: rows_{g}-{g+2000}/data_{i}.ckpt, torch-saved, with the final AFTER the norm (its head is bare). Its reader was run."""

from __future__ import annotations

import re
from pathlib import Path

from hsnb.trainers.folder import FileFolder, load_pt, split_packed, tensors, without_batch

GROUP = 2000  # files a folder
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
        tree = load_pt(file, "input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
        ids, mask, aux, final = tensors(file, tree, "input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
        final = without_batch(file, final)
        return ids, mask, split_packed(file, without_batch(file, aux), final), final
