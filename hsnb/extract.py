"""Extract one shard: request, verify, publish, enter, free, for every sample that no ledger has yet."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path

import torch

from hsnb.checks import Asked, dump_checks, require
from hsnb.collect import collect, free
from hsnb.data import Prepared, shard_rows
from hsnb.dumps import open_dump
from hsnb.errors import CaptureError, DumpError, ExtractError, ServerError
from hsnb.ledger import Entry, Ledger, read_failed, read_ledgers
from hsnb.params import Deployment
from hsnb.patch.armed import read_armed
from hsnb.paths import write_json
from hsnb.probe.receipt import require_receipt
from hsnb.progress import Progress
from hsnb.shard import ShardResult
from hsnb.trainers import layout as find_layout

ATTEMPTS = 3  # a sample is asked for so often before it is owed
SPOOL_SHARE = 0.5  # of the spool's free bytes that requests in flight may need
MAX_REQUESTS = 64


def check_first(deployment: Deployment, layout: str) -> None:
    """Refuse before anything is prepared or started: boundaries that the model has not, a final that the layout cannot hold."""
    find_layout(layout).check_settings(deployment.check_against_model(), deployment.capture.final, deployment.model_path())


def run(
    server, data: Prepared, *, shard: int, num_shards: int, layout: str = "speculators", in_flight_tokens: int = 0, limit: int = 0
) -> ShardResult:
    """Extract shard `shard` of `num_shards` (rows shard::num_shards) into the data set's own folder.

    `in_flight_tokens` 0: chosen from the spool's room and the engine's. `limit`: at most so many samples of the shard.
    What any ledger of the same fingerprint has is not asked for again. Raises ExtractError when it must not start or the
    output fails, or the server has no PASS of the probe; a sample that fails is in the result, and owed.
    """
    require_receipt(server)
    armed, writer = server.armed[0], find_layout(layout)
    writer.check_settings(tuple(armed.boundaries), armed.final, armed.model_path)
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
        entered = read_ledgers(ledgers, fingerprint)
        done = {r: e for r, e in entered.items() if intact(data.path, e)}
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
        sum(r in entered for r in owed),
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
            except ServerError as error:
                pool.shutdown(wait=False, cancel_futures=True)
                raise self.gone(error, len(entries), len(rows)) from error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return entries

    def gone(self, error: ServerError, done: int, asked: int) -> ServerError:
        """Say what an error of the server means for the shard: what is kept, where to look, and that it can go on."""
        alive = self.server.running()
        return ServerError(
            got=f"{'the server refused a request' if alive else 'the server has ended'} after {done:,} of {asked:,} samples ({error.got})",
            expected="answers until the shard is done",
            likely=error.likely if alive else f"it was stopped or killed; its log: {self.server.log or 'on the side that started it'}",
            next="run the same shard again: what is published is entered, and it goes on where it stopped",
        )

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
        item = self.table[row]
        token_ids = item["input_ids"]
        rid = f"hsnb-{self.run_id}-{row}-{attempt}"
        self.client.generate(token_ids.tolist(), rid=rid)
        path = collect(self.server.spool, rid, self.armed.format)
        try:
            dump = open_dump(path)
            asked = Asked(token_ids, tuple(self.armed.boundaries), self.armed.final, self.armed.hidden_size, self.armed.dtype)
            require(dump_checks(dump, asked), f"row {row}", "run the shard again; if it stays, probe the server with hsnb probe")
            file, size, checksum = self.writer.publish(self.data.path, row, dump, item["loss_mask"])
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
            self.writer.final,
            str(self.writer.DTYPE).removeprefix("torch."),
            attempt,
            round(time.monotonic() - before, 3),
            _now(),
        )
        return entry, path


def intact(folder: Path, entry: Entry) -> bool:
    """Say whether an entered sample's file is there, with its size; a flipped bit is not seen (the ledger has the checksum)."""
    try:
        return (folder / entry.file).stat().st_size == entry.bytes
    except OSError:
        return False


def describe(folder: Path, server, layout: str, fingerprint: dict) -> None:
    """Write hsnb.json beside the data set: which boundaries its columns are, so that no trainer has to be told by memory."""
    armed = server.armed[0]
    tree = {
        "hsnb_format": 1,
        "layout": layout,
        "boundaries": armed.boundaries,
        "final": find_layout(layout).final,
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
