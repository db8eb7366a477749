"""Put files in place for good: moved or copied, fsynced, with the checksum of what is there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import xxhash

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


def synced_checksum(path: Path) -> tuple[int, str]:
    """Make a written file durable and return its bytes and their xxh3-128, read back from it."""
    with open(path, "rb", buffering=0) as handle:
        os.fsync(handle.fileno())
        return os.fstat(handle.fileno()).st_size, _digest(handle)


def _digest(handle: BinaryIO) -> str:
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    while n := handle.readinto(block):
        digest.update(block[:n])
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
