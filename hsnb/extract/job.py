"""One run over one shard: what is owed, who works on it, and what came of it."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hsnb.data import Prepared, shard_rows
from hsnb.errors import ExtractError, HsnbError
from hsnb.extract.faults import CanaryOut
from hsnb.extract.fingerprint import fingerprint
from hsnb.extract.flow import Disk, Flow, check_fits, gb
from hsnb.extract.output import Committer, Output, export
from hsnb.extract.publish import Publisher
from hsnb.extract.recovery import recover, recover_others
from hsnb.extract.staging import threads
from hsnb.extract.status import Status
from hsnb.extract.work import Work
from hsnb.extract.worker import Worker
from hsnb.ledger import REDO, Entry, Ledger, home, read_failed, read_ledgers
from hsnb.order import send_order
from hsnb.params import ExtractParams
from hsnb.probe.receipt import require_receipt
from hsnb.progress import Progress
from hsnb.shard import ShardResult
from hsnb.sizes import OUTPUT_FLOOR
from hsnb.storage import Store, adopt, sending

log = logging.getLogger(__name__)
LOOK_S = 0.1
STOP_S = 30.0  # for threads to end once told
FILE_OVERHEAD = 8192  # bytes of a published file besides states and ids, at most


@dataclass
class Job:
    """What the workers of one run share."""

    data: Prepared
    work: Work
    limits: ExtractParams
    in_flight_tokens: int
    ledger: Ledger
    output: Output
    disk: Disk
    token_bytes: int  # of a published file
    table: object = field(repr=False)
    canary_row: int = 0
    writers: int = 2
    workers: list[Worker] = field(default_factory=list)
    wake: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.prefix = f"hsnb-{self.ledger.writer}-"  # of this ledger's requests
        self.run_prefix = f"{self.prefix}{uuid.uuid4().hex[:8]}-"  # a dump of a run that was killed is never taken for one of this run
        self._reading = threading.Lock()

    def start(self, servers: Sequence) -> None:
        """Start a worker a server, and what they publish through."""
        self.committer = Committer(self.ledger, self.output)
        self.publisher = Publisher(self.output, self.committer, self.loss_mask, self.disk, self.limits.patience_s, self.work.stopping)
        self.workers = [Worker(self, server) for server in servers]
        for worker in self.workers:
            self.work.join(worker.name)
        for worker in self.workers:
            worker.start()

    def stop(self) -> None:
        """Cancel what is in flight and wait for the threads."""
        self.work.stopping.set()
        for worker in self.workers:
            worker.stop()
        end = time.monotonic() + STOP_S
        for worker in self.workers:
            worker.join(max(0.1, end - time.monotonic()))
        self.publisher.close()
        self.committer.close()

    def token_ids(self, row: int) -> torch.Tensor:
        """Return a row's token ids, int64 [S]."""
        return self._list(row, "input_ids")

    def loss_mask(self, row: int) -> torch.Tensor | None:
        """Return a row's loss mask, int64 [S]; None when the layout leaves it in the table."""
        return None if self.output.layout.mask == "table" else self._list(row, "loss_mask")

    def _list(self, row: int, name: str) -> torch.Tensor:
        with self._reading:  # one list of one row of the Arrow table: a formatted row costs more than all else of a short sample
            values = self.table[row].column(name)[0].values
        return torch.tensor(values.to_numpy(zero_copy_only=False), dtype=torch.int64)

    def size_of(self, tokens: int) -> int:
        """Return the bytes of a published file of so many tokens, at most."""
        return tokens * self.token_bytes + FILE_OVERHEAD


