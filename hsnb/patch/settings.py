"""The SGLANG_HS_DUMP_* variables, read and checked once, inside the server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIN_SGLANG = (0, 5, 17)  # 0.5.11 has plug-ins; the names hooked here were read in 0.5.17 to 0.5.23
WANTED_ENV = ("NCCL_", "CUDA_", "SGLANG_")


@dataclass(frozen=True)
class Settings:
    """What to capture and where to put it."""

    spool: Path
    boundaries: tuple[int, ...]
    final: str  # pre | post
    format: str  # safetensors | pt
    only: str  # request-id prefix; empty: every request, warm-up and health too

    @classmethod
    def from_env(cls) -> Settings:
        """Read the variables. Raises ValueError naming the variable that is off."""
        get = os.environ.get
        ids = get("SGLANG_HS_DUMP_BOUNDARIES", "")
        try:
            boundaries = tuple(sorted(int(x) for x in ids.split(",")))
        except ValueError:
            raise ValueError(f"SGLANG_HS_DUMP_BOUNDARIES is {ids!r}, expected a comma list of boundaries such as 2,15,27") from None
        if len(set(boundaries)) != len(boundaries):
            raise ValueError(f"SGLANG_HS_DUMP_BOUNDARIES is {ids!r}: a boundary is named twice")
        final = get("SGLANG_HS_DUMP_FINAL", "pre")
        if final not in ("pre", "post"):
            raise ValueError(f"SGLANG_HS_DUMP_FINAL is {final!r}, expected pre or post")
        format = get("SGLANG_HS_DUMP_FORMAT", "safetensors")
        if format not in ("safetensors", "pt"):
            raise ValueError(f"SGLANG_HS_DUMP_FORMAT is {format!r}, expected safetensors or pt")
        return cls(Path(os.environ["SGLANG_HS_DUMP_DIR"]), boundaries, final, format, get("SGLANG_HS_DUMP_ONLY", ""))


def sglang_version() -> str:
    """Return the version of the SGLang that this process runs."""
    from sglang.version import __version__

    return __version__


def version_tuple(version: str) -> tuple[int, ...]:
    """Return (0, 5, 23) for "0.5.23", "0.5.23.post1" or "0.5.23rc0"."""
    parts = []
    for part in version.split(".")[:3]:
        digits = "".join(c for c in part[: len(part) - len(part.lstrip("0123456789"))])
        parts.append(int(digits or 0))
    return tuple(parts)


def visible_env() -> dict[str, str]:
    """Return the variables that a report shows, as this very process has them (its /proc entry is wiped by setproctitle)."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(WANTED_ENV)}
