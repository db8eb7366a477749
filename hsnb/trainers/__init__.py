"""Training files: folders of any tool's layout read alike, and the layouts that are written. One file a layout.

`open_folder(path)` finds the layout by names alone and reads samples lazily. What a file does not say stays "unknown".
"""

from __future__ import annotations

from pathlib import Path

from hsnb.errors import DumpError, ParamsError
from hsnb.trainers.deepspec import DeepSpecFolder, DeepSpecLayout
from hsnb.trainers.folder import TrainingFolder, TrainingSample, entries
from hsnb.trainers.layout import Layout
from hsnb.trainers.model_optimizer import ModelOptimizerFolder, ModelOptimizerLayout
from hsnb.trainers.specforge import SpecForgeFolder, SpecForgeLayout
from hsnb.trainers.speculators import SpeculatorsFolder, SpeculatorsLayout
from hsnb.trainers.speculators_pt import SpeculatorsPtFolder, SpeculatorsPtLayout
from hsnb.trainers.spools import ConnectorFolder, PtSpoolFolder, SpoolFolder

__all__ = ["FOLDERS", "LAYOUTS", "TrainingFolder", "TrainingSample", "layout", "open_folder"]

# In the order they are looked for: names that only one layout has come first.
FOLDERS: tuple[type[TrainingFolder], ...] = (
    SpeculatorsFolder,
    DeepSpecFolder,
    SpecForgeFolder,
    SpeculatorsPtFolder,
    PtSpoolFolder,
    SpoolFolder,
    ConnectorFolder,
    ModelOptimizerFolder,
)

WRITTEN: dict[str, Layout] = {
    k.name: k() for k in (SpeculatorsLayout, SpecForgeLayout, ModelOptimizerLayout, DeepSpecLayout, SpeculatorsPtLayout)
}  # by the exporter
LAYOUTS = {name: one for name, one in WRITTEN.items() if one.direct}  # during extraction


def open_folder(path: str | Path) -> TrainingFolder:
    """Open a folder of training files of any known layout; no sample is opened. Raises DumpError when it is of none, or empty."""
    path = Path(path).expanduser()
    names = entries(path)
    kind = next((k for k in FOLDERS if k.is_here(path, names)), None)
    folder = kind(path) if kind else None
    if not folder:  # of no layout, or without a sample
        shown = ", ".join(sorted(names)[:5]) or "nothing"
        raise DumpError(
            got=f"{path}: {shown}{' ...' if len(names) > 5 else ''}" + (f", and no sample of the layout {kind.layout}" if kind else ""),
            expected=f"one of: {'; '.join(f'{k.layout}: {k.looked_for}' for k in FOLDERS)}",
            likely="the folder above or below it, or the files of another tool",
            next="name the folder that holds these files",
        )
    return folder


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
