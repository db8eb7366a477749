"""Training files: folders of any tool's layout read alike, and the layouts that are written. One file a layout.

`open_folder(path)` finds the layout by names alone and reads samples lazily; StatesDataset is the same for a trainer of one's
own. What a file does not say stays "unknown".
"""

from __future__ import annotations

from hsnb.errors import ParamsError
from hsnb.trainers.dataset import StatesDataset
from hsnb.trainers.deepspec import DeepSpecLayout
from hsnb.trainers.find import FOLDERS, open_folder
from hsnb.trainers.folder import TrainingFolder, TrainingSample
from hsnb.trainers.layout import Layout
from hsnb.trainers.model_optimizer import ModelOptimizerLayout
from hsnb.trainers.specforge import SpecForgeLayout
from hsnb.trainers.speculators import SpeculatorsLayout
from hsnb.trainers.speculators_pt import SpeculatorsPtLayout

__all__ = ["FOLDERS", "LAYOUTS", "WRITTEN", "Layout", "StatesDataset", "TrainingFolder", "TrainingSample", "layout", "open_folder"]

WRITTEN: dict[str, Layout] = {
    k.name: k() for k in (SpeculatorsLayout, SpecForgeLayout, ModelOptimizerLayout, DeepSpecLayout, SpeculatorsPtLayout)
}  # by the exporter
LAYOUTS = {name: one for name, one in WRITTEN.items() if one.direct}  # during extraction


def layout(name: str) -> Layout:
    """Return a layout that the extraction writes. Raises ParamsError for one that is not there."""
    if name not in LAYOUTS:
        raise ParamsError(
            got=f"layout is {name!r}",
            expected=f"one of {', '.join(LAYOUTS)}",
            likely="a typo",
            next="-p layout speculators",
        )
    return LAYOUTS[name]
