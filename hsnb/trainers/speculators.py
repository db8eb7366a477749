"""speculators 0.5 to 0.9 (run with 0.9): hidden_states/hs_{row}.safetensors beside an Arrow data set.

`hidden_states` [S, n_aux + 1, H] bfloat16, aux ascending, the last column B_L before the norm (its trainer applies the norm);
`token_ids` int64 [S], which must equal the row's input_ids. Layer ids are boundaries and not in its files: they are in the
metadata that hsnb adds, and are given to the trainer as --target-layer-ids.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from hsnb.dumps import UNKNOWN, Dump, open_dump
from hsnb.dumps.dump import unreadable
from hsnb.errors import ExtractError, ParamsError
from hsnb.trainers.folder import FileFolder, TrainingSample, make_sample

DTYPE = torch.bfloat16
STATES = "hidden_states"
_FILE = re.compile(r"hs_(\d+)\.safetensors")


class SpeculatorsFolder(FileFolder):
    """The rows whose states are there, ascending; `rows` are their indices in the whole data set."""

    layout = "speculators"
    looked_for = "an Arrow data set (state.json) beside hidden_states/hs_{row}.safetensors"
    trainer_final = "pre"
    conventions = ("speculators",)

    @classmethod
    def is_here(cls, path: Path, names: set[str]) -> bool:
        return {"state.json", STATES} <= names

    def list_files(self) -> list[str]:
        found = (_FILE.fullmatch(p.name) for p in (self.path / STATES).iterdir())
        self.rows = sorted(int(m[1]) for m in found if m)
        return [sample_file(row) for row in self.rows]

    @cached_property
    def table(self) -> Any:
        """The datasets.Dataset: input_ids, loss_mask, seq_len of every row, those without states too."""
        from datasets import load_from_disk

        return load_from_disk(str(self.path)).with_format("torch", columns=["input_ids", "loss_mask"])

    @cached_property
    def _first(self) -> Dump | None:
        return open_dump(self.path / self.files[0]) if self.files else None

    def claim(self) -> dict[str, Any]:
        first = self._first
        return {} if first is None or first.boundaries == UNKNOWN else {"boundaries": first.boundaries, "final": first.final}

    def sample(self, index: int) -> TrainingSample:
        """Read one row's states and mask. Raises DumpError also for token ids other than the row's: the trainer would drop it."""
        name, row = self.files[index], self.rows[index]
        dump = open_dump(self.path / name)
        if row >= len(self.table):
            raise unreadable(self.path / name, f"row {row} of a table of {len(self.table)} rows", "name the data set it belongs to")
        item, ids = self.table[row], dump.token_ids
        if not torch.equal(ids, item["input_ids"]):
            raise unreadable(self.path / name, f"token ids other than the input_ids of row {row}", "the states are another data set's")
        said = self.claims["boundaries"], self.claims["final"]
        if dump.boundaries != UNKNOWN and (dump.boundaries, dump.final) != said:
            raise unreadable(self.path / name, f"boundaries {dump.describe(dump.boundaries)}, {dump.final}, in a folder of {said}")
        aux = [dump.column(k) for k in range(dump.columns - 1)]
        return make_sample(self.path / name, name, ids, item["loss_mask"], aux, dump.column(-1))

    def read(self, file: Path):
        raise NotImplementedError("a row's mask is in the table: see sample")


def check_settings(boundaries: tuple[int, ...], final: str) -> None:
    """Raise ParamsError when the server captures what this layout cannot hold."""
    if final != "pre":
        raise ParamsError(
            got=f"final is {final!r}",
            expected="pre for the speculators layout",
            likely="speculators applies the final norm itself; a normed state would be normed twice",
            next="set capture.final: pre and start the server again",
        )


def sample_file(row: int) -> str:
    """Return where the sample of `row` (an index in the whole data set) lies, relative to the data set's folder."""
    return f"hidden_states/hs_{row}.safetensors"


def begin(folder: Path, rows) -> None:
    """Make the folder and remove the temporary files that a killed writer of these rows left."""
    states = folder / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    mine = set(rows)
    for path in states.glob(".hs_*.tmp"):
        if int(path.name.split(".")[1].removeprefix("hs_")) in mine:
            path.unlink(missing_ok=True)


def publish(folder: Path, row: int, dump: Dump) -> tuple[str, int, str]:
    """Write a verified dump as this layout's file: temporary name, fsync, rename. Return (file, bytes, xxh3-128 of the file).

    Raises ExtractError when the file system does not take it.
    """
    file = sample_file(row)
    path = folder / file
    temporary = path.with_name(f".hs_{row}.{os.getpid()}.tmp")
    meta = {k: str(dump.metadata[k]) for k in ("boundaries", "final", "model", "sglang_version", "patch_version", "request_id")}
    meta["boundaries"] = str(list(dump.boundaries))
    try:
        states = dump.states().to(DTYPE).contiguous()
        save_file({"hidden_states": states, "token_ids": dump.token_ids.contiguous()}, temporary, metadata={"hsnb_format": "1", **meta})
        temporary.chmod(0o644)  # safetensors makes it private; the trainer may be another user's
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
            checksum = xxhash.xxh3_128()
            while block := handle.read(1 << 24):
                checksum.update(block)
            size = handle.tell()
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in an error of its own
        temporary.unlink(missing_ok=True)
        raise ExtractError(
            got=f"{path}: {getattr(error, 'strerror', None) or error}",
            expected=f"room for {dump.num_tokens * dump.columns * dump.hidden_size * DTYPE.itemsize:,} bytes",
            likely="the output's file system is full or read-only",
            next="make room and start the shard again: it goes on where it stopped",
        ) from error
    return file, size, checksum.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
