"""Have a new file in memory (tmpfs, /dev/shm) in pages of 2 MiB, also where it was mounted for pages of 4 kB, as it usually is.

To have, to fill and to read 4 kB at a time costs more than everything else that is done with a dump's bytes
(docs/performance.md). Linux 6.1 and newer gives any file of a tmpfs large pages when it is asked for that file alone, by
madvise(2)'s MADV_COLLAPSE, with no mount option and no privilege. It wants one page of each 2 MiB to be there.

It is an offer: whatever keeps it from being taken (another file system, an older kernel, no large piece of memory left) leaves a
file in small pages, and nobody asks again for a while.
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
PAGE = 2 << 20  # bytes, of x86-64, and of arm64 with small pages of 4 kB
PAUSE_S = 10.0
SLOW_S = 0.001  # of CPU for one, on average (0.2 ms with free memory): the kernel moves others' pages, and small ones would cost less
_MADV_COLLAPSE = 25
_FIXED, _NORESERVE, _NONE = 0x10, 0x4000, 0  # MAP_FIXED, MAP_NORESERVE, PROT_NONE: the mmap module does not have them

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
    """Ask for them, unless SGLANG_HS_DUMP_LARGE_PAGES is 0, and know when not to. Threads may share one."""

    def __init__(self):
        self.not_before = math.inf if os.environ.get(VARIABLE) == "0" else 0.0  # of time.monotonic()
        self._mean_s = 0.0  # of one large page, the last sixteen calls or so

    def ask(self, fd: int, nbytes: int) -> int:
        """Give the empty file `fd` its size and large pages for its first whole ones; return how many, 0 where there are none to be had.

        Raises OSError when the file system is full.
        """
        if not (count := nbytes // PAGE) or time.monotonic() < self.not_before:
            return 0
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, b"\0", 0)
        if os.fstat(fd).st_blocks * 512 >= PAGE:  # mounted for large pages: a write gets one, and does not have to clear it first
            self._pause()
            return 0
        for k in range(1, count):
            os.pwrite(fd, b"\0", k * PAGE)
        began = time.thread_time()
        try:
            with mapped(fd, count) as address:
                if _libc.madvise(address, count * PAGE, _MADV_COLLAPSE):
                    _raise()
        except BlockingIOError:  # a page was in use: this file stays as it is
            return 0
        except OSError:
            self._pause()
            return 0
        self._mean_s += ((time.thread_time() - began) / count - self._mean_s) / 16
        if self._mean_s > SLOW_S:
            self._pause()
        return count

    def _pause(self) -> None:
        self.not_before, self._mean_s = time.monotonic() + PAUSE_S, 0.0


def to_be_had(folder: Path) -> bool:
    """Say whether files in `folder` have large pages, asked for or by themselves: one is made and looked at. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        LargePages().ask(file.fileno(), PAGE)
        return os.fstat(file.fileno()).st_blocks * 512 >= PAGE


@contextlib.contextmanager
def mapped(fd: int, count: int) -> Iterator[int]:
    """Map the first `count` large pages of a file where large ones can be mapped, at a multiple of their size; give the address.

    Raises OSError.
    """
    room = (count + 1) * PAGE
    start = _map(None, room, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
    try:
        yield _map(-(-start // PAGE) * PAGE, count * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd)
    finally:
        _libc.munmap(start, room)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    return _raise() if got == ctypes.c_void_p(-1).value else got


def _raise() -> int:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
