"""speculators 0.5 to 0.9 (run with 0.9): hidden_states/hs_{row}.safetensors beside an Arrow data set.

`hidden_states` [S, n_aux + 1, H] bfloat16, aux ascending, the last column B_L before the norm (its trainer applies the norm);
`token_ids` int64 [S], which must equal the row's input_ids. Layer ids are boundaries and not in its files: they are in the
metadata that hsnb adds, and are given to the trainer as --target-layer-ids.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from hsnb.checks import Faults, RowLook
from hsnb.dumps import UNKNOWN, Dump, open_dump
from hsnb.dumps.dump import unreadable
from hsnb.dumps.safetensors import SafetensorsDump, relabelled, sort_header
from hsnb.trainers.folder import FileFolder, TrainingSample, make_sample
from hsnb.trainers.layout import Layout, Row, Training, Written, sample_meta
from hsnb.trainers.place import MODE, copy, move, synced_checksum
from hsnb.trainers.table import write_table

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
        return [_file(row) for row in self.rows]

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

    def labels(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        item = self.table[self.rows[index]]
        return item["input_ids"], item["loss_mask"]

    def read(self, file: Path):
        raise NotImplementedError("a row's mask is in the table: see sample")


class SpeculatorsLayout(Layout):
    """Written during extraction beside the table that `hsnb prepare` made, or by the exporter with a table of its own."""

    name = "speculators"
    folder = SpeculatorsFolder
    final = "pre"
    convention = "speculators"
    why = "speculators applies the final norm itself; a normed state would be normed twice"
    direct = True
    mask = "table"

    def sample_file(self, row: int) -> str:
        return _file(row)

    def publish(
        self, folder: Path, row: int, dump: Dump, loss_mask: torch.Tensor | None = None, judge: Callable[[Faults], None] = lambda _: None
    ) -> tuple[str, int, str]:
        """Take the dump itself where it holds what the file is to hold: moved where it lies on the same file system, else copied.

        Either way the bytes are the same. Raises as the writing does; the dump is back in its place then.
        """
        if not isinstance(dump, SafetensorsDump) or (dump.dtype, dump.final) != (self.DTYPE, self.final):
            return super().publish(folder, row, dump, loss_mask, judge)
        moved, faults, rows = False, None, RowLook(dump.num_tokens, dump.columns, dump.hidden_size, dump.dtype)

        def fill(path: Path) -> tuple[int, str]:
            nonlocal moved, faults
            head, states_at = relabelled(dump.path, self.meta(sample_meta(dump), dump.boundaries, dump.final))
            try:
                if moved := move(dump.path, path):
                    with open(path, "r+b") as file:
                        file.write(head)
                        os.fchmod(file.fileno(), MODE)
                    made = synced_checksum(path, rows, states_at)
                else:
                    made = copy(dump.path, path, head, rows, states_at)
                faults = rows.faults()
            except ValueError as error:  # other rows than its header says: it changed meanwhile
                raise unreadable(dump.path, error) from error
            return made

        def undo(*paths: Path) -> None:
            for path in paths:
                if moved and path.exists():
                    os.replace(path, dump.path)

        def check(_: Path) -> None:
            judge(faults)

        return self.put(folder, self.sample_file(row), dump.nbytes, fill, undo=undo, sync=False, check=check)

    @staticmethod
    def meta(about: dict[str, str], boundaries: tuple[int, ...], final: str) -> dict[str, str]:
        """Return the metadata of a file."""
        return {**about, "hsnb_format": "1", "boundaries": str(list(boundaries)), "final": final}

    def save(self, path: Path, row: Row) -> None:
        meta = self.meta(row.meta, row.boundaries, row.final)
        save_file({"hidden_states": row.states, "token_ids": row.token_ids.contiguous()}, path, metadata=meta)
        sort_header(path)

    def read(self, path: Path):
        dump = SafetensorsDump(path)
        return dump.token_ids, None, dump.states()

    def open(self, path: Path, boundaries: tuple[int, ...]) -> Dump:
        return open_dump(path)  # hsnb's own files say what they hold

    def finish(self, folder: Path, labels: Iterable, about: dict[str, Any], done: list[Written]) -> None:
        write_table(folder, labels)

    def save_vocabulary(self, folder: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> list[Path]:
        files = [folder / f"{name}-{len(d2t)}.npy" for name in ("d2t", "t2d")]
        for file, values in zip(files, (d2t, t2d), strict=True):
            np.save(file, values.numpy())
        return files

    def training(self, folder: Path, about: dict[str, Any], vocab: int) -> Training:
        ids, here = [str(i) for i in self.layer_ids(about)], SpeculatorsFolder(folder)
        missing = len(here.table) - len(here)  # rows skipped as too long, or not extracted yet
        words = ["speculators", "train", "--speculator-type", "eagle3", "--verifier-name-or-path", str(about["model"])]
        words += ["--data-path", str(folder), "--target-layer-ids", *ids]
        words += ["--on-missing", "skip" if missing else "raise"]
        words += ["--draft-vocab-size", str(vocab)] if vocab else []
        # SGLang's drafter has no norm_before_residual, and speculators trains with it unless told not to.
        words += ["--no-norm-before-residual", "--save-path", f"{folder}-drafter"]
        return Training(shlex.join(words), (f"{missing:,} rows have no states and are left out",) if missing else ())


def _file(row: int) -> str:
    return f"{STATES}/hs_{row}.safetensors"
