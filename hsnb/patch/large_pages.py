"""Have a new file in memory (tmpfs, /dev/shm) in pages of 2 MiB, also where it was mounted for pages of 4 kB, as it usually is.

To have, to fill and to read 4 kB at a time costs more than half of what is done with a dump's bytes (docs/performance.md).
Linux 6.1 and newer gives any file of a tmpfs large pages when it is asked for that file alone, by
madvise(2)'s MADV_COLLAPSE, with no mount option and no privilege. It wants one page of each 2 MiB to be there.

It is an offer: whatever keeps it from being taken (an older kernel, no large piece of memory left) leaves a file in small pages, and
nobody asks again for a while. Nor where they cost more than they save: a virtual machine's host that took freed memory back gives it
again 4 kB at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "SGLANG_HS_DUMP_LARGE_PAGES"
PAGE = 2 << 20  # bytes, where small ones have 4 kB
PAUSE_S = 10.0
SLOW_S = 0.0012  # of CPU for one, on average (0.1 ms with free memory): what small pages cost more until the file is read and removed
_STEP = 8  # pages asked for at once: a kernel that has to work for them is noticed before a long file is through
_STEPS = 4  # that the average is of, or so
_MADV_COLLAPSE = 25
_FIXED, _NORESERVE, _NONE = 0x10, 0x4000, 0  # MAP_FIXED, MAP_NORESERVE, PROT_NONE: the mmap module does not have them
_TMPFS = 0x01021994

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def check_variable() -> None:
    """Raise ValueError for a value of SGLANG_HS_DUMP_LARGE_PAGES that is neither 0 nor 1."""
    if (asked := os.environ.get(VARIABLE, "")) not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {asked!r}, expected 0 or 1")


class LargePages:
    """Ask for them, if they are `wanted`, and know when not to. Threads may share one."""

    def __init__(self, *, wanted: bool = True):
        self.not_before = 0.0 if wanted and mmap.PAGESIZE == 4096 else math.inf  # of time.monotonic()
        self._mean_s = 0.0  # of CPU for one large page

    def ask(self, fd: int, nbytes: int) -> int:
        """Give the empty file `fd` its size and large pages for its first whole ones; return how many, 0 where there are none to be had.

        A file system that is full is told by whoever lays the rest of the file out.
        """
        count, done = nbytes // PAGE, 0
        if not count or time.monotonic() < self.not_before:
            return 0
        try:
            if not _in_memory(fd) or _given_by_itself(fd, nbytes):
                self._pause()
                return 0
            with mapped(fd, count) as address:
                while done < count and time.monotonic() >= self.not_before:
                    n = min(_STEP, count - done)
                    self._step(fd, address + done * PAGE, done, n)
                    done += n
        except BlockingIOError:  # a page was in use: the rest stays as it is, and many in a row are a reason to stop
            self._note(4 * SLOW_S)
        except OSError:
            self._pause()
        return done

    def _step(self, fd: int, address: int, first: int, n: int) -> None:
        for k in range(first, first + n):
            os.pwrite(fd, b"\0", k * PAGE)
        began = time.thread_time()
        if _libc.madvise(address, n * PAGE, _MADV_COLLAPSE):
            _raise()
        self._note((time.thread_time() - began) / n)

    def _note(self, seconds: float) -> None:
        self._mean_s += (seconds - self._mean_s) / _STEPS
        if self._mean_s > SLOW_S:
            self._pause()
            self._mean_s = SLOW_S  # the next one decides

    def _pause(self) -> None:
        self.not_before = time.monotonic() + PAUSE_S


def has_small_pages_only(folder: Path) -> bool:
    """Say whether files in `folder` are in memory in pages of 4 kB, asked for others or not: one is made and looked at.

    False where none can be made: whoever wants to write there will hear why.
    """
    if mmap.PAGESIZE > 4096:
        return False
    try:
        for _ in range(2):  # a page may be in use
            with tempfile.TemporaryFile(dir=folder) as file:
                LargePages().ask(file.fileno(), PAGE)
                if not _in_memory(file.fileno()) or _in_a_large_page(file.fileno()):
                    return False
    except OSError:
        return False
    return True


def _in_memory(fd: int) -> bool:
    about = ctypes.create_string_buffer(512)  # struct statfs: a long, the kind, comes first
    return not _libc.fstatfs(fd, about) and ctypes.c_long.from_buffer(about).value == _TMPFS


def _given_by_itself(fd: int, nbytes: int) -> bool:
    """Give the file its size and a first byte, and say whether that brought a large page, which then need not be cleared first."""
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, b"\0", 0)
    return _in_a_large_page(fd)


def _in_a_large_page(fd: int) -> bool:
    """Say it of a file with one byte."""
    return os.fstat(fd).st_blocks * 512 >= PAGE


@contextlib.contextmanager
def mapped(fd: int, count: int) -> Iterator[int]:
    """Map the first `count` large pages of a file where large ones can be mapped, at a multiple of their size; give the address.

    Raises OSError.
    """
    nbytes, room = count * PAGE, (count + 1) * PAGE
    start = _map(None, room, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
    here = -(-start // PAGE) * PAGE
    try:
        _map(here, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd)
    except OSError:  # what was there is gone already, and may be another thread's by now
        _unmap(start, here - start)
        _unmap(here + nbytes, start + room - here - nbytes)
        raise
    try:
        yield here
    finally:
        _unmap(start, room)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    return _raise() if got == ctypes.c_void_p(-1).value else got


def _unmap(address: int, nbytes: int) -> None:
    if nbytes:
        _libc.munmap(address, nbytes)


def _raise() -> int:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
