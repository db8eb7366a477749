"""What a run of benchmarks.parts leaves in parts-results.json."""

from __future__ import annotations

from pydantic import Field

from benchmarks.results import ResultsFile

FILE = "parts-results.json"


class Parts(ResultsFile):
    """The whole file: CPU time of each part, "name [unit]", in each turn."""

    date: str = ""
    cores: int = 0
    versions: dict[str, str] = Field(default_factory=dict)
    parts: dict[str, list[float]] = Field(default_factory=dict)
