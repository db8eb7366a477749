"""What a run of benchmarks.drain leaves in drain-results.json."""

from __future__ import annotations

import statistics

from pydantic import Field

from benchmarks.results import ResultsFile, Strict

FILE = "drain-results.json"


class DrainTurn(Strict):
    """Every dump published once: bytes of states as they lay in the spool, wall and CPU seconds of the client's process."""

    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """GB/s, 1 GB = 1e9 bytes."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cores(self) -> float:
        """CPU seconds a GB: cores that are busy at 1 GB/s."""
        return self.cpu_s / self.nbytes * 1e9


class Case(Strict):
    """One kind of dumps, from one file system to another."""

    dumps: str
    where: str
    turns: list[DrainTurn]

    def values(self, of: str) -> list[float]:
        """Return `rate` or `cores` of each turn."""
        return [getattr(t, of) for t in self.turns]

    def median(self, of: str) -> float:
        """Return the median of `values`."""
        return statistics.median(self.values(of))


class DrainRun(Strict):
    """One machine."""

    date: str
    cores: int
    threads: int  # that publish
    versions: dict[str, str]
    cases: dict[str, Case] = Field(default_factory=dict)


class DrainResults(ResultsFile):
    """The whole file."""

    runs: dict[str, DrainRun] = Field(default_factory=dict)
