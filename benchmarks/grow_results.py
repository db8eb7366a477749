"""What a run of benchmarks.grow leaves in grow-results.json."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from benchmarks.speed_results import write_model

FILE = "grow-results.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Length(_Strict):
    """Prompts of one length: seconds a token of each turn (wall, CPU), and the process's memory after it."""

    tokens: int
    seconds: list[float]
    cpu_s: list[float]
    memory_mib: list[float]


class Client(_Strict):
    """One extraction: samples a second, the seconds of each thousand, and the client's memory after each."""

    rate: float
    seconds: list[float]
    memory_mib: list[float]


class Grow(_Strict):
    """The whole file; `client` by number of samples."""

    date: str = ""
    versions: dict[str, str] = {}
    writer: list[Length] = []
    client: dict[int, Client] = {}

    @classmethod
    def read(cls, path: Path) -> Grow:
        """Read and validate a file; one that is not there is empty."""
        return cls.model_validate_json(path.read_text()) if path.is_file() else cls()

    def write(self, path: Path) -> None:
        """Write the file so that a reader sees the old one or the new one."""
        write_model(self, path)
