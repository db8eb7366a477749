"""DeepSpec's target cache v2 (read in its source): manifest.json, samples.idx (56 bytes a sample) and shards of raw numbers.

A sample is five runs of bytes in one shard: input_ids int32 [S], attention_mask and loss_mask uint8 [S], target_hidden_states
bfloat16 [S, n * H], target_last_hidden_states bfloat16 [S, H] (after the norm). `target_layer_ids` must equal the trainer's.
"""

from __future__ import annotations

import json
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsnb.dumps.dump import unreadable
from hsnb.trainers.folder import TrainingFolder, TrainingSample, make_sample, split_packed

VERSION = 2
RECORD = struct.Struct("<QIIQQQQQ")  # sample_id, shard_id, seq_len, then the five offsets
MANIFEST, INDEX = "manifest.json", "samples.idx"


class DeepSpecFolder(TrainingFolder):
    """The manifest is read when the folder is opened, the index and the shards are mapped."""

    layout = "deepspec"
    looked_for = f"{MANIFEST} and {INDEX} (version {VERSION})"
    trainer_final = "post"
    conventions = ("deepspec",)

    def __init__(self, path: Path):
        super().__init__(path)
        file = self.path / MANIFEST
        try:
            self.manifest = json.loads(file.read_text())
            self.hidden_size, self.layers = int(self.manifest["hidden_size"]), [int(i) for i in self.manifest["target_layer_ids"]]
            self._shards = {int(s["shard_id"]): self.path / s["file_name"] for s in self.manifest["shards"]}
            said = self.manifest["version"], self.manifest["hidden_dtype"], self.manifest["index_record_size"]
            size, self.num_samples = (self.path / INDEX).stat().st_size, int(self.manifest["num_samples"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unreadable(file, repr(error)) from error
        if said != (VERSION, "bfloat16", RECORD.size):
            raise unreadable(file, f"version, hidden_dtype, index_record_size {said}, expected {(VERSION, 'bfloat16', RECORD.size)}")
        if size != self.num_samples * RECORD.size:
            raise unreadable(self.path / INDEX, f"{size} bytes for {self.num_samples} samples of {RECORD.size}")

    @classmethod
    def is_here(cls, path: Path, names: set[str]) -> bool:
        return {MANIFEST, INDEX} <= names

    def __len__(self) -> int:
        return self.num_samples

    def name(self, index: int) -> str:
        return f"{INDEX}#{range(len(self))[index]}"

    def claim(self) -> dict[str, Any]:
        return {"ids": list(self.layers), "convention": "deepspec"}

    @cached_property
    def _index(self) -> np.memmap:
        return np.memmap(self.path / INDEX, np.uint8, "r")

    def _take(self, shard: int, offset: int, count: int, dtype: np.dtype) -> torch.Tensor:
        path = self._shards[shard]
        if offset + count * np.dtype(dtype).itemsize > path.stat().st_size:
            raise unreadable(path, f"{count} numbers at {offset} in a shard of {path.stat().st_size} bytes")
        return torch.from_numpy(np.memmap(path, dtype, "c", offset, (count,)))  # copy on write: torch wants writable memory

    def sample(self, index: int) -> TrainingSample:
        index = range(len(self))[index]
        at = index * RECORD.size
        number, shard, length, ids, _, mask, aux, last = RECORD.unpack(self._index[at : at + RECORD.size].tobytes())
        if number != index or shard not in self._shards or not length:
            raise unreadable(self.path / INDEX, f"record {index} is of sample {number}, {length} tokens in shard {shard}")
        width = self.hidden_size
        final = self._take(shard, last, length * width, np.int16).view(torch.bfloat16).view(length, width)
        packed = self._take(shard, aux, length * width * len(self.layers), np.int16).view(torch.bfloat16).view(length, -1)
        parts = self._take(shard, ids, length, np.int32), self._take(shard, mask, length, np.uint8)
        return make_sample(self._shards[shard], self.name(index), *parts, split_packed(self._shards[shard], packed, final), final)
