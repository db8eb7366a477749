"""speculators 0.5 to 0.9 (run with 0.9): hidden_states/hs_{row}.safetensors beside an Arrow data set.

`hidden_states` [S, n_aux + 1, H] bfloat16, aux ascending, the last column B_L before the norm (its trainer applies the norm);
`token_ids` int64 [S], which must equal the row's input_ids. Layer ids are boundaries and not in its files: they are in the
metadata that hsnb adds, and are given to the trainer as --target-layer-ids.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from hsnb.dumps import Dump
from hsnb.errors import ExtractError, ParamsError

DTYPE = torch.bfloat16


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
