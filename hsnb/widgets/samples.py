"""Samples of a folder by number, without a listing of it where hsnb's own index says which there are."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hsnb.errors import DumpError
from hsnb.table import INDEX, read_index
from hsnb.trainers import LAYOUTS, TrainingSample, open_folder
from hsnb.trainers.folder import ABOUT, make_sample
from hsnb.widgets.claims import Claims, claims_of


class Samples:
    """`len`, `name(k)` and `read(k)` of a folder of training files.

    A folder of 100,000 files is opened by its index of one line a row: whether a row's file is there is seen when it is read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.claims: Claims = claims_of(self.path)
        self._layout = LAYOUTS.get(self.claims.layout)
        self._folder = None
        if (self.path / INDEX).is_file() and (self.path / ABOUT).is_file() and self._layout is not None:
            self.rows = np.nonzero(read_index(self.path / INDEX)["ok"])[0]
        else:
            self._folder = open_folder(self.path)
            self.rows = np.arange(len(self._folder))
            said = self._folder.claims
            self.claims = Claims(self._folder.layout, said["boundaries"], said["final"], str(said.get("model") or ""))

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, k: int) -> str:
        """Return the name of sample k."""
        return self._folder.name(k) if self._folder is not None else self._layout.sample_file(int(self.rows[k]))

    def read(self, k: int) -> TrainingSample:
        """Read sample k, mapped where the file allows it. Raises DumpError when it is not there or not whole."""
        if self._folder is not None:
            return self._folder.sample(k)
        row, path = int(self.rows[k]), self.path / self.name(k)
        if not path.exists():
            raise DumpError(
                got=f"{path}: no such file",
                expected="the states of a row that is to be extracted",
                likely="its shard was not run yet, or owes it",
                next="hsnb redo, or another sample",
            )
        dump = self._layout.open(path, tuple(self.claims.boundaries))
        aux = [dump.column(c) for c in range(dump.columns - 1)]
        return make_sample(path, self.name(k), dump.token_ids, self._table[row]["loss_mask"], aux, dump.column(-1))

    @cached_property
    def _table(self) -> Any:
        from datasets import load_from_disk

        return load_from_disk(str(self.path)).with_format("torch", columns=["loss_mask"])

    @property
    def columns(self) -> list[str]:
        """What the columns are called."""
        said = self.claims.boundaries
        aux = self.read(0).column_names[:-1] if isinstance(said, str) else [f"B_{b}" for b in said]  # unknown: their places
        return [*aux, f"final ({self.claims.final})"]
