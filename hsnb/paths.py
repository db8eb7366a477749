"""Where things live: the project root, the cache of converted models, a server's spool, a run's outputs."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from hsnb.errors import ParamsError, ServerError

SPOOL_ROOT = Path("/dev/shm/hsnb")
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "glusterfs", "afs", "wekafs"}


def project_root(start: Path | None = None) -> Path:
    """Return the folder that holds notebooks/ and params/.

    papermill runs a kernel in the shell's folder and JupyterLab in the notebook's, so the root is searched upwards from
    the current folder (or `start`), then from this file (an editable install); HSNB_ROOT overrides both.
    """
    if env := os.environ.get("HSNB_ROOT"):
        return Path(env).resolve()
    here = (start or Path.cwd()).resolve()
    for folder in [here, *here.parents, *Path(__file__).resolve().parents]:
        if (folder / "params").is_dir() and (folder / "notebooks").is_dir():
            return folder
    raise ParamsError(
        got=f"no project root above {here}",
        expected="a folder with notebooks/ and params/",
        likely="the command was started outside a clone of hsnb",
        next="cd into the clone, or set HSNB_ROOT to it",
    )


def resolve(path: str | Path) -> Path:
    """Resolve `path` as typed in the current folder, else against the project root."""
    path = Path(path).expanduser()
    if path.is_absolute() or path.exists():
        return path.resolve()
    return project_root() / path


def cache_dir() -> Path:
    """Return the folder for converted and generated models (HSNB_CACHE, else ~/.cache/hsnb)."""
    folder = Path(os.environ.get("HSNB_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hsnb")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_dir(run: str, *, make: bool = True) -> Path:
    """Return outputs/{run}, made if need be (unless `make` is False); a name that would leave outputs/ is refused."""
    if not run or run != Path(run).name or run.startswith("."):
        raise ParamsError(
            got=f"run is {run!r}",
            expected="a plain folder name below outputs/",
            likely="a path was given for a name",
            next="-p run my-run",
        )
    folder = project_root() / "outputs" / run
    if not make:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ParamsError(
            got=f"{folder}: {error.strerror or error}",
            expected="a folder that can be made and written to",
            likely="a read-only file system, another user's folder, or a file in its place",
            next="make it writable, or set HSNB_ROOT to a copy of the project",
        ) from error
    return folder


def on_network(folder: Path) -> bool:
    """Say whether `folder` is on a file system that other machines share."""
    import psutil

    folder = folder.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if folder.is_relative_to(p.mountpoint)]
    kind = max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""
    return kind in _NETWORK or kind.startswith("fuse.")


def default_spool(port: int) -> Path:
    """Return /dev/shm/hsnb/{port}: a server's URL is enough to find its spool."""
    return SPOOL_ROOT / str(port)


def make_private(folder: Path) -> Path:
    """Make `folder` for this user only (0700) and return it; refuse a link or another user's folder.

    The parent below /dev/shm is shared by all users of the machine, like /tmp (sticky), the folder itself is not.
    """
    if folder.parent == SPOOL_ROOT and not SPOOL_ROOT.exists():
        SPOOL_ROOT.mkdir(mode=0o700, exist_ok=True)
        SPOOL_ROOT.chmod(0o1777)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise PermissionError(f"owned by uid {info.st_uid}" if stat.S_ISDIR(info.st_mode) else "not a plain folder")
        folder.chmod(0o700)
    except OSError as error:
        raise ServerError(
            got=f"spool {folder}: {error.strerror or error}",
            expected="a folder of this user that can be made private (0700)",
            likely="a full or read-only file system, or a folder that another user left there",
            next="name another folder with -p spool DIR",
        ) from error
    return folder


def write_json(path: Path, tree: dict) -> Path:
    """Write `tree` so that a reader sees the old file or the new one, never half of it."""
    return replace_text(path, json.dumps(tree, indent=1))


def replace_text(path: Path, text: str) -> Path:
    """Write `text` so that a reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path
