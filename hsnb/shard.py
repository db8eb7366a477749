"""What one shard holds after a run of it."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hsnb.errors import ExtractError
from hsnb.paths import write_json


@dataclass(frozen=True)
class ShardResult:
    """What one shard holds now. Rates are of this run: tokens published over seconds, the server's start not counted."""

    folder: Path
    shard: int
    num_shards: int
    samples: int  # of the shard, without the skipped ones
    done_before: int
    damaged: int  # entered before, and their file gone or of another size: extracted again
    tokens: int  # of all samples done
    bytes: int  # of all their files
    skipped: int
    new_tokens: int
    seconds: float
    failed: dict[int, str] = field(default_factory=dict)
    other_requests: int = 0  # seen by the servers meanwhile and not ours
    restarts: int = 0  # of servers that were lost
    canaries: int = 0  # asked, all of which agreed
    canaries_blurred: int = 0  # of them: the engine's own noise hides what they would show
    paused_s: float = 0.0  # waited for space
    by_server: dict[str, int] = field(default_factory=dict)  # {url: samples published in this run}
    name: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict:
        """Return plain values, for --json."""
        return {**asdict(self), "folder": str(self.folder), "tokens_per_s": round(self.tokens_per_s, 1), "ok": self.ok}

    def save(self, folder: Path) -> Path:
        """Write the result as JSON beside the run's notebooks, and return the file.

        A run that failed or had nothing to do does not replace the result of the run that made the shard whole: it is
        written beside it, as {name}.again.json.
        """
        path = folder / f"shard-{self.shard:04d}.json"
        if not (self.ok and self.new_tokens) and was_whole(path):
            path = again(path)
        return write_json(path, self.as_dict())

    def frame(self):
        """Return the table of the result: check, value, threshold, result."""
        import pandas as pd

        done = self.samples - len(self.failed)
        return pd.DataFrame(
            [
                {
                    "check": "samples published",
                    "value": f"{done:,}",
                    "threshold": f"{self.samples:,}",
                    "result": "pass" if self.ok else "FAIL",
                },
                {"check": "samples owed", "value": f"{len(self.failed):,}", "threshold": "0", "result": "pass" if self.ok else "FAIL"},
                {"check": "of them done before", "value": f"{self.done_before:,}", "threshold": "", "result": ""},
                {"check": "files that were gone or damaged", "value": f"{self.damaged:,}", "threshold": "", "result": ""},
                {"check": "samples skipped (too long)", "value": f"{self.skipped:,}", "threshold": "", "result": ""},
                {"check": "tokens", "value": f"{self.tokens:,}", "threshold": "", "result": ""},
                {
                    "check": "bytes",
                    "value": f"{self.bytes:,} ({self.bytes / 1e9:.3f} GB, {self.bytes / 2**30:.3f} GiB)",
                    "threshold": "",
                    "result": "",
                },
                {"check": "canaries that agreed", "value": self._canaries(), "threshold": "", "result": "pass" if self.canaries else ""},
                {"check": "restarts of a lost server", "value": f"{self.restarts:,}", "threshold": "", "result": ""},
                {"check": "seconds paused for space", "value": f"{self.paused_s:,.0f}", "threshold": "", "result": ""},
                {"check": "requests of others meanwhile", "value": f"{self.other_requests:,}", "threshold": "", "result": ""},
                {"check": "tokens/s in this run", "value": f"{self.tokens_per_s:,.0f}", "threshold": "", "result": ""},
            ]
        )

    def plot(self, ax=None):
        """Draw how much of the shard is there: done before, published by this run, owed."""
        from hsnb.figures import shares

        owed = len(self.failed)
        parts = {"done before": self.done_before, "published by this run": self.samples - owed - self.done_before, "owed": owed}
        return shares(parts, "samples", f"Shard {self.shard} of {self.num_shards}", ax)

    def _canaries(self) -> str:
        return f"{self.canaries:,}" + (
            f", {self.canaries_blurred:,} of them within a noise that hides much" if self.canaries_blurred else ""
        )

    def raise_if_owed(self) -> None:
        """Raise ExtractError when a sample is owed, so that a notebook and its process fail."""
        if self.failed:
            row, error = next(iter(self.failed.items()))
            raise ExtractError(
                got=f"shard {self.shard}: {len(self.failed)} of {self.samples} samples owed, first row {row}: {error}",
                expected="every sample published",
                likely="see the reason; the others are published and entered",
                next="hsnb redo, or the same shard again: only what is owed is asked for",
            )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self.folder))}, shard {self.shard} of {self.num_shards}</p>" + self.frame().to_html(
            index=False, border=0
        )


def again(path: Path) -> Path:
    """Return where a run writes whose results must not replace those of a good one: shard-0004.again.json."""
    return path.with_name(f"{path.stem}.again{path.suffix}")


def was_whole(path: Path) -> bool:
    """Say whether the shard's JSON at `path` is of a run that ended whole."""
    try:
        return bool(json.loads(path.read_text())["ok"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
