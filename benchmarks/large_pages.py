"""The two ways to large pages: mounting for them, where this user may; and asking for them, as the writer does, or not."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from hsnb.patch import spool
from hsnb.patch.large_pages import LargePages

SHM = Path("/dev/shm")
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE = "huge=within_size"


@contextlib.contextmanager
def mounted(size: str = "4g") -> Iterator[Path | None]:
    """Give a folder in memory in large pages; None where this user may not mount one."""
    folder = tempfile.mkdtemp(prefix="hsnb-large-pages-")
    made = _mount("-t", "tmpfs", "-o", f"size={size},{_HUGE}", "tmpfs", folder)
    try:
        yield Path(folder) if made else None
    finally:
        if made:
            subprocess.run(["umount", "--lazy", folder])
        Path(folder).rmdir()


@contextlib.contextmanager
def shm_in_large_pages() -> Iterator[bool]:
    """Have new files in /dev/shm in large pages meanwhile, without their asking; say whether they are."""
    before = next((o for p in psutil.disk_partitions(all=True) if p.mountpoint == str(SHM) for o in p.opts.split(",") if "huge=" in o), "")
    made = _mount("-o", f"remount,{_HUGE}", str(SHM))
    try:
        yield made
    finally:
        if made:
            _mount("-o", f"remount,{before or 'huge=never'}", str(SHM))


@contextlib.contextmanager
def no_large_pages() -> Iterator[bool]:
    """Have the kernel give none to any file in memory meanwhile, asked or not; say whether it does as it is told."""
    before = _SYSTEM.read_text().split("[")[1].split("]")[0] if _SYSTEM.exists() else ""
    try:
        _SYSTEM.write_text("deny")
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        _SYSTEM.write_text(before)


@contextlib.contextmanager
def asking(*, wanted: bool = True) -> Iterator[None]:
    """Have the dumps that this process writes ask for large pages, or not; what it has learnt elsewhere does not count."""
    before, spool._LARGE_PAGES = spool._LARGE_PAGES, LargePages(wanted=wanted)
    try:
        yield
    finally:
        spool._LARGE_PAGES = before


not_asking = functools.partial(asking, wanted=False)


def _mount(*words: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(["mount", *words], capture_output=True).returncode == 0
    return False
