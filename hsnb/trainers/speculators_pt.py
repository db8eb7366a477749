"""speculators 0.3 and 0.4 (read in the released packages): data_{i}.pt with a list of states, the last one B_L, beside data_config.json.

data_config.json lists the layers of ALL columns, the final's too (L-1 in its numbering, that is B_L before the norm).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsnb.dumps.dump import unreadable
from hsnb.paths import write_json
from hsnb.trainers.folder import FileFolder, load_pt, tensors
from hsnb.trainers.layout import Layout, Row, Training, Written, columns, save_torch

CONFIG = "data_config.json"
_FILE = re.compile(r"data_(\d+)\.pt")


class SpeculatorsPtFolder(FileFolder):
    """Samples in the order of their numbers."""

    layout = "speculators-0.4"
    looked_for = "data_{i}.pt (and data_config.json)"
    trainer_final = "pre"
    conventions = ("speculators-0.3",)

    @classmethod
    def is_here(cls, path: Path, names: set[str]) -> bool:
        return any(_FILE.fullmatch(n) for n in names)

    def list_files(self) -> list[str]:
        return sorted((p.name for p in self.path.iterdir() if _FILE.fullmatch(p.name)), key=lambda f: int(_FILE.fullmatch(f)[1]))

    @cached_property
    def config(self) -> dict[str, Any]:
        """data_config.json, {} where there is none."""
        try:
            tree = json.loads((self.path / CONFIG).read_text())
            if not isinstance(tree, dict) or not isinstance(tree.get("hidden_states", {}), dict):
                raise ValueError("no object with hidden_states in it")
            return tree
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            raise unreadable(self.path / CONFIG, error) from error

    def claim(self) -> dict[str, Any]:
        ids = self.config.get("hidden_states", {}).get("layer_ids")
        return {"ids": [int(i) for i in ids[:-1]], "convention": "speculators-0.3", "final": "pre"} if ids else {}

    def read(self, file: Path):
        return read_pt(file)


def read_pt(file: Path):
    """Return ids, mask, aux columns and the final of one file. Raises DumpError when it is not a whole one."""
    tree = load_pt(file, "input_ids", "loss_mask", "hidden_states")
    states = tree["hidden_states"]
    if not isinstance(states, list | tuple) or not states or not all(isinstance(s, torch.Tensor) for s in states):
        raise unreadable(file, f"hidden_states is a {type(states).__name__}, expected a list of [S,H] tensors")
    return *tensors(file, tree, "input_ids", "loss_mask"), list(states[:-1]), states[-1]


class SpeculatorsPtLayout(Layout):
    """Written by the exporter, with data_config.json and sample_lengths.json; the mapping as d2t.npy and t2d.npy."""

    name = "speculators-0.4"
    folder = SpeculatorsPtFolder
    final = "pre"
    convention = "speculators-0.3"
    why = "speculators 0.4 applies the final norm itself; a normed state would be normed twice"

    def sample_file(self, row: int) -> str:
        return f"data_{row}.pt"

    def save(self, path: Path, row: Row) -> None:
        save_torch(path, {"input_ids": row.token_ids.clone(), "hidden_states": columns(row), "loss_mask": row.loss_mask.clone()})

    def read(self, path: Path):
        ids, mask, aux, final = read_pt(path)
        return ids, mask, torch.stack([*aux, final], dim=1)

    def finish(self, folder: Path, labels: Iterable, about: dict[str, Any], done: list[Written]) -> None:
        lengths = {str(one.row): one.tokens for one in done}
        (last,) = self.layer_ids({**about, "boundaries": [about["num_layers"]]})
        states = {"layer_ids": [*self.layer_ids(about), last], "description": "Layers selected for EAGLE3 fusion and target logits"}
        config = {"version": "2.0", "model": {"target_model_path": str(about["model"]), "hidden_size": about["hidden_size"]}}
        config |= {"data": {"num_samples": len(lengths)}, "hidden_states": states, "format": {"file_pattern": "data_{idx}.pt"}}
        write_json(folder / "sample_lengths.json", lengths)
        write_json(folder / CONFIG, config)

    def save_vocabulary(self, folder: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> list[Path]:
        files = [folder / "d2t.npy", folder / "t2d.npy"]
        for file, values in zip(files, (d2t, t2d), strict=True):
            np.save(file, values.numpy())
        return files

    def training(self, folder: Path, about: dict[str, Any], vocab: int) -> Training:
        words = ["python", "scripts/train.py", "--verifier-name-or-path", str(about["model"]), "--data-path", str(folder)]
        words += ["--d2t-path", str(folder / "d2t.npy"), "--t2d-path", str(folder / "t2d.npy")] if vocab else []
        ids = self.layer_ids(about)
        return Training(
            shlex.join(words),
            (f"in a clone of speculators 0.4; its config takes the default layers: write {ids} (its numbering) into the drafter's config",),
        )
