"""speculators 0.3 and 0.4 (read in the released packages): data_{i}.pt with a list of states, the last one B_L, beside data_config.json.

data_config.json lists the layers of ALL columns, the final's too (L-1 in its numbering, that is B_L before the norm).
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hsnb.dumps.dump import unreadable
from hsnb.trainers.folder import FileFolder, load_pt, tensors

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
            return json.loads((self.path / CONFIG).read_text())
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            raise unreadable(self.path / CONFIG, error) from error

    def claim(self) -> dict[str, Any]:
        ids = self.config.get("hidden_states", {}).get("layer_ids")
        return {"ids": [int(i) for i in ids[:-1]], "convention": "speculators-0.3", "final": "pre"} if ids else {}

    def read(self, file: Path):
        tree = load_pt(file, "input_ids", "loss_mask", "hidden_states")
        states = tree["hidden_states"]
        if not isinstance(states, list | tuple) or not states or not all(isinstance(s, torch.Tensor) for s in states):
            raise unreadable(file, f"hidden_states is a {type(states).__name__}, expected a list of [S,H] tensors")
        return *tensors(file, tree, "input_ids", "loss_mask"), list(states[:-1]), states[-1]
