"""Memory file systems in large pages, where this user may mount: as /dev/shm usually is not, and can be."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
            subprocess.run(["umount", folder], check=True)
        Path(folder).rmdir()


@contextlib.contextmanager
def shm_in_large_pages() -> Iterator[bool]:
    """Have new files in /dev/shm in large pages meanwhile; say whether that is so."""
    made = _mount("-o", f"remount,{_HUGE}", str(SHM))
    try:
        yield made
    finally:
        if made:
            subprocess.run(["mount", "-o", "remount,huge=never", str(SHM)], check=True)


def _mount(*words: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(["mount", *words], capture_output=True).returncode == 0
    return False
