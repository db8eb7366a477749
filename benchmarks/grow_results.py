"""What a run of benchmarks.grow leaves in grow-results.json."""

from __future__ import annotations

from pydantic import Field

from benchmarks.results import ResultsFile, Strict

FILE = "grow-results.json"


class Length(Strict):
    """Prompts of one length: seconds a token of each turn (wall, CPU), and the process's memory after it."""

    tokens: int
    seconds: list[float]
    cpu_s: list[float]
    memory_mib: list[float]


class Client(Strict):
    """One extraction: samples a second, the seconds of each thousand, and the client's memory after each."""

    rate: float
    seconds: list[float]
    memory_mib: list[float]


class Requests(Strict):
    """A real server: seconds of each thousand requests, and memory before the first and after each, of scheduler and writing process."""

    work: str
    seconds: list[float]
    memory_mib: list[float]


class Made(Strict):
    """When a part was measured, and with what."""

    date: str
    versions: dict[str, str]


class Grow(ResultsFile):
    """The whole file; `client` by number of samples, `made` by part ("writer", "client 1000", "server")."""

    made: dict[str, Made] = Field(default_factory=dict)
    writer: list[Length] = Field(default_factory=list)
    client: dict[int, Client] = Field(default_factory=dict)
    server: Requests | None = None
