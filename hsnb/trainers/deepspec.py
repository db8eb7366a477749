"""DeepSpec's target cache v2 (read in its source): manifest.json, samples.idx (56 bytes a sample) and shards of raw numbers.

A sample is five runs of bytes in one shard: input_ids int32 [S], attention_mask and loss_mask uint8 [S], target_hidden_states
bfloat16 [S, n * H], target_last_hidden_states bfloat16 [S, H] (after the norm). `target_layer_ids` must equal the trainer's.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hsnb.dumps.dump import unreadable
from hsnb.errors import ExtractError, ParamsError
from hsnb.paths import write_json
from hsnb.trainers.folder import TrainingFolder, TrainingSample, make_sample, split_packed
from hsnb.trainers.layout import Layout, Row, Training, Written
from hsnb.trainers.place import synced_checksum

VERSION = 2
RECORD = struct.Struct("<QIIQQQQQ")  # sample_id, shard_id, seq_len, then the five offsets
SHARD_BYTES = 4 << 30  # the next shard is begun before this
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

    def file(self, index: int) -> Path:
        return self.path / INDEX

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


class DeepSpecLayout(Layout):
    """Written by the exporter: rows one after the other in shards, the index and the manifest last."""

    name = "deepspec"
    folder = DeepSpecFolder
    final = "post"
    convention = "deepspec"
    why = "DeepSpec takes the final as normed"
    appends = True

    def sample_file(self, row: int) -> str:
        raise NotImplementedError("a shard holds many rows: see ShardWriter")

    def begin(self, folder: Path, rows: Iterable[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, path: Path, row: Row) -> None:
        path.write_bytes(b"".join(_parts(row)))

    def read(self, path: Path):
        raise NotImplementedError("a row's bytes do not say where it begins: see ShardWriter")

    def writer(self, folder: Path, done: list[Written]) -> ShardWriter:
        return ShardWriter(self, folder, done)

    def finish(self, folder: Path, labels: Iterable, about: dict[str, Any], done: list[Written]) -> None:
        files = sorted({one.file for one in done})
        width, aux = int(about["hidden_size"]), len(about["boundaries"])
        index = b"".join(
            RECORD.pack(k, files.index(one.file), one.tokens, *_offsets(one.offset, one.tokens, width, aux)) for k, one in enumerate(done)
        )
        manifest = {
            "version": VERSION,
            "num_samples": len(done),
            "num_shards": len(files),
            "target_layer_ids": self.layer_ids(about),
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": RECORD.size,
            "hidden_size": width,
            "target_model_name_or_path": str(about["model"]),
            "shards": [{"shard_id": k, "file_name": f, "nbytes": (folder / f).stat().st_size} for k, f in enumerate(files)],
        }
        temporary = folder / f".{INDEX}.tmp"
        temporary.write_bytes(index)
        synced_checksum(temporary)
        os.replace(temporary, folder / INDEX)
        write_json(folder / MANIFEST, manifest)

    def save_vocabulary(self, folder: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> list[Path]:
        raise ParamsError(
            got=f"--vocab {len(d2t)} for DeepSpec",
            expected="no --vocab",
            likely="its cache holds no vocabulary: its drafters use the model's",
            next="leave --vocab out",
        )

    def training(self, folder: Path, about: dict[str, Any], vocab: int) -> Training:
        words = ["python", "train.py", "--config", "config/eagle3/CONFIG.py", "--opts", f"data.target_cache_path={folder}"]
        return Training(
            shlex.join(words),
            (
                "in a clone of DeepSpec, CONFIG.py being your model's",
                f"it must say target_layer_ids {self.layer_ids(about)} and the target model {about['model']}: both are compared with the cache",
            ),
        )


class ShardWriter:
    """Appends rows to shards. What a killed writer left behind the last row that is known is cut off."""

    def __init__(self, layout: DeepSpecLayout, folder: Path, done: list[Written]):
        self.layout, self.folder = layout, folder
        ends: dict[str, int] = {}
        for one in done:
            ends[one.file] = max(ends.get(one.file, 0), one.offset + one.bytes)
        for orphan in set(folder.glob("shard-*.bin")) - {folder / name for name in ends}:
            orphan.unlink()
        self._number = max(len(ends) - 1, 0)
        self._open(ends.get(self._name, 0))

    @property
    def _name(self) -> str:
        return f"shard-{self._number:05d}.bin"

    def _open(self, end: int) -> None:
        self._handle = open(self.folder / self._name, "ab+")  # noqa: SIM115 (held until close)
        self._handle.truncate(end)
        self._end = end

    def write(self, row: Row) -> Written:
        """Append a row and read it back. Raises ExtractError when the disk does not take it, DumpError for other bytes read back."""
        row = self.layout.fit(row)
        data = b"".join(_parts(row))
        path = self.folder / self._name
        if self._end and self._end + len(data) > SHARD_BYTES:
            self.close()
            self._number += 1
            self._open(0)
            path = self.folder / self._name
        try:
            self._handle.write(data)
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.seek(self._end)
            back = self._handle.read(len(data))
        except OSError as error:
            raise ExtractError(
                got=f"{path}: {error.strerror or error}",
                expected=f"room for {len(data):,} bytes",
                likely="the output's file system is full or read-only",
                next="make room and start it again: it goes on where it stopped",
            ) from error
        if back != data:
            raise unreadable(path, f"other bytes at {self._end} than were written", "write to another disk")
        written = Written(row.number, len(row.token_ids), path.name, self._end, len(data), xxhash.xxh3_128_hexdigest(back))
        self._end += len(data)
        return written

    def close(self) -> None:
        self._handle.close()


def _parts(row: Row) -> list[bytes]:
    """Return the five runs of a row: ids, attention mask, loss mask, aux, final."""
    ids, mask = row.token_ids, row.loss_mask
    numbers = ids.to(torch.int32), torch.ones_like(ids).to(torch.uint8), mask.to(torch.uint8)
    states = row.states[:, :-1].contiguous().view(torch.int16), row.states[:, -1].contiguous().view(torch.int16)
    return [t.contiguous().numpy().tobytes() for t in (*numbers, *states)]


def _offsets(start: int, length: int, width: int, aux: int) -> list[int]:
    """Return where the five runs of a row begin in its shard."""
    sizes = 4 * length, length, length, 2 * length * width * aux
    return [start + sum(sizes[:k]) for k in range(5)]
