"""What every folder of training files offers, whatever its layout: samples by index, and what the folder says of itself."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from hsnb.dumps.dump import UNKNOWN, unreadable
from hsnb.errors import DumpError

ABOUT = "hsnb.json"  # what hsnb writes beside a folder of any layout


@dataclass(frozen=True)
class TrainingSample:
    """One sample: int64 [S] ids (None where the layout has none) and mask (None likewise), columns [S, H] each in file order.

    `column_names` are "aux_0", "aux_1", ... and "final": places in the file. Which boundary a column is, is not said here.
    """

    name: str  # the file, relative to the folder; with #index where a file holds many
    token_ids: torch.Tensor | None
    loss_mask: torch.Tensor | None
    columns: tuple[torch.Tensor, ...]
    column_names: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return self.columns[0].shape[0]

    @property
    def hidden_size(self) -> int:
        return self.columns[0].shape[1]


class TrainingFolder(ABC):
    """A folder of one layout. Opening it reads an index or a directory listing and no sample.

    Class attributes: `layout`, its name; `looked_for`, the files by which it is known; `trainer_final`, the final state that its
    trainer takes the last column for ("pre" | "post"), whatever is in it; `conventions`, in which its trainer's users give layer ids.
    """

    layout: ClassVar[str]
    looked_for: ClassVar[str]
    trainer_final: ClassVar[str] = UNKNOWN
    conventions: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: Path):
        self.path = Path(path)

    @classmethod
    @abstractmethod
    def is_here(cls, path: Path, names: set[str]) -> bool:
        """Say whether `path`, whose entries are `names`, is of this layout, by names alone."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many samples can be read."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample without reading it."""

    @abstractmethod
    def sample(self, index: int) -> TrainingSample:
        """Read one sample, mapped where the file allows it. Raises DumpError when it is not a whole one, IndexError past the end."""

    def labels(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return ids and mask of one sample; the states, mapped, are not read."""
        sample = self.sample(index)
        return sample.token_ids, sample.loss_mask

    def file(self, index: int) -> Path:
        """Return the file, or the folder, that holds a sample."""
        return self.path / self.name(index)

    def claim(self) -> dict[str, Any]:
        """Return what the layout's own files say of boundaries and norm, without hsnb.json; nothing by default."""
        return {}

    @cached_property
    def claims(self) -> dict[str, Any]:
        """What the folder itself says, and no more: {"boundaries": (2, 15, 27) or "unknown", "final": "pre" | "post" | "unknown"}.

        Where it gives layer ids in a tool's numbering and not boundaries: also "ids" and "convention" (of hsnb.boundaries). Where
        hsnb wrote it: also "model", "num_layers", "hidden_size". Read when first asked for; at most one sample's header is opened.
        """
        about = self.about or {}
        ours = {k: about[k] for k in ("boundaries", "final", "model", "num_layers", "hidden_size") if k in about}
        if "boundaries" in ours:
            ours["boundaries"] = tuple(ours["boundaries"])
        return {"boundaries": UNKNOWN, "final": UNKNOWN, **self.claim(), **ours}

    @cached_property
    def about(self) -> dict[str, Any] | None:
        """hsnb.json, None where there is none. Raises DumpError when it is not JSON."""
        try:
            tree = json.loads((self.path / ABOUT).read_text())
            said = tree.get("boundaries", []) if isinstance(tree, dict) else None
            if not isinstance(said, list) or not all(type(b) is int for b in said):
                raise ValueError(f"no object whose boundaries are a list of whole numbers: {str(tree)[:60]}")
            return tree
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise unreadable(self.path / ABOUT, error, "write it again: run any shard of the extraction, or the export, again") from error

    def __iter__(self) -> Iterator[TrainingSample]:
        return (self.sample(i) for i in range(len(self)))

    def _repr_html_(self) -> str:
        said = ", ".join(f"{k} {list(v) if isinstance(v, tuple) else v}" for k, v in self.claims.items())
        return f"<p>{self.path}: {len(self):,} samples, layout {self.layout}; says of itself: {said}</p>"


