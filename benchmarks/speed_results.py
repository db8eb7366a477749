"""What a run of benchmarks.speed leaves in speed-results.json."""

from __future__ import annotations

import statistics

from pydantic import Field

from benchmarks.results import ResultsFile, Strict

FILE = "speed-results.json"


class Turn(Strict):
    """One load sent once: seconds until the last answer, and until the last dump has its name (the same for a plain turn)."""

    tokens: int
    answered_s: float
    published_s: float
    cpu_s: float  # of the schedulers, their writing threads included

    @property
    def rate(self) -> float:
        """Tokens a second until everything is published."""
        return self.tokens / self.published_s


class Load(Strict):
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


class Run(Strict):
    """One machine."""

    date: str
    device: str
    card: str
    cores: int
    versions: dict[str, str]
    ceilings: dict[str, float] = Field(default_factory=dict)  # GB/s, 1 GB = 1e9 bytes
    loads: dict[str, Load] = Field(default_factory=dict)


class Results(ResultsFile):
    """The whole file."""

    runs: dict[str, Run] = Field(default_factory=dict)
