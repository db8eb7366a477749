"""How an executed notebook ended, read from its file: status, the error in its four parts, parameters and duration."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

STATUSES = ("failed", "unfinished", "not run", "passed")  # in the order of the index
MARKS = {"failed": "✗", "unfinished": "…", "not run": "–", "passed": "✓", "skipped": "–"}  # beside a colour, never instead of a word
ERROR_MARKER_TAG = "papermill-error-cell-tag"  # papermill's own notes about a failure; the banner says it better
PARTS = {"got": "What came", "expected": "Expected", "likely": "Likely", "next": "Next"}

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# `got` may quote another error with parts of its own, so it takes as much as it can.
_FOUR = re.compile(r"(?P<name>\w+): (?P<got>.*), expected (?P<expected>.*?)\. Likely: (?P<likely>.*?)\. Next: (?P<next>.*)", re.S)


@dataclass(frozen=True)
class Outcome:
    """How a notebook ended: passed, failed, unfinished (running or killed) or not run."""

    status: str
    error: str = ""
    cell: str = ""  # the id of the cell that failed
    started: str = ""
    seconds: float | None = None
    parameters: dict[str, Any] | None = None

    @classmethod
    def of(cls, nb: Any) -> Outcome:
        """Read it from the outputs and papermill's metadata."""
        pm = nb.metadata.get("papermill", {})
        facts = {"started": pm.get("start_time") or "", "seconds": pm.get("duration"), "parameters": dict(pm.get("parameters", {}))}
        for cell in nb.cells:
            for output in cell.get("outputs", []):
                if output.output_type == "error" and not (output.ename == "SystemExit" and output.evalue in ("", "0")):
                    return cls("failed", error_line(output.ename, output.evalue), cell.get("id", ""), **facts)
        if error := nb.metadata.get("hsnb", {}).get("error"):  # the kernel died, or the run was interrupted
            return cls("failed", error, **facts)
        if pm.get("start_time"):
            return cls("passed" if pm.get("end_time") else "unfinished", **facts)
        return cls("passed" if any(cell.get("execution_count") for cell in nb.cells) else "not run", **facts)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, with the error's four parts where it has them."""
        return {**asdict(self), "parts": parts_of(self.error)}


def error_line(name: str, value: str) -> str:
    """Return the last line of a traceback in plain text; an HsnbError's own line has its name already."""
    value = ANSI.sub("", value or "").strip()
    return value if value.startswith(f"{name}: ") else f"{name}: {value}".rstrip(": ")


def parts_of(line: str) -> dict[str, str] | None:
    """Return {"name", "got", "expected", "likely", "next"} of an HsnbError's line, None for any other error's.

    >>> parts_of("DumpError: 2047 rows, expected 2048. Likely: a chunk is missing. Next: hsnb verify")["expected"]
    '2048'
    """
    found = _FOUR.fullmatch(line.strip())
    return found.groupdict() if found else None


def title_of(nb: Any) -> str:
    """Return the first level-1 heading of the notebook, or ""."""
    for cell in nb.cells:
        if cell.cell_type == "markdown" and ERROR_MARKER_TAG not in cell.metadata.get("tags", []):
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return re.sub(r"[`*]", "", line[2:]).strip()
    return ""


def duration(seconds: float | None) -> str:
    """Return 75.2 as "1 min 15 s"."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"
