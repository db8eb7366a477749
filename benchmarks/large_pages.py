"""Memory file systems in large pages, where this user may mount: as /dev/shm usually is not, and can be."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
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
def shm_pages(*, large: bool) -> Iterator[bool]:
    """Have new files in /dev/shm in large pages meanwhile, or in small ones; say whether they are."""
    before = next((o for p in psutil.disk_partitions(all=True) if p.mountpoint == str(SHM) for o in p.opts.split(",") if "huge=" in o), "")
    wanted = _HUGE if large else "huge=never"
    if (before or "huge=never") == wanted:
        yield True
        return
    made = _mount("-o", f"remount,{wanted}", str(SHM))
    try:
        yield made
    finally:
        if made:
            _mount("-o", f"remount,{before or 'huge=never'}", str(SHM))


def _mount(*words: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(["mount", *words], capture_output=True).returncode == 0
    return False
