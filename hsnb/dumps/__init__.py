"""Read dumps: the spool's two layouts, and files of others in the same arrangement. Lazy (mmap), and never unpickling code.

What a file does not say stays "unknown": a boundary or a norm is never guessed from a shape.
"""

from __future__ import annotations

from pathlib import Path

from hsnb.dumps.dump import NO_FINAL, UNKNOWN, Dump
from hsnb.dumps.pt import PtDump
from hsnb.dumps.safetensors import SafetensorsDump
from hsnb.errors import DumpError

__all__ = ["NO_FINAL", "UNKNOWN", "Dump", "dump_path", "list_dumps", "open_dump"]


def open_dump(path: str | Path) -> Dump:
    """Open a .safetensors file or a req_N folder; only its header and ids are read.

    Raises DumpError when it is missing, truncated, of other tensors than hidden_states and token_ids (safetensors) or
    aux_*.pt and final.pt (pt), or holds anything but tensors.
    """
    path = Path(path)
    if not path.exists():
        raise DumpError(
            got=f"{path}: no such dump",
            expected="a .safetensors file or a req_N folder",
            likely="the request was not captured, or its dump was freed already",
            next="look at the failures in armed-0.json beside it",
        )
    if path.is_dir():
        return PtDump(path)
    if path.suffix == ".safetensors":
        return SafetensorsDump(path)
    raise DumpError(
        got=f"{path}: a {path.suffix or 'file without a suffix'}",
        expected="a .safetensors file or a req_N folder",
        likely="another kind of file",
        next="name a file or folder of the spool",
    )


def dump_path(spool: Path, request_id: str, layout: str = "safetensors") -> Path | None:
    """Return where the dump of `request_id` lies, None when it is not there (yet).

    pt folders are numbered, so they are found by the id in their metadata.json, the newest first.
    """
    if layout == "safetensors":
        import xxhash

        path = spool / f"{xxhash.xxh3_128_hexdigest(request_id.encode())}.safetensors"
        return path if path.exists() else None
    folders = [p for p in spool.glob("req_*") if p.name[4:].isdigit()]
    for folder in sorted(folders, key=lambda p: -int(p.name[4:])):
        if PtDump.peek(folder).get("request_id") == request_id:
            return folder
    return None


def list_dumps(spool: str | Path) -> list[Path]:
    """Return the dumps of a folder: safetensors files by name, then req_N folders by number."""
    spool = Path(spool)
    folders = [p for p in spool.glob("req_*") if p.is_dir() and p.name[4:].isdigit()]
    return sorted(spool.glob("*.safetensors")) + sorted(folders, key=lambda p: int(p.name[4:]))
