"""Put files in place for good: moved or copied, durable, with the checksum of what is there; each byte is read once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from hsnb.checks import RowLook

_PAGE = 4096  # bytes: what is written past the page cache begins and ends at a multiple of it, in memory and on the disk
_BLOCK = 1 << 20  # bytes: stays in a core's cache between the reading, the hashing and the looking
_PIECE = 4 << 20  # bytes of one call that writes past the page cache: it returns when the disk has them
MODE = 0o644  # of a published file: a dump is private, the trainer may be another user's
_NO_SUCH_WAY = {errno.EINVAL, errno.EOPNOTSUPP}  # what file systems say that cannot be written past their cache
_own = threading.local()


def move(source: Path, target: Path) -> bool:
    """Rename a file. Return False, with nothing done, when the two lie on different file systems."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def copy(source: Path, target: Path, head: bytes, look: RowLook, states_at: int) -> tuple[int, str]:
    """Copy a file, `head` in place of its first bytes, and make it durable; return its bytes and their xxh3-128. Raises OSError.

    `look` is shown the states on the way, which lie from `states_at` to the end. The bytes go past the page cache, where the file
    system can do that: it costs less of the processor, the disk is busy from the first piece on, and other programs' pages stay.
    """
    flags, digest = os.O_WRONLY | os.O_CREAT | os.O_TRUNC, xxhash.xxh3_128()
    piece, at = _buffer(_PIECE), 0
    with open(source, "rb", buffering=0) as file, _opened(target, flags) as fd:
        while n := _fill(file, piece, at, head, digest, look, states_at):
            _write(fd, piece[: -(-n // _PAGE) * _PAGE], at)
            at += n
        os.ftruncate(fd, at)  # the last piece was written to the end of its page
        os.fchmod(fd, MODE)
        os.fsync(fd)
    return at, digest.hexdigest()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file to be written past the page cache, or through it where its file system knows no other way."""
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in _NO_SUCH_WAY:
            raise
        fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _fill(file: BinaryIO, piece: memoryview, at: int, head: bytes, digest: xxhash.xxh3_128, look: RowLook, states_at: int) -> int:
    """Read what begins at byte `at` of the file into `piece`, block by block; return how many bytes it has."""
    n = 0
    while n < len(piece) and (block := _read(file, piece[n : n + _to_a_rows_end(at + n, look, states_at)])):
        if new := head[at + n : at + n + len(block)]:
            block[: len(new)] = new
        _take(block, at + n, digest, look, states_at)
        n += len(block)
    return n


def _to_a_rows_end(at: int, look: RowLook | None, states_at: int) -> int:
    """Return a block's bytes from `at` on, fewer so that they end where a row does: looking at a cut row costs as much as at a block."""
    if look is None or not look.row_bytes:
        return _BLOCK
    over = (at + _BLOCK - states_at) % look.row_bytes
    return _BLOCK - over if over < _BLOCK else _BLOCK


def _write(fd: int, data: memoryview, at: int) -> None:
    while data:
        try:
            n = os.pwrite(fd, data, at)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno not in _NO_SUCH_WAY or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # it took the flag, and wants other alignments: through the page cache
            continue
        data, at = data[n:], at + n


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file, read whole. Raises OSError."""
    with open(path, "rb", buffering=0) as handle:
        return _digest(handle)


def synced_checksum(path: Path, look: RowLook | None = None, states_at: int = 0) -> tuple[int, str]:
    """Make a written file durable and return its bytes and their xxh3-128, read back from it.

    `look` is shown the states on the way, which lie from `states_at` to the end.
    """
    with open(path, "rb", buffering=0) as handle:
        os.fsync(handle.fileno())
        return os.fstat(handle.fileno()).st_size, _digest(handle, look, states_at)


def _digest(handle: BinaryIO, look: RowLook | None = None, states_at: int = 0) -> str:
    digest, block, at = xxhash.xxh3_128(), _buffer(_BLOCK), 0
    while data := _read(handle, block[: _to_a_rows_end(at, look, states_at)]):
        _take(data, at, digest, look, states_at)
        at += len(data)
    return digest.hexdigest()


def _take(block: memoryview, begins: int, digest: xxhash.xxh3_128, look: RowLook | None, states_at: int) -> None:
    digest.update(block)
    if look is not None and begins + len(block) > states_at:
        look.add(block[max(0, states_at - begins) :])


def _buffer(size: int) -> memoryview:
    """Return this thread's buffer, which begins at a page's beginning."""
    if len(getattr(_own, "buffer", b"")) < size:
        _own.buffer = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return _own.buffer[:size]


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
