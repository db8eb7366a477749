"""The pt layout: a folder req_N with aux_0.pt ... and final.pt [S, H], and metadata.json."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch

from hsnb.dumps.dump import UNKNOWN, Dump, unreadable


class PtDump(Dump):
    """One req_N folder; the tensors are mapped. Without our keys in metadata.json boundaries and norm are "unknown"."""

    layout = "pt"

    def __init__(self, path: Path):
        self.path = path
        meta = self.peek(path)
        aux = sorted(path.glob("aux_*.pt"), key=lambda p: (len(p.name), p.name))
        if [p.name for p in aux] != [f"aux_{k}.pt" for k in range(len(aux))] or not aux or not (path / "final.pt").exists():
            raise unreadable(path, f"files {sorted(p.name for p in path.iterdir())}, expected aux_0.pt, aux_1.pt, ... and final.pt")
        self._files = [*aux, path / "final.pt"]
        shapes = {p.name: (tuple(t.shape), t.dtype) for p in self._files for t in [self._load(p)]}
        (shape, self.dtype), *others = dict.fromkeys(shapes.values())
        if others or len(shape) != 2:
            raise unreadable(path, f"tensors of different shapes {shapes}, expected [S,H] each")
        self.num_tokens, self.hidden_size = shape
        self.columns = len(self._files)
        ours = "hsnb_format" in meta
        self.boundaries = tuple(meta["boundaries"]) if ours else UNKNOWN
        self.final = meta["final"] if ours else UNKNOWN
        if ours and len(self.boundaries) + 1 != self.columns:
            raise unreadable(path, f"{self.columns} files for boundaries {list(self.boundaries)} and the final")
        self.metadata, self.request_id, self.kind = meta, str(meta.get("request_id", path.name)), meta.get("kind", UNKNOWN)
        if (ids := meta.get("token_ids")) is not None and len(ids) != self.num_tokens:
            raise unreadable(path, f"{len(ids)} token ids for {self.num_tokens} rows")

    @staticmethod
    def peek(path: Path) -> dict:
        """Return metadata.json, {} when there is none. Raises DumpError when it is not JSON."""
        try:
            return json.loads((path / "metadata.json").read_text())
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            raise unreadable(path / "metadata.json", error) from error

    @staticmethod
    def _load(file: Path) -> torch.Tensor:
        try:
            tensor = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError) as error:
            raise unreadable(file, str(error).split("\n")[0]) from error
        if not isinstance(tensor, torch.Tensor):
            raise unreadable(file, f"a {type(tensor).__name__}, expected a tensor")
        return tensor

    @property
    def token_ids(self) -> torch.Tensor | None:
        ids = self.metadata.get("token_ids")
        return None if ids is None else torch.tensor(ids, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return self.columns * self.num_tokens * self.hidden_size * self.dtype.itemsize

    def column(self, index: int) -> torch.Tensor:
        return self._load(self._files[index])
