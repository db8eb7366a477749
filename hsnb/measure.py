"""How fast a run will go here: real samples through the real server to the real disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsnb.data import Prepared, prepare
from hsnb.params import DataParams, Deployment
from hsnb.report.outcome import duration
from hsnb.sizes import both

SAMPLES = 32


@dataclass(frozen=True)
class Measured:
    """What some samples took. Seconds count requests, checks and writing, not the server's start nor the probe."""

    samples: int
    tokens: int
    seconds: float
    bytes: int  # of the files, ids and headers included
    url: str

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def eta_s(self, tokens: int) -> float:
        """Return the seconds that `tokens` take at this rate, on one server."""
        return tokens / self.tokens_per_s

    def projected(self, tokens: int) -> int:
        """Return the bytes on disk of `tokens`, by what these samples took."""
        return round(self.bytes / self.tokens * tokens)

    def rows(self, tokens: int, states: int) -> list[tuple[str, str, str]]:
        """Return (quantity, value, note) for a plan of `tokens`, whose states take `states` bytes by arithmetic."""
        more = self.projected(tokens) / states - 1
        return [
            (
                "measured",
                f"{self.tokens_per_s:,.0f} tokens/s",
                f"{self.samples} samples, {self.tokens:,} tokens in {self.seconds:.1f} s, {self.url}",
            ),
            ("at this rate", duration(self.eta_s(tokens)), "one server, all tokens"),
            ("files, projected", both(self.projected(tokens)), f"{more:+.2%} against the states alone"),
        ]

    def as_dict(self, tokens: int) -> dict[str, Any]:
        """Return plain values, for --json."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s, "eta_s": self.eta_s(tokens), "projected_bytes": self.projected(tokens)}


def measure(server: Any, deployment: Deployment, data: Prepared, folder: Path, samples: int = SAMPLES) -> Measured:
    """Extract `samples` rows of `data` (of every length in it) below `folder`, as a shard is, and remove them again.

    `folder` should be on the disk that the run writes to. The server needs the probe's PASS. Raises what an extraction raises.
    """
    from hsnb import extract

    picked = pick(data, samples)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".measure-", dir=folder))
    try:
        table = data.dataset()
        with (scratch / "rows.jsonl").open("w") as file:
            for row in picked:
                ids = table[int(row)]["input_ids"].tolist()
                file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")  # what is trained costs nothing here
        own = deployment.model_copy(update={"data": DataParams(source=str(scratch / "rows.jsonl"))})
        small = prepare(own, scratch / "data", max_length=int(data.lengths[picked].max()))
        result = extract.run(server, small, shard=0, num_shards=1, limit=samples)
        result.raise_if_owed()
        return Measured(result.samples, result.new_tokens, result.seconds, result.bytes, server.url)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def pick(data: Prepared, samples: int) -> np.ndarray:
    """Return at most `samples` rows to be extracted, spread evenly over the data set's lengths, ascending by row."""
    rows = np.flatnonzero(data.ok)
    by_length = rows[np.argsort(data.lengths[rows], kind="stable")]
    at = np.unique(np.linspace(0, len(rows) - 1, min(samples, len(rows))).round().astype(int))
    return np.sort(by_length[at])
