"""What a run of benchmarks.parts leaves in parts-results.json."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from benchmarks.speed_results import write_model

FILE = "parts-results.json"


class Parts(BaseModel):
    """The whole file: CPU time of each part, "name [unit]", in each turn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    date: str = ""
    cores: int = 0
    versions: dict[str, str] = {}
    parts: dict[str, list[float]] = {}

    @classmethod
    def read(cls, path: Path) -> Parts:
        """Read and validate a file; one that is not there is empty."""
        return cls.model_validate_json(path.read_text()) if path.is_file() else cls()

    def write(self, path: Path) -> None:
        """Write the file so that a reader sees the old one or the new one."""
        write_model(self, path)