class FileFolder(TrainingFolder):
    """A layout of one file a sample: `files` are their paths relative to the folder, in order."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.files = self.list_files()

    @abstractmethod
    def list_files(self) -> list[str]:
        """Return the samples' files in order."""

    @abstractmethod
    def read(self, file: Path) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor], torch.Tensor]:
        """Return ids, mask, aux columns and the final of one file."""

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return self.files[index]

    def sample(self, index: int) -> TrainingSample:
        name = self.name(index)
        return make_sample(self.path / name, name, *self.read(self.path / name))


def make_sample(path: Path, name: str, ids, mask, aux: Iterable[torch.Tensor], final: torch.Tensor) -> TrainingSample:
    """Check that the parts fit and return them as a sample. Raises DumpError naming the part that does not."""
    columns = (*aux, final)
    shape = tuple(final.shape)
    if len(shape) != 2 or any(tuple(c.shape) != shape for c in columns):
        raise unreadable(path, f"states of shapes {[tuple(c.shape) for c in columns]}, expected [S,H] each")
    for what, values in (("token ids", ids), ("loss_mask", mask)):
        if values is not None and tuple(values.shape) != shape[:1]:
            raise unreadable(path, f"{what} of shape {tuple(values.shape)} for {shape[0]} rows")
    names = tuple(f"aux_{k}" for k in range(len(columns) - 1))
    as_int = [None if v is None else v.to(torch.int64) for v in (ids, mask)]
    return TrainingSample(name, *as_int, columns, (*names, "final"))


def split_packed(path: Path, packed: torch.Tensor, final: torch.Tensor) -> list[torch.Tensor]:
    """Split aux states [S, n * H] into n columns [S, H], H being the final's width. A leading axis of 1 is dropped before."""
    width = final.shape[-1]
    if packed.ndim != 2 or packed.shape[-1] % width:
        raise unreadable(path, f"aux states {tuple(packed.shape)} beside a final of width {width}, expected [S, n x {width}]")
    return list(packed.split(width, dim=-1))


def without_batch(path: Path, tensor: torch.Tensor) -> torch.Tensor:
    """Drop the leading axis of 1 that SpecForge writes."""
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        return tensor[0]
    if tensor.ndim != 2:
        raise unreadable(path, f"states of shape {tuple(tensor.shape)}, expected [S,H] or [1,S,H]")
    return tensor


def load_pt(file: Path, *wanted: str) -> dict[str, Any]:
    """Load a torch-saved dict with the keys `wanted`: mapped, or whole where the file is gzipped or of torch's first format.

    Raises DumpError for a file that is cut, that holds anything but tensors and plain values (nothing is unpickled), or lacks a key.
    """
    try:
        if file.suffix == ".gz":
            with gzip.open(file) as opened:
                tree = torch.load(opened, map_location="cpu", weights_only=True)
        else:
            with open(file, "rb") as opened:
                zipped = opened.read(4) == b"PK\x03\x04"
            tree = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except (RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError) as error:
        raise unreadable(file, str(error).split("\n")[0]) from error
    missing = [key for key in wanted if not isinstance(tree, dict) or key not in tree]
    if missing:
        found = sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
        raise unreadable(file, f"keys {found}, expected {', '.join(wanted)}", "name a folder of training files")
    return tree


def tensors(file: Path, tree: dict[str, Any], *keys: str) -> list[torch.Tensor]:
    """Return the values of `keys`. Raises DumpError for one that is no tensor."""
    for key in keys:
        if not isinstance(tree[key], torch.Tensor):
            raise unreadable(file, f"{key} is a {type(tree[key]).__name__}, expected a tensor")
    return [tree[key] for key in keys]


def entries(path: Path) -> set[str]:
    """Return the names in a folder. Raises DumpError when it is not there, or not a folder."""
    try:
        return set(os.listdir(path))
    except OSError as error:
        raise DumpError(
            got=f"{path}: {error.strerror or error}",
            expected="a folder of training files",
            likely="a wrong path, or a file in it was named",
            next="name the folder itself",
        ) from error
