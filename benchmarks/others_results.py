"""What a run of benchmarks.others leaves in others-results.json."""

from __future__ import annotations

import statistics

from pydantic import Field

from benchmarks.results import ResultsFile, Strict

FILE = "others-results.json"


class Sample(Strict):
    """One turn of one way. `stood_s`: until the forward's thread is free, or the last answer is there; `seconds`: until all is written."""

    tokens: int
    nbytes: int  # 0: not counted
    seconds: float
    stood_s: float
    cpu_s: float  # of this process, or of the schedulers


class Part(Strict):
    """The same work done by several ways in turns; the first one is what the others are compared with."""

    work: str
    ways: dict[str, list[Sample]]
    date: str = ""
    versions: dict[str, str] = Field(default_factory=dict)

    def ratios(self, way: str, of: str) -> list[float]:
        """Return a way's seconds, stood_s or cpu_s a token of each turn, divided by the first way's of the same turn."""
        first = next(iter(self.ways.values()))
        return [(getattr(s, of) / s.tokens) / (getattr(f, of) / f.tokens) for s, f in zip(self.ways[way], first, strict=True)]

    def median(self, way: str, of: str) -> float:
        """Return the median of a field over the turns."""
        return statistics.median(getattr(s, of) for s in self.ways[way])


class Others(ResultsFile):
    """The whole file."""

    parts: dict[str, Part] = Field(default_factory=dict)