def run(
    servers,
    data: Prepared,
    *,
    shard: int = 0,
    num_shards: int = 1,
    layout: str = "speculators",
    in_flight_tokens: int = 0,
    limit: int = 0,
    limits: ExtractParams | None = None,
    only: Sequence[int] | None = None,
) -> ShardResult:
    """Extract shard `shard` of `num_shards` (rows shard::num_shards) into the data set's own folder, on one server or several.

    `in_flight_tokens` 0: chosen from the spool's room and the engine's. `limit`: at most so many samples of the shard.
    `limits`: bounds and patience. `only`: these rows and no shard (what `hsnb redo` asks for).
    What any ledger of the same fingerprint has is not asked for again. Raises ExtractError when it must not start or the
    output fails, a server has no PASS of the probe, or its canary is out; ServerError when all servers are lost. A sample that
    fails is in the result, and owed.
    """
    servers = list(servers) if isinstance(servers, Sequence) else [servers]
    limits = limits or ExtractParams()
    name = REDO if only is not None else f"shard-{shard:04d}-of-{num_shards:04d}"
    output = Output(data.path, name, layout)
    print_ = None
    for server in servers:
        require_receipt(server)
        output.check(tuple(server.armed[0].boundaries), server.armed[0].final, server.armed[0].model_path)
        now = fingerprint(server, data, layout, output.dtype)
        if print_ is not None and now != print_:
            raise _differing(servers[0], server, print_, now)
        print_ = now
    rows = list(only) if only is not None else shard_rows(data.rows, shard, num_shards)
    ok, lengths = data.ok, data.lengths.tolist()
    skipped = sum(not ok[r] for r in rows)
    rows = [r for r in rows if ok[r]][: limit or None]
    if store := Store(limits.store, data.path) if limits.store else None:
        store.fetch_ledgers()
    entered = read_ledgers(data.path, print_)  # refuses other settings before anything is written
    with Ledger(home(data.path) / f"{name}.sqlite", print_) as ledger, sending(store, ledger) as output.uploader:
        adopt(ledger, data.path)
        recovered = recover(output, ledger) + recover_others(data.path, name, layout, print_, overlap=(shard, num_shards, only))
        entered = read_ledgers(data.path, print_)
        if recovered:
            log.info(f"{recovered} samples whose files were in place when their writer was killed are entered")
        done = {r: e for r in rows if (e := entered.get(r)) and (intact(data.path, e) or (store and store.has(e)))}
        owed = [r for r in rows if r not in done]
        output.begin(owed)
        output.describe(servers[0], layout, print_, store.url if store else "")
        if store:
            for entry in done.values():
                if intact(data.path, entry):  # a run before had no time to send it
                    output.uploader.add(entry)
        armed = servers[0].armed[0]
        width = (len(armed.boundaries) + 1) * armed.hidden_size * output.layout.DTYPE.itemsize
        budget = Flow(servers[0], limits, in_flight_tokens).most_tokens
        queue = [owed[at] for at in send_order([int(lengths[r]) for r in owed], budget)]
        columns = ["input_ids"] if output.layout.mask == "table" else ["input_ids", "loss_mask"]
        job = Job(
            data, Work(queue, lengths), limits, in_flight_tokens, ledger, output, Disk(data.path, limits.output_floor, OUTPUT_FLOOR),
            width + 16, data.dataset().with_format("arrow", columns=columns), int(ok.argmax()), threads(len(servers)),
        )  # fmt: skip
        damaged = sum(r in entered for r in owed)
        seconds = extract(job, servers, name) if owed else 0.0
        output.end()
        asked, new = set(rows), set(owed)
        mine = {r: e for r, e in ledger.done().items() if r in new}
        have = done | mine
        failed = {r: why for r, why in read_failed(data.path, have.keys()).items() if r in asked}
        failed |= {r: "not asked for: the run ended before" for r in rows if r not in have and r not in failed}
    return ShardResult(
        data.path, shard, num_shards, len(rows), len(done), damaged, _sum(have, "tokens"), _sum(have, "bytes"), skipped,
        _sum(mine, "tokens"), seconds, failed, sum(w.foreign() for w in job.workers),
        restarts=sum(w.restarts for w in job.workers), canaries=sum(w.canaries for w in job.workers),
        canaries_blurred=sum(w.blurred for w in job.workers), paused_s=round(sum(w.paused_s for w in job.workers), 1),
        by_server={w.server.url: w.done for w in job.workers}, name=name,
    )  # fmt: skip


