"""What this machine can do at best: device to host, into the spool, onto the disk, checksums. GB/s, 1 GB = 1e9 bytes."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

_PIECE = 117_440_512  # bytes: 2,048 tokens of Kimi's shape at three boundaries and the final state
_PAGE = 4096
_THREADS = (1, 2, 4, 8)
DISK = "files onto the disk, 4 threads, synced"
DIRECT = "files onto the disk past the page cache, 8 threads, synced"
_CALL = 4 << 20  # bytes that one call writes past the page cache


def ceilings(device: str, memory: Path, disk: Path) -> dict[str, float]:
    """Return {what: GB/s}, each the best of three."""
    found = {}
    if device == "cuda":
        found["device to page-locked host"] = best(lambda: _device_to_host(pinned=True))
        found["device to ordinary host memory, allocated each time"] = best(lambda: _device_to_host(pinned=False))
    files = 16 if device == "cuda" else 4
    for threads in _THREADS if device == "cuda" else _THREADS[:2]:
        found[f"files into {memory}, {threads} threads"] = best(lambda threads=threads: _write(memory, threads, files))
    found |= disk_ceilings(disk, files)
    data = os.urandom(_PIECE)
    found["xxh3-128, one core"] = best(lambda: _timed(len(data), lambda: xxhash.xxh3_128_digest(data)))
    return found


def disk_ceilings(disk: Path, files: int = 16) -> dict[str, float]:
    """Return what the disk takes at best, through the page cache and past it (where its file system can), GB/s."""
    found = {DISK: best(lambda: _write(disk, 4, files, sync=True))}
    try:
        found[DIRECT] = best(lambda: _write(disk, 8, files, sync=True, direct=True))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return found


def fastest(found: dict[str, float]) -> str:
    """Return which of the two ways onto the disk was found the faster."""
    return max((way for way in (DISK, DIRECT) if way in found), key=found.__getitem__)


def disk_alone(disk: Path, nbytes: int, files: int, found: dict[str, float]) -> float:
    """Return the seconds that `files` of `nbytes` each take onto the disk when nothing else runs, by the way that was `found` the faster."""
    direct = fastest(found) == DIRECT
    gbps = _write(disk, 8 if direct else 4, files, sync=True, direct=direct, nbytes=nbytes)
    return files * nbytes / gbps / 1e9


def best(measure) -> float:
    """Return the largest of three."""
    return max(measure() for _ in range(3))


def _timed(nbytes: int, work) -> float:
    before = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - before) / 1e9


def _device_to_host(*, pinned: bool) -> float:
    source = torch.ones(_PIECE, dtype=torch.uint8, device="cuda")
    target = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) if pinned else None
    torch.cuda.synchronize()

    def work():
        for _ in range(8):
            target.copy_(source, non_blocking=True) if pinned else source.cpu()
        torch.cuda.synchronize()

    return _timed(8 * _PIECE, work)


def _write(folder: Path, threads: int, files: int, *, sync: bool = False, direct: bool = False, nbytes: int = _PIECE) -> float:
    """Write files as the writer does, laid out at their full size and then filled by one thread each; or `direct`, past the page cache."""
    own, data = Path(tempfile.mkdtemp(prefix="hsnb-ceiling-", dir=folder)), memoryview(mmap.mmap(-1, -(-nbytes // _PAGE) * _PAGE))
    data[:] = os.urandom(len(data))

    def one(n: int) -> None:
        fd = os.open(own / str(n), os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(fd, 0, len(data))
        for at in range(0, len(data), _CALL if direct else len(data)):
            os.pwrite(fd, data[at : at + _CALL] if direct else data, at)
        if sync:
            os.fsync(fd)
        os.close(fd)

    try:
        with ThreadPoolExecutor(threads) as pool:
            return _timed(files * nbytes, lambda: list(pool.map(one, range(files))))
    finally:
        shutil.rmtree(own)
