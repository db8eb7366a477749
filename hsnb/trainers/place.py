"""Put files in place for good: moved or copied, fsynced, with the checksum of what is there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import xxhash

from hsnb.checks import RowLook

_BLOCK = 1 << 20  # bytes: stays in a core's cache between the reading and the hashing


def move(source: Path, target: Path) -> bool:
    """Give a dump to the output: move it and return True, or copy it from another file system and return False."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, target)  # by the kernel
        return False
    return True


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file, read whole. Raises OSError."""
    with open(path, "rb", buffering=0) as handle:
        return _digest(handle)


def synced_checksum(path: Path, look: RowLook | None = None, states_at: int = 0) -> tuple[int, str]:
    """Make a written file durable and return its bytes and their xxh3-128, read back from it.

    `look` is shown the states on the way, which lie from `states_at` to the end: they are read once.
    """
    with open(path, "rb", buffering=0) as handle:
        os.fsync(handle.fileno())
        return os.fstat(handle.fileno()).st_size, _digest(handle, look, states_at)


def _digest(handle: BinaryIO, look: RowLook | None = None, states_at: int = 0) -> str:
    digest = xxhash.xxh3_128()
    if look is not None:
        digest.update(_read(handle, memoryview(bytearray(states_at))))
    rows = max(1, _BLOCK // look.row_bytes) if look is not None else 0
    block = memoryview(bytearray(rows * look.row_bytes if rows else _BLOCK))
    while data := _read(handle, block):
        digest.update(data)
        if look is not None:
            look.add(data)
    return digest.hexdigest()


def _read(handle: BinaryIO, block: memoryview) -> memoryview:
    """Fill the block, unless the file ends: one call of the system may bring less."""
    have = 0
    while have < len(block) and (n := handle.readinto(block[have:])):
        have += n
    return block[:have]


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
