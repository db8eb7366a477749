"""Extract one shard: request, verify, publish, enter, free, for every sample that no ledger has yet."""

from __future__ import annotations

import html
import json
import shutil
import time
import uuid
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from hsnb.checks import Asked, dump_checks, require
from hsnb.collect import collect, free
from hsnb.data import Prepared, shard_rows
from hsnb.dumps import open_dump
from hsnb.errors import CaptureError, DumpError, ExtractError
from hsnb.ledger import Entry, Ledger, read_failed, read_ledgers
from hsnb.patch.armed import read_armed
from hsnb.paths import write_json
from hsnb.progress import Progress
from hsnb.trainers import layout as find_layout

ATTEMPTS = 3  # a sample is asked for so often before it is owed
SPOOL_SHARE = 0.5  # of the spool's free bytes that requests in flight may need
MAX_REQUESTS = 64


@dataclass(frozen=True)
class ShardResult:
    """What one shard holds now. Rates are of this run: tokens published over seconds, the server's start not counted."""

    folder: Path
    shard: int
    num_shards: int
    samples: int  # of the shard, without the skipped ones
    done_before: int
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


def run(
    server, data: Prepared, *, shard: int, num_shards: int, layout: str = "speculators", in_flight_tokens: int = 0, limit: int = 0
) -> ShardResult:
    """Extract shard `shard` of `num_shards` (rows shard::num_shards) into the data set's own folder.

    `in_flight_tokens` 0: chosen from the spool's room and the engine's. `limit`: at most so many samples of the shard.
    What any ledger of the same fingerprint has is not asked for again. Raises ExtractError when it must not start or the
    output fails; a sample that fails is in the result, and owed.
    """
    armed, writer = server.armed[0], find_layout(layout)
    writer.check_settings(tuple(armed.boundaries), armed.final)
    rows = shard_rows(data.rows, shard, num_shards)
    skipped = sum(not data.ok[r] for r in rows)
    rows = [r for r in rows if data.ok[r]][: limit or None]
    fingerprint = {
        "data": data.fingerprint,
        "model": armed.config_hash,
        "boundaries": armed.boundaries,
        "final": armed.final,
        "dtype": armed.dtype,
        "sglang": armed.sglang_version,
        "hsnb": armed.patch_version,
        "layout": layout,
    }
    ledgers = data.path / "ledger"
    with Ledger(ledgers / f"shard-{shard:04d}-of-{num_shards:04d}.sqlite", fingerprint) as ledger:
        done = read_ledgers(ledgers, fingerprint)
        owed = [r for r in rows if r not in done]
        writer.begin(data.path, owed)
        describe(data.path, server, layout, fingerprint)
        job = _Job(server, data, writer, ledger, in_flight_tokens)
        job.check_lengths(owed)
        before, others = time.monotonic(), _others(server)
        with Progress(sum(job.lengths[r] for r in owed), unit="tokens", desc=f"shard {shard}") as progress:
            new = job.extract(owed, progress)
        seconds = time.monotonic() - before
        have = {r: e for r, e in {**done, **new}.items() if r in set(rows)}
        failed = {r: e for r, e in read_failed(ledgers).items() if r in set(rows) and r not in have}
    return ShardResult(
        data.path,
        shard,
        num_shards,
        len(rows),
        len(rows) - len(owed),
        sum(e.tokens for e in have.values()),
        sum(e.bytes for e in have.values()),
        skipped,
        sum(e.tokens for e in new.values()),
        seconds,
        failed,
        _others(server) - others,
    )


