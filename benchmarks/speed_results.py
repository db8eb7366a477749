"""What a run of benchmarks.speed leaves in speed-results.json."""

from __future__ import annotations

import statistics

from pydantic import Field

from benchmarks.results import ResultsFile, Strict

FILE = "speed-results.json"


class Turn(Strict):
    """One load sent once: seconds until the last answer, until the last dump has its name in the spool, and until the client has published it.

    A plain turn ends with its last answer.
    """

    tokens: int
    answered_s: float
    published_s: float
    cpu_s: float  # of the schedulers; up to writing processes of their own (2026-11-30) their writing threads included
    writer_cpu_s: float = 0.0  # of the writing process
    client_cpu_s: float = 0.0  # of the client that publishes
    drained_s: float | None = None  # None: there was no such client
    batch_ms: float | None = None  # from one prefill batch to the next, the median, as the server's log has it; None: too few

    @property
    def rate(self) -> float:
        """Tokens a second until everything is published."""
        return self.tokens / self.published_s

    @property
    def whole(self) -> float:
        """Tokens a second until everything is at the output, or in the spool where no client takes it from there."""
        return self.tokens / (self.drained_s or self.published_s)


class Load(Strict):
    """Alternations of one load. `ratio`: the median of captured / plain tokens a second of neighbouring turns."""

    prompts: str
    token_bytes: int
    plain: list[Turn]
    captured: list[Turn]
    ring_full_ms: int  # that the forward waited, in all captured turns
    memory_growth_mib: float  # of the schedulers and the writing process, from before the first captured turn to after the last
    output: str = ""  # where the client published to: memory or disk; "": there was none
    alone_s: list[float] = Field(default_factory=list)  # disk: that as many bytes in as many files took right after each alternation
    ceilings: dict[str, float] = Field(default_factory=dict)  # disk: its own, as the run had found them before; GB/s
    date: str = ""  # ISO 8601, UTC; "": the run's. Loads that were not measured again have an older one
    source: str = ""  # of hsnb; "": the run's

    @property
    def turns(self) -> int:
        """Alternations that were measured."""
        return len(self.captured)

    def ratios(self, of: str = "rate") -> list[float]:
        """Return captured / plain of each alternation: tokens a second, or CPU seconds a token.

        `rate`: into the spool. `whole`: to the output. `answered`: the answers alone. `cpu_s`: the schedulers. `server_cpu`: and the writing process.
        """
        value = {
            "rate": lambda t: t.rate,
            "whole": lambda t: t.whole,
            "answered": lambda t: t.tokens / t.answered_s,
            "cpu_s": lambda t: t.cpu_s / t.tokens,
            "server_cpu": lambda t: (t.cpu_s + t.writer_cpu_s) / t.tokens,
        }[of]
        return [value(c) / value(p) for p, c in zip(self.plain, self.captured, strict=True)]

    def median(self, of: str = "rate") -> float:
        """Return the median of `ratios`."""
        return statistics.median(self.ratios(of))

    def batch_ms(self) -> tuple[float, float] | None:
        """Return the median milliseconds of a plain and of a captured batch: steadier than a turn, which others on the machine slow down."""
        both = [[t.batch_ms for t in turns if t.batch_ms is not None] for turns in (self.plain, self.captured)]
        return (statistics.median(both[0]), statistics.median(both[1])) if all(both) else None

    def shares(self) -> list[float]:
        """Return, for each alternation, the speed onto the disk as a share of the disk's own right after it."""
        return [alone / turn.drained_s for alone, turn in zip(self.alone_s, self.captured, strict=True)]

    def speeds(self) -> list[float]:
        """Return GB of states a second of each captured turn, to where it ended."""
        return [t.whole * self.token_bytes / 1e9 for t in self.captured]

    def of_another_source(self, run: Run) -> str:
        """Return the load's source where it was not measured again with the run's; "" where it was."""
        return f", hsnb source {self.source}" if self.source not in ("", run.versions["hsnb source"]) else ""

    def client_cores(self) -> float:
        """Return the median of the client's CPU seconds for each GB that it published."""
        return statistics.median(t.client_cpu_s / (t.tokens * self.token_bytes / 1e9) for t in self.captured)


class Run(Strict):
    """One machine."""

    date: str
    device: str
    card: str
    cores: int
    versions: dict[str, str]
    ceilings: dict[str, float] = Field(default_factory=dict)  # GB/s, 1 GB = 1e9 bytes
    loads: dict[str, Load] = Field(default_factory=dict)

    def carried(self) -> dict[str, Load]:
        """Return the loads with what they have of their run written into them, for a later one."""
        own = {"date": self.date, "source": self.versions.get("hsnb source", ""), "ceilings": self.ceilings}
        return {
            name: load.model_copy(update={k: v for k, v in own.items() if not getattr(load, k) and (k != "ceilings" or load.alone_s)})
            for name, load in self.loads.items()
        }

    def with_load(self, name: str, load: Load) -> Run:
        """Return the run with one load put in, unless it has one of more alternations of the same source: a cut one takes no whole one's place."""
        have = self.loads.get(name)
        if have and have.source == load.source and have.turns > load.turns:
            return self
        return self.model_copy(update={"loads": {**self.loads, name: load}})


class Results(ResultsFile):
    """The whole file."""

    runs: dict[str, Run] = Field(default_factory=dict)
