"""What one shard holds after a run of it."""

from __future__ import annotations

import html
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
    other_requests: int = 0  # seen by the server meanwhile and not ours

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
        """Write the result as JSON beside the run's notebooks."""
        return write_json(folder / f"shard-{self.shard:04d}.json", self.as_dict())

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
                {"check": "requests of others meanwhile", "value": f"{self.other_requests:,}", "threshold": "", "result": ""},
                {"check": "tokens/s in this run", "value": f"{self.tokens_per_s:,.0f}", "threshold": "", "result": ""},
            ]
        )

    def raise_if_owed(self) -> None:
        """Raise ExtractError when a sample is owed, so that a notebook and its process fail."""
        if self.failed:
            row, error = next(iter(self.failed.items()))
            raise ExtractError(
                got=f"shard {self.shard}: {len(self.failed)} of {self.samples} samples owed, first row {row}: {error}",
                expected="every sample published",
                likely="see the reason; the others are published and entered",
                next="run the same shard again: only what is owed is asked for",
            )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self.folder))}, shard {self.shard} of {self.num_shards}</p>" + self.frame().to_html(
            index=False, border=0
        )