class _Job:
    """One run over one shard: what is in flight is bounded by tokens, and all entries are made by the calling thread."""

    def __init__(self, server, data: Prepared, writer, ledger: Ledger, in_flight_tokens: int):
        self.server, self.data, self.writer, self.ledger = server, data, writer, ledger
        self.table, self.lengths = data.dataset(), data.lengths.tolist()
        self.armed = server.armed[0]
        self.token_bytes = (len(self.armed.boundaries) + 1) * self.armed.hidden_size * getattr(torch, self.armed.dtype).itemsize
        engine = int(server.info.get("max_total_num_tokens") or 8192)
        room = int(shutil.disk_usage(server.spool).free * SPOOL_SHARE) // self.token_bytes
        self.budget = in_flight_tokens or max(1, min(engine, room))
        self.engine, self.context = engine, int(server.info.get("context_length") or engine)
        self.run_id = uuid.uuid4().hex[:8]  # a dump of a run that was killed is never taken for one of this run

    def check_lengths(self, rows: list[int]) -> None:
        """Refuse before the first request what the server cannot prefill whole."""
        room = min(self.engine, self.context) - 1  # one token is answered
        longest = max(rows, key=lambda r: self.lengths[r], default=None)
        if longest is not None and self.lengths[longest] > room:
            raise ExtractError(
                got=f"row {longest} has {self.lengths[longest]} tokens",
                expected=f"at most {room} (context_length {self.context}, max_total_num_tokens {self.engine})",
                likely="max_length is larger than the server's context",
                next="lower max_length in a new run, or raise server.context_length and server.max_total_tokens",
            )

    def extract(self, rows: list[int], progress: Progress) -> dict[int, Entry]:
        """Publish `rows` and return their entries; a sample that failed ATTEMPTS times is entered as owed."""
        waiting, flying, tokens = deque((r, 1) for r in rows), {}, 0
        entries: dict[int, Entry] = {}
        with self.server.client() as self.client, ThreadPoolExecutor(MAX_REQUESTS) as pool:
            try:
                while waiting or flying:
                    while waiting and len(flying) < MAX_REQUESTS:
                        row, attempt = waiting[0]
                        n = self.lengths[row]
                        if flying and tokens + n > self.budget:
                            break
                        waiting.popleft()
                        flying[pool.submit(self.sample, row, attempt)] = (row, attempt, n)
                        tokens += n
                    for future in wait(flying, return_when=FIRST_COMPLETED).done:
                        row, attempt, n = flying.pop(future)
                        tokens -= n
                        if entry := self.settle(future, row, attempt, waiting):
                            entries[row] = entry
                            progress.advance(n, note=f"{len(entries):,} of {len(rows):,} samples")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return entries

    def settle(self, future: Future, row: int, attempt: int, waiting: deque) -> Entry | None:
        """Enter what a thread published; put a failed sample back, or enter it as owed. Raises what no retry can mend."""
        try:
            entry, dump = future.result()
        except (DumpError, CaptureError) as error:
            if attempt < ATTEMPTS:
                waiting.append((row, attempt + 1))
            else:
                self.ledger.fail(row, str(error), attempt, _now())
            return None
        self.ledger.enter(entry)
        free(dump)
        return entry

    def sample(self, row: int, attempt: int) -> tuple[Entry, Path]:
        """Request one sample, verify its dump in the engine's dtype, publish it. Runs in a thread."""
        before = time.monotonic()
        token_ids = self.table[row]["input_ids"]
        rid = f"hsnb-{self.run_id}-{row}-{attempt}"
        self.client.generate(token_ids.tolist(), rid=rid)
        path = collect(self.server.spool, rid, self.armed.format)
        try:
            dump = open_dump(path)
            asked = Asked(token_ids, tuple(self.armed.boundaries), self.armed.final, self.armed.hidden_size, self.armed.dtype)
            require(dump_checks(dump, asked), f"row {row}", "run the shard again; if it stays, probe the server with hsnb probe")
            file, size, checksum = self.writer.publish(self.data.path, row, dump)
        except BaseException:
            free(path)
            raise
        entry = Entry(
            row,
            rid,
            len(token_ids),
            file,
            size,
            checksum,
            json.dumps(list(dump.boundaries)),
            dump.final,
            str(self.writer.DTYPE).removeprefix("torch."),
            attempt,
            round(time.monotonic() - before, 3),
            _now(),
        )
        return entry, path


def describe(folder: Path, server, layout: str, fingerprint: dict) -> None:
    """Write hsnb.json beside the data set: which boundaries its columns are, so that no trainer has to be told by memory."""
    armed = server.armed[0]
    tree = {
        "hsnb_format": 1,
        "layout": layout,
        "boundaries": armed.boundaries,
        "final": armed.final,
        "target_layer_ids": armed.boundaries,
        "model": armed.model_path,
        "hidden_size": armed.hidden_size,
        "num_layers": armed.num_layers,
        "fingerprint": fingerprint,
    }
    write_json(folder / "hsnb.json", tree)


def _others(server) -> int:
    """Return how many requests that are not hsnb's the server has seen (every rank counts them: rank 0 speaks for all)."""
    armed = read_armed(server.spool)
    return armed[0].counts.get("other", 0) if armed else 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
