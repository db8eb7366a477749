"""What a GPU run leaves: figures with their units in one JSON file, validated when read, written whole after every step.

Keys of `runs` come from the card and the number of GPUs ("h200", "h200x2"), so runs on several machines share one file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import Field

from benchmarks.results import ResultsFile, Strict

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "docs" / "gpu-results.json"
Value = bool | int | float | str


class Figure(Strict):
    """One measured number with its unit; `rule` and `bar` say what it had to be, `n` how many things it was taken over."""

    name: str
    value: Value
    unit: str = Field(min_length=1)
    rule: Literal["", "at most", "at least", "equal to"] = ""
    bar: Value | None = None
    n: int | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Say whether the bar is met; a figure without one is only reported."""
        if self.rule in ("", "equal to"):
            return not self.rule or self.value == self.bar
        if isinstance(self.value, str) or isinstance(self.bar, str | None):
            return False  # "NaN" meets no bar
        return self.value <= self.bar if self.rule == "at most" else self.value >= self.bar


class Table(Strict):
    """Figures that make sense only side by side, e.g. one row a boundary."""

    title: str
    columns: list[str]
    units: list[str]
    rows: list[list[Value]]


class Step(Strict):
    """One check of a run. `state`: ok; off (a figure misses its bar); failed (`error` says why); skipped."""

    title: str
    state: Literal["ok", "off", "failed", "skipped"]
    date: str  # ISO 8601, UTC
    seconds: float
    source: str = ""  # of hsnb, as in the run's versions: steps that were run again may have another
    figures: list[Figure] = Field(default_factory=list)
    tables: list[Table] = Field(default_factory=list)
    error: str = ""


class Run(Strict):
    """One run on one machine: `device` "cpu" marks a rehearsal, whose figures are never published."""

    date: str
    card: str
    gpus: int
    memory_mib: int
    driver: str
    device: Literal["cuda", "cpu"]
    versions: dict[str, str]
    steps: dict[str, Step] = Field(default_factory=dict)


class Results(ResultsFile):
    """The whole file."""

    schema_version: Literal[1] = 1
    runs: dict[str, Run] = Field(default_factory=dict)

    def with_step(self, key: str, run: Run, name: str, step: Step) -> Results:
        """Return the results with one step of `run` put in; the steps that the run under `key` has already stay."""
        have = self.runs[key].steps if key in self.runs else {}
        return Results(runs={**self.runs, key: run.model_copy(update={"steps": {**have, name: step}})})

    def begun_again(self, key: str, but: Collection[str]) -> Results:
        """Return the results without the steps of the run under `key`, those named in `but` aside: they are measured by themselves."""
        if key not in self.runs:
            return self
        steps = {name: step for name, step in self.runs[key].steps.items() if name in but}
        others = {k: run for k, run in self.runs.items() if k != key}
        return Results(runs={**others, key: self.runs[key].model_copy(update={"steps": steps})} if steps else others)

    def merged(self, other: Results) -> Results:
        """Return both files' runs; of two runs under one key `other`'s is taken."""
        return Results(runs={**self.runs, **other.runs})


def figure(name: str, value, unit: str, rule: str = "", bar=None, n: int | None = None, note: str = "") -> Figure:
    """Return a Figure with six significant digits; NaN and infinities become words, which JSON has no numbers for."""
    return Figure(name=name, value=plain(value), unit=unit, rule=rule, bar=bar, n=n, note=note)


def plain(value) -> Value:
    """Return a number as JSON can hold it."""
    if isinstance(value, bool | int | str):
        return value
    value = float(value)
    return float(f"{value:.6g}") if math.isfinite(value) else str(value).replace("nan", "NaN")


def card_key(card: str, gpus: int) -> str:
    """Return "h200x2" for two of "NVIDIA H200": vendors' names out, the rest as one word."""
    words = [w for w in re.findall(r"[a-z0-9]+", card.lower()) if w not in ("nvidia", "geforce", "tesla", "quadro")]
    return "-".join(words or ["gpu"]) + (f"x{gpus}" if gpus > 1 else "")


def said(error: Exception) -> str:
    """Return what an error says, with its kind in front once (hsnb's own errors name theirs)."""
    kind, text = type(error).__name__, str(error)
    return text if text.startswith(f"{kind}: ") else f"{kind}: {text}"


def without_paths(text: str, limit: int = 600) -> str:
    """Return `text` on one line without the paths of the machine it came from."""
    named = {str(ROOT): "(hsnb)", os.environ.get("HSNB_CACHE", ""): "(cache)", str(Path.home()): "~"}
    for path, name in named.items():
        if len(path) > 1:
            text = text.replace(path, name)
    text = re.sub(r"(?<![\w~)./:])/[\w.-]+/[^\s'\",:;)]*", "(path)", text)
    return " ".join(text.split())[:limit]
