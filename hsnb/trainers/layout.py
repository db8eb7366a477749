"""What a layout is to those who write it: where a row's file lies, what is in it, how its trainer is started.

A file appears by rename, whole and fsynced, with the checksum of what was written. The extraction writes through `publish`, the
exporter through `write`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError

from hsnb.boundaries import from_boundaries, model_family
from hsnb.checks import Faults, row_faults
from hsnb.dumps import Dump
from hsnb.dumps.memory import MemoryDump
from hsnb.errors import DumpError, ExtractError, HsnbError, ModelError, ParamsError
from hsnb.params import num_layers, read_config
from hsnb.trainers.folder import TrainingFolder
from hsnb.trainers.place import MODE, sync_folder, synced_checksum
from hsnb.weights import final_norm, rms_norm


@dataclass(frozen=True)
class Row:
    """One sample to be written: states [S, K+1, H], boundaries ascending, then the final, which is `final` ("pre" | "post") the norm."""

    number: int  # in the whole data set
    token_ids: torch.Tensor  # int64 [S]
    loss_mask: torch.Tensor | None  # int64 [S]
    states: torch.Tensor
    boundaries: tuple[int, ...]
    final: str
    model: str  # the checkpoint's folder, for its norm
    meta: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """How to train on a folder: the command as it is typed, and what it cannot say itself."""

    command: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """Where a row is: `bytes` from `offset` on in `file`, relative to the folder, with their xxh3-128."""

    row: int
    tokens: int
    file: str
    offset: int
    bytes: int
    xxh3_128: str


class Writer:
    """Writes rows as files of their own, each read back before it gets its name."""

    def __init__(self, layout: Layout, folder: Path):
        self.layout, self.folder = layout, folder
        self.folders: set[Path] = set()

    def write(self, row: Row) -> Written:
        """Write a row. Raises ExtractError or DumpError."""
        file, size, checksum = self.layout.write(self.folder, row, check=True, sync=False)
        self.folders.add((self.folder / file).parent)
        return Written(row.number, len(row.token_ids), file, 0, size, checksum)

    def close(self) -> None:
        """Make the renames durable."""
        for folder in self.folders:
            sync_folder(folder)


class Layout(ABC):
    """A layout of one file a row. Its objects hold no state.

    `final`: what the trainer takes the final for. `folder`: the class that reads it. `convention`: of its layer ids
    (hsnb.boundaries). `why`: what a final of the other kind would do. `direct`: the extraction can write it. `mask`: "file" (in a sample's file),
    "table" (beside the samples) or "optional" (in the file where it is known). `appends`: rows lie in shared files, in order.
    """

    name: ClassVar[str]
    folder: ClassVar[type[TrainingFolder]]
    final: ClassVar[str]
    convention: ClassVar[str]
    why: ClassVar[str]
    direct: ClassVar[bool] = False
    mask: ClassVar[str] = "file"
    appends: ClassVar[bool] = False
    DTYPE: ClassVar[torch.dtype] = torch.bfloat16

    def check_settings(self, boundaries: tuple[int, ...], final: str, model: str | Path = "") -> None:
        """Raise ParamsError for a final that this layout cannot hold: a norm can be applied, not taken back.

        With `model`, a checkpoint's folder, also ModelError when the norm that is to be applied cannot be read from it.
        """
        if final != self.final and final != "pre":
            raise ParamsError(
                got=f"final is {final!r}",
                expected=f"pre for the {self.name} layout",
                likely=self.why,
                next="set capture.final: pre and start the server again",
            )
        if final != self.final and model:
            _norm(str(model))

    @abstractmethod
    def sample_file(self, row: int) -> str:
        """Return where the sample of `row` (an index in the whole data set) lies, relative to the data set's folder."""

    @abstractmethod
    def save(self, path: Path, row: Row) -> None:
        """Write `row`, which fits already, to `path`. The same row gives the same bytes."""

    @abstractmethod
    def read(self, path: Path) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return ids, mask and states [S, K+1, H] of a file, whatever its name."""

    def open(self, path: Path, boundaries: tuple[int, ...]) -> Dump:
        """Open a sample's file as a dump. `boundaries`: what its columns are, for a layout that does not write them down.

        Raises DumpError when it is not a whole one.
        """
        ids, _, states = self.read(path)
        return MemoryDump(path, ids, states, boundaries, self.final)

    @abstractmethod
    def training(self, folder: Path, about: dict[str, Any], vocab: int) -> Training:
        """Return how to train on `folder`. `about`: boundaries, model and so on, as hsnb.json has them; `vocab`: 0 for the whole one."""

    @abstractmethod
    def save_vocabulary(self, folder: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> list[Path]:
        """Write the draft vocabulary where the trainer looks for it: offsets int64 [D], bool [V]. Return the files."""

    def finish(self, folder: Path, labels: Iterable[tuple[torch.Tensor, torch.Tensor]], about: dict[str, Any], done: list[Written]) -> None:
        """Write what the trainer wants beside the samples, `done` in order, with ids and mask `labels`; by default nothing."""
        return

    def writer(self, folder: Path, done: list[Written]) -> Writer:
        """Return what writes rows one after the other; `done` is there already."""
        return Writer(self, folder)

    def begin(self, folder: Path, rows: Iterable[int]) -> None:
        """Make the folders and remove the temporary files that a killed writer of these rows left."""
        mine: dict[Path, set[str]] = {}
        for row in rows:
            path = folder / self.sample_file(row)
            mine.setdefault(path.parent, set()).add(path.stem)
        for parent, stems in mine.items():
            parent.mkdir(parents=True, exist_ok=True)
            for path in parent.glob(".*.tmp"):
                if path.name.split(".")[1] in stems:
                    path.unlink(missing_ok=True)

    def publish(
        self, folder: Path, row: int, dump: Dump, loss_mask: torch.Tensor | None = None, judge: Callable[[Faults], None] = lambda _: None
    ) -> tuple[str, int, str]:
        """Write a dump as this layout's file. Return (file, bytes, xxh3-128 of the file). The staging's own: the rename is not made durable.

        `loss_mask` [S] is asked for where the layout keeps it in the file. `judge` is told which rows cannot be states (checks.row_faults)
        before the file has its name; what it raises is passed on, with the dump in its place. Raises ExtractError when the file
        system does not take it, ModelError when the final is to be normed and the dump's model is not to be found.
        """
        meta, states = sample_meta(dump), dump.states()
        judge(row_faults(states))
        made = Row(row, dump.token_ids, loss_mask, states, tuple(dump.boundaries), dump.final, meta["model"], meta)
        return self.write(folder, made, sync=False)

    def write(self, folder: Path, row: Row, *, check: bool = False, sync: bool = True) -> tuple[str, int, str]:
        """Write one row: temporary name, fsync, (with `check`) read back and compared bit for bit, rename. Raises as `publish`.

        `sync`: the rename is durable too; the exporter, which looks whether a file is there, leaves that to the end.
        """
        if self.mask == "file" and row.loss_mask is None:
            raise TypeError(f"the {self.name} layout has the loss mask in a sample's file: row {row.number} came without one")
        row = self.fit(row)

        def fill(path: Path) -> None:
            self.save(path, row)

        def compare(path: Path) -> None:
            self.compare(path, row)

        nbytes = row.states.numel() * row.states.itemsize
        return self.put(folder, self.sample_file(row.number), nbytes, fill, check=compare if check else None, sync=sync)

    def put(
        self,
        folder: Path,
        file: str,
        nbytes: int,
        fill: Callable[[Path], tuple[int, str] | None],
        *,
        check: Callable[[Path], None] | None = None,
        undo: Callable[[Path, Path], None] = lambda *_: None,
        sync: bool = True,
    ) -> tuple[str, int, str]:
        """Have `fill` make a file of about `nbytes` under a temporary name, make it durable, `check` it, and give it its name.

        A `fill` that makes it durable itself, with its MODE, returns its bytes and their xxh3-128.

        Return (file, bytes, xxh3-128 of the file). What fails is raised as `publish` says, `undo` called with the temporary name and the real one.
        """
        path = folder / file
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
        try:
            if (made := fill(temporary)) is None:
                temporary.chmod(MODE)
                made = synced_checksum(temporary)
            size, checksum = made
            if check:
                check(temporary)
            os.replace(temporary, path)
            if sync:
                sync_folder(path.parent)
        except HsnbError:
            undo(temporary, path)
            temporary.unlink(missing_ok=True)
            raise
        except (OSError, SafetensorError, RuntimeError) as error:  # safetensors and torch wrap a full disk in errors of their own
            undo(temporary, path)
            temporary.unlink(missing_ok=True)
            raise ExtractError(
                got=f"{path}: {getattr(error, 'strerror', None) or error}",
                expected=f"room for {nbytes:,} bytes",
                likely="the output's file system is full or read-only",
                next="make room and start it again: it goes on where it stopped",
            ) from error
        return file, size, checksum

    def fit(self, row: Row) -> Row:
        """Return the row as the file holds it: bfloat16, the final normed where the trainer wants it so (in float32, then rounded)."""
        states = row.states.to(self.DTYPE)
        if row.final != self.final:
            self.check_settings(row.boundaries, row.final)
            weight, eps = _norm(row.model)
            if len(weight) != states.shape[-1]:
                raise ModelError(
                    got=f"{row.model}: a final norm of width {len(weight)}",
                    expected=f"{states.shape[-1]}, the states' width",
                    likely="another model than the one the states are of",
                    next="name the folder of the model that was served",
                )
            states = states.clone() if states is row.states else states
            states[:, -1] = rms_norm(row.states[:, -1], weight, eps).to(self.DTYPE)
        return replace(row, states=states.contiguous(), final=self.final)

    def compare(self, path: Path, row: Row) -> None:
        """Read a file back. Raises DumpError when it does not hold `row` (as `fit` made it) to the last bit."""
        ids, mask, states = self.read(path)
        same = {
            "token ids": torch.equal(ids, row.token_ids),
            "loss mask": mask is None or torch.equal(mask.to(torch.int64), row.loss_mask),
            "states": states.shape == row.states.shape and torch.equal(states.view(torch.int16), row.states.view(torch.int16)),
        }
        if wrong := [k for k, v in same.items() if not v]:
            raise DumpError(
                got=f"{path}: other {', '.join(wrong)} than were written",
                expected="the same to the last bit",
                likely="a failing disk or file system",
                next="write to another disk",
            )

    def layer_ids(self, about: dict[str, Any]) -> list[int]:
        """Return the boundaries in the tool's own numbering. Raises BoundaryError for one that it has no id for."""
        config = read_config(Path(about["model"]))
        return from_boundaries(about["boundaries"], self.convention, num_layers=num_layers(config), family=model_family(config))


@lru_cache(maxsize=4)
def _norm(model: str) -> tuple[torch.Tensor, float]:
    return final_norm(Path(model))


def sample_meta(dump: Dump) -> dict[str, str]:
    """Return what a published file says of the dump that it was made of."""
    return {k: str(dump.metadata[k]) for k in ("model", "sglang_version", "patch_version", "request_id")}


def save_torch(path: Path, tree: Any) -> None:
    """torch.save with bytes that do not depend on the file's name (the archive inside would be called after it)."""
    with open(path, "wb") as handle:
        torch.save(tree, handle)


def columns(row: Row) -> list[torch.Tensor]:
    """Return the columns [S, H] as tensors of their own: of a view, torch.save writes the whole storage."""
    return [c.clone() for c in row.states.unbind(1)]
