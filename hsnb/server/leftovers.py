"""Which files of /dev/shm belong to one server, found while it lives, removed when it is gone. Standard library only.

SGLang ends its processes by SIGKILL, which skips every unlink: each server leaves `sglang_loads_*` behind, and a killed one
also semaphores (`sem.mp-*`) and shared memory (`psm_*`, `sgl_shm_*`, `torch_*`, `nccl-*`). Most of these names do not say
whose they are, so ownership is read from /proc: a file is ours when one of our processes maps it or holds it open.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

SHM = Path("/dev/shm")
MARKER = ".hsnb-spool"  # in a spool that hsnb made, so that no other folder is ever removed
FAR = ".nodes.json"  # in the spool of a server over several nodes: whose the ranks are that do not run here (hsnb.server.far)
_SETTLE_S = 20.0  # how long a new, unclaimed name is looked for again: files are made first and mapped later


class ShmWatch:
    """Collect the /dev/shm files of a set of processes over the time they live."""

    def __init__(self, shm: Path = SHM):
        self.shm = shm
        self.own: set[str] = set()
        self.pids: set[int] = set()
        self._before = set(self._names())  # a file older than the server is not the server's
        self._first_seen: dict[str, float] = {}

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self.shm) if not entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []

    def look(self, living: Callable[[], set[int]], *, final: bool = False) -> None:
        """Attribute new files to the `living` processes; `final`: look at every unclaimed name once more.

        Walking /proc and reading the maps of a large process cost milliseconds: done only while some new name is unclaimed.
        """
        now = time.monotonic()
        fresh = set()
        for name in self._names():
            if name not in self._before and name not in self.own:
                seen = self._first_seen.setdefault(name, now)
                if final or now - seen < _SETTLE_S:
                    fresh.add(name)
        if fresh or final:
            pids = living()
            self.pids |= pids
            touched = set().union(*(self._touched_by(pid) for pid in pids)) if fresh else set()
            self.own |= {name for name, inode in self._inodes(fresh) if inode in touched}

    def _inodes(self, names: set[str]) -> list[tuple[str, int]]:
        found = []
        for name in names:
            try:
                found.append((name, (self.shm / name).lstat().st_ino))
            except OSError:
                continue
        return found

    def _touched_by(self, pid: int) -> set[int]:
        """Return the inodes of /dev/shm that `pid` maps or holds open.

        Not the names: sem_open makes a file under another name, links it and unlinks that name, which is the one maps show.
        """
        prefix, found = f"{self.shm}/", set()
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as maps:
                found |= {int(line.split(maxsplit=5)[4]) for line in maps if prefix in line}
            with os.scandir(f"/proc/{pid}/fd") as fds:
                for entry in fds:
                    try:
                        if os.readlink(entry.path).startswith(prefix):
                            found.add(entry.stat().st_ino)
                    except OSError:
                        continue
        except OSError:
            pass  # the process ended in between
        return found

    def _named_by_pid(self) -> set[str]:
        # sgl_shm_KIND_PID_RAND, multi_tokenizer_args_PID, torch_PID_...: only names newer than the server, whose number was its process.
        pattern = re.compile(r"^(?:sgl_shm|torch|multi_tokenizer_args)_(?:.*_)?(\d+)(?:_|$)")
        hits = set()
        for name in self._first_seen:
            match = pattern.match(name)
            if match and int(match.group(1)) in self.pids:
                hits.add(name)
        return hits

    def remove(self) -> list[str]:
        """Remove this server's files, once its processes are gone; return the names removed."""
        removed = []
        for name in sorted(self.own | self._named_by_pid()):
            path = self.shm / name
            try:
                if path.lstat().st_uid == os.geteuid():
                    path.unlink()
                    removed.append(name)
            except OSError:
                continue
        return removed


def claim_spool(spool: Path, owner: str) -> None:
    """Mark `spool` as one that hsnb made and may remove; `owner` says for which server."""
    (spool / MARKER).write_text(owner)


def clear_spool(spool: Path, owner: str = "", *, keep_dumps: bool = False) -> bool:
    """Clear a spool that hsnb marked as its own (`owner`: for that server only). Return whether it was one.

    A default spool is removed. Of one that the user named (`keep_dumps`) only what belongs to the server's life goes: its armed
    files and what it had half written; dumps stay, and so does .next, whose number outlives restarts. Any other folder is left
    alone, whatever was named as a spool.
    """
    try:
        if spool.is_symlink() or (owner and (spool / MARKER).read_text() != owner) or not (spool / MARKER).is_file():
            return False
    except OSError:
        return False
    if not keep_dumps:
        shutil.rmtree(spool, ignore_errors=True)
        return not spool.exists()
    for path in (*spool.glob("armed-*.json"), *spool.glob(FAR), *spool.glob(".*.tmp")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return True