def extract(job: Job, servers: Sequence, name: str) -> float:
    """Let the workers do what is owed, show and write down how far they are, and return the seconds it took.

    Raises what ended the run: the output's error, or the last server's when no other could take its rows over.
    """
    check_lengths(job, servers)
    before, status = time.monotonic(), Status(job, name)
    work, state, reason = job.work, "stopped", ""
    warn_of_size(job)
    try:
        with Progress(
            work.asked_tokens, unit="tokens", desc=name if name == REDO else f"shard {name.split('-')[1].lstrip('0') or 0}"
        ) as progress:
            job.start(servers)
            try:
                watch(job, status, progress)
            finally:
                job.stop()
                with contextlib.suppress(OSError):  # a dead disk has its own error
                    export(job.ledger, job.data.path)
        raise_if_stopped(job)
        state = "owed" if work.failed else "whole"
    except BaseException as error:
        reason = str(error) or type(error).__name__
        raise
    finally:
        status.end(state, reason)
    return time.monotonic() - before


def watch(job: Job, status: Status, progress: Progress) -> None:
    """Follow the workers until all of them have ended; the first error that no other server can mend stops them."""
    work, shown = job.work, 0
    while any(w.is_alive() for w in job.workers):
        job.wake.wait(LOOK_S)
        job.wake.clear()
        done = work.asked_tokens - work.left_tokens
        if done > shown:
            progress.advance(done - shown, note=status.note())
            shown = done
        elif any(w.paused for w in job.workers):
            progress.advance(0, note=status.note())
        if status.tick():
            export(job.ledger, job.data.path)
        for worker in job.workers:
            if worker.error and not carries_on(worker.error):
                job.work.stopping.set()
    done = work.asked_tokens - work.left_tokens
    progress.advance(max(0, done - shown), note=status.note())


def carries_on(error: BaseException) -> bool:
    """Say whether other servers can go on when one worker ended with `error`: not when it was the disk's."""
    return not isinstance(error, (ExtractError, OSError, sqlite3.Error))


def raise_if_stopped(job: Job) -> None:
    """Raise the error that ended the run early; a server's error counts only when its rows were left undone."""
    errors = [w.error for w in job.workers if w.error]
    if job.work.finished or not errors:
        for worker in job.workers:
            if worker.error:
                log.warning(f"{worker.server.url} dropped out: {worker.error}")
        return
    error = next((e for e in errors if not carries_on(e)), errors[0])
    if isinstance(error, CanaryOut):
        url = next(w.server.url for w in job.workers if w.error is error)
        raise ExtractError(
            got=f"the canary at {url}: {error}",
            expected="the states that the same prompt had when this data set was begun",
            likely="the server was started with other flags or weights, or its device fails",
            next="probe it (hsnb probe); what was entered since the canary last agreed is owed again",
        ) from error
    if isinstance(error, HsnbError):
        raise error
    raise ExtractError(
        got=f"{type(error).__name__}: {error}",
        expected="a run to its end",
        likely="a disk that fails, or went read-only" if not carries_on(error) else "a defect of hsnb",
        next="run the same shard again: it goes on where it stopped",
    ) from error


def check_lengths(job: Job, servers: Sequence) -> None:
    """Refuse rows that one of the servers cannot prefill whole, or its spool not hold."""
    for server in servers:
        check_fits(Flow(server, job.limits), job.work.snapshot(), job.work.lengths)


def warn_of_size(job: Job) -> None:
    """Say before the start when not all of it will fit."""
    need, room = sum(job.size_of(job.work.lengths[r]) for r in job.work.snapshot()), job.disk.room()
    if need > room:
        log.warning(f"{gb(need)} to come, {job.disk.words()}: the run will pause when the disk is full, and go on when there is room")


def intact(folder: Path, entry: Entry) -> bool:
    """Say whether an entered sample's file is there, with its size; a flipped bit is not seen (`hsnb verify` reads them all)."""
    try:
        return (folder / entry.file).stat().st_size == entry.bytes
    except OSError:
        return False


def _sum(entries: dict[int, Entry], what: str) -> int:
    return sum(getattr(e, what) for e in entries.values())


def _differing(first, second, a: dict, b: dict) -> ExtractError:
    changed = [f"{k} is {a.get(k)!r} and {b.get(k)!r}" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]
    return ExtractError(
        got=f"{first.url} and {second.url} differ: {'; '.join(changed)}",
        expected="servers of one model with the same settings",
        likely="two deployments",
        next="start all of them from one params file",
    )
