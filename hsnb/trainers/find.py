"""Find the layout of a folder of training files, by names alone."""

from __future__ import annotations

from pathlib import Path

from hsnb.errors import DumpError
from hsnb.trainers.deepspec import DeepSpecFolder
from hsnb.trainers.folder import TrainingFolder, entries
from hsnb.trainers.model_optimizer import ModelOptimizerFolder
from hsnb.trainers.specforge import SpecForgeFolder
from hsnb.trainers.speculators import SpeculatorsFolder
from hsnb.trainers.speculators_pt import SpeculatorsPtFolder
from hsnb.trainers.spools import ConnectorFolder, PtSpoolFolder, SpoolFolder

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
