"""What a run of benchmarks.speed leaves in speed-results.json."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from pydantic import BaseModel, ConfigDict

FILE = "speed-results.json"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Turn(_Strict):
    """One load sent once: seconds until the last answer, and until the last dump has its name (the same for a plain turn)."""

    tokens: int
    answered_s: float
    published_s: float
    cpu_s: float  # of the schedulers, their writing threads included

    @property
    def rate(self) -> float:
        """Tokens a second until everything is published."""
        return self.tokens / self.published_s


class Load(_Strict):
    """Alternations of one load. `ratio`: the median of captured / plain tokens a second of neighbouring turns."""

    prompts: str
    token_bytes: int
    plain: list[Turn]
    captured: list[Turn]
    ring_full_ms: int  # that the forward waited, in all captured turns
    memory_growth_mib: float  # of the schedulers, from before the first captured turn to after the last

    @property
    def turns(self) -> int:
        """Alternations that were measured."""
        return len(self.captured)

    def ratios(self, of: str = "rate") -> list[float]:
        """Return captured / plain of each alternation: tokens a second (`rate`), or CPU seconds a token (`cpu_s`)."""
        value = {"rate": lambda t: t.rate, "answered": lambda t: t.tokens / t.answered_s, "cpu_s": lambda t: t.cpu_s / t.tokens}[of]
        return [value(c) / value(p) for p, c in zip(self.plain, self.captured, strict=True)]

    def median(self, of: str = "rate") -> float:
        """Return the median of `ratios`."""
        return statistics.median(self.ratios(of))


class Run(_Strict):
    """One machine."""

    date: str
    device: str
    card: str
    cores: int
    versions: dict[str, str]
    ceilings: dict[str, float] = {}  # GB/s, 1 GB = 1e9 bytes
    loads: dict[str, Load] = {}


class Results(_Strict):
    """The whole file."""

    runs: dict[str, Run] = {}

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read and validate a file; one that is not there is empty."""
        return cls.model_validate_json(path.read_text()) if path.is_file() else cls()

    def write(self, path: Path) -> None:
        """Write the file so that a reader sees the old one or the new one."""
        write_model(self, path)


def write_model(model: BaseModel, path: Path) -> None:
    """Write a model as JSON so that a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(model.model_dump_json(indent=1) + "\n")
    os.replace(temporary, path)
