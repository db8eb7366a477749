"""What every benchmark leaves: a strict model in a JSON file of docs/, from which pages are rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from hsnb.paths import replace_text


class Strict(BaseModel):
    """A part of a file: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ResultsFile(Strict):
    """A whole file."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and validate a file; one that is not there is empty."""
        return cls.model_validate_json(path.read_text()) if path.is_file() else cls()

    def write(self, path: Path) -> None:
        """Write the file so that a reader sees the old one or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, self.model_dump_json(indent=1) + "\n")
