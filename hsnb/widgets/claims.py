"""What a folder that hsnb wrote says of itself, from hsnb.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hsnb.dumps import UNKNOWN
from hsnb.trainers.folder import ABOUT


@dataclass(frozen=True)
class Claims:
    """Layout, boundaries (a tuple, or "unknown"), final state and model of a folder."""

    layout: str = UNKNOWN
    boundaries: tuple[int, ...] | str = UNKNOWN
    final: str = UNKNOWN
    model: str = ""


def claims_of(path: Path) -> Claims:
    """Return what hsnb.json in `path` says; everything unknown where there is none."""
    try:
        about = json.loads((path / ABOUT).read_text())
    except (OSError, ValueError):
        return Claims()
    return Claims(
        about.get("layout", UNKNOWN),
        tuple(about["boundaries"]) if "boundaries" in about else UNKNOWN,
        about.get("final", UNKNOWN),
        about.get("model", ""),
    )
