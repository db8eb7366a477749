"""One server's part of a run: it pulls rows, keeps requests in flight, has their dumps verified and published.

A worker is a thread with an event loop of its own (a notebook's kernel has one already). What takes the processor or the disk
runs in a few threads beside it. Rows of a lost server go back; a server of ours is started again, proved, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import stamina

from hsnb.collect import sweep
from hsnb.errors import CaptureError, DumpError, HsnbError
from hsnb.extract import canary
from hsnb.extract.asking import Others, Requests
from hsnb.extract.faults import CanaryOut, HangWatch, ServerLost, can_restart, first_of, lost, restart
from hsnb.extract.flow import Flow, hours
from hsnb.extract.publish import full, now
from hsnb.ledger import FOLDER, Entry

log = logging.getLogger(__name__)
POLL_S = 0.02
CLIENT_S = 10 * 24 * 3600.0  # the HTTP client's patience: a server that hangs is told by its spool, not by a slow answer


class Worker(threading.Thread):
    """Extract on one server what `job.work` hands out. `error`: why it ended early, None when the work was done."""

    def __init__(self, job, server):
        super().__init__(name=f"hsnb-{server.url}", daemon=True)
        self.job, self.server = job, server
        self.work, self.limits = job.work, job.limits
        self.error: BaseException | None = None
        self.flow, self.others = Flow(server, job.limits, job.in_flight_tokens), Others(server)
        self.requests: Requests | None = None
        self.paused = ""  # why nothing is sent, in words
        self.done = self.restarts = self.canaries = self.blurred = 0
        self.paused_s = self.idle_s = 0.0  # idle: nothing in the server, and not for want of space
        self.entered: dict[int, int] = {}  # {row: bytes} since the canary last agreed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task | None = None

    # -- the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            asyncio.run(self._serve_and_revive())
        except BaseException as error:
            self.error = first_of(error)
            if isinstance(self.error, CanaryOut):
                self._distrust()
        finally:
            self.work.leave(self.name)
            self.job.wake.set()

    def stop(self) -> None:
        """Cancel what is in flight; the thread ends soon after."""
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            if self._loop and self._main:
                self._loop.call_soon_threadsafe(self._main.cancel)

    def foreign(self) -> int:
        """Return how many requests the server has seen meanwhile that were not this run's."""
        return self.others.seen(self.requests.answered if self.requests else 0)

    async def _serve_and_revive(self) -> None:
        self._loop, self._main, self._through = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        in_a_row, error = 0, None
        while True:
            done = self.done
            try:
                await self._serve()
                return
            except* ServerLost as group:
                error = first_of(group)
            in_a_row = 0 if self.done > done else in_a_row
            self.work.leave(self.name)
            while error:
                if self.work.stopping.is_set():
                    return
                if not can_restart(self.server) or in_a_row >= self.limits.restarts:
                    raise lost(error, self.server, self.work.done, self.work.rows)
                in_a_row, self.restarts = in_a_row + 1, self.restarts + 1
                self.paused = f"the server is started again ({error})"
                log.warning(f"{self.server.url}: {error}; it is started again ({in_a_row} of {self.limits.restarts} in a row)")
                self.others.settle(self.requests.answered if self.requests else 0)
                try:
                    await asyncio.to_thread(restart, self.server)
                    error = None
                except HsnbError as failed:
                    error = failed
                self.others.begin()
                self.requests = None
            self.flow, self.paused = Flow(self.server, self.limits, self.job.in_flight_tokens), ""
            self.work.join(self.name)

    async def _serve(self) -> None:
        """Work until nothing is left, at this server or another. Raises a group with ServerLost or what no retry can mend."""
        with ThreadPoolExecutor(self.job.writers, thread_name_prefix="hsnb-writer") as self.pool:
            async with self.server.client(timeout_s=CLIENT_S, connections=self.flow.most_requests + 8) as client:
                self.requests = Requests(self.server, client, self.flow)
                await asyncio.to_thread(sweep, self.server.spool, self.job.prefix, self.job.run_prefix)
                async with asyncio.TaskGroup() as group:
                    watch = group.create_task(self._watch())
                    await self._canary()
                    await self._feed(group)
                    watch.cancel()
                if self.entered:
                    with contextlib.suppress(ServerLost):
                        await self._canary()
                await asyncio.to_thread(sweep, self.server.spool, self.job.prefix)  # nothing of ours is in flight any more

    # -- keeping the engine fed ----------------------------------------------------------------------------------

    async def _feed(self, group: asyncio.TaskGroup) -> None:
        flying: set[asyncio.Task] = set()
        canary_at = self.done + self.limits.canary_every
        while not self.work.finished and not self.work.stopping.is_set():
            row = self.work.take(self.flow.tokens)
            if row is None:
                await self._some()
                continue
            try:
                await self._until_it_fits(row, flying)
            except BaseException:
                self.work.put_back(row)
                raise
            if self.work.stopping.is_set():
                self.work.put_back(row)
                break
            self.job.disk.promise(self.job.size_of(self.work.lengths[row]))
            task = group.create_task(self._row(row))
            flying.add(task)
            task.add_done_callback(flying.discard)
            task.add_done_callback(partial(self._landed, row))
            await asyncio.sleep(0)  # it is sent, and so counted, before the next one is weighed
            if self.limits.canary_every and self.done >= canary_at:
                canary_at = self.done + self.limits.canary_every
                while self.flow.given and flying:  # the bound that was asked for holds for the canary too
                    await self._some()
                singing = group.create_task(self._canary())
                if self.flow.given:
                    await asyncio.wait([singing])
        while flying:
            await self._some()

    async def _some(self) -> None:
        """Wait until a request of ours is through, a moment at most: rows may come back from other servers."""
        self._through.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._through.wait()

    async def _until_it_fits(self, row: int, flying: set[asyncio.Task]) -> None:
        """Wait for room in the engine, the spool and at the output; say what is waited for, and for how long at most."""
        tokens, since = self.work.lengths[row], None
        while not self.work.stopping.is_set():
            why = self.flow.full(tokens) or ("output" if self.job.size_of(tokens) > self.job.disk.room() else "")
            if why not in ("spool", "output"):
                self._pause("")
            if not why:
                return
            before = time.monotonic()
            if why in ("spool", "output") and not flying:  # nothing of ours will make room
                disk, since = self.flow.disk if why == "spool" else self.job.disk, since or before
                self._pause(f"the {'spool' if why == 'spool' else 'output disk'} is full: {disk.words()}")
                if before - since > self.limits.patience_s:
                    raise full(self.paused, self.limits.patience_s)
            await self._some()
            if self.paused:
                self.paused_s += time.monotonic() - before
            elif not self.flow.requests:
                self.idle_s += time.monotonic() - before

    def _pause(self, why: str) -> None:
        if why and not self.paused:
            log.warning(f"paused: {why}; waiting at most {hours(self.limits.patience_s)}")
        elif self.paused and not why:
            log.warning("there is space again: going on")
        self.paused = why

    # -- one sample ----------------------------------------------------------------------------------------------

    async def _row(self, row: int) -> bool:
        """Ask for one sample until it is published, `attempts` times at most; then it is owed. Return True: it is settled."""
        try:
            tries = stamina.retry_context(
                on=(DumpError, CaptureError), attempts=self.limits.attempts, timeout=None, wait_initial=0.05, wait_max=5.0
            )
            async for attempt in tries:
                with attempt:
                    entry = await self._extract(row, attempt.num)
        except (DumpError, CaptureError) as error:
            self.job.ledger.fail(row, str(error), self.limits.attempts, now())
            self.work.settle(row, 0)
            return True
        self.work.settle(row, entry.bytes)
        self.done += 1
        if self.limits.canary_every:
            self.entered[row] = entry.bytes
        return True

    def _landed(self, row: int, task: asyncio.Task) -> None:
        """Put a row back that was given up; a task that was cancelled before it began has not run a line of its own."""
        self._through.set()
        self.job.disk.promise(-self.job.size_of(self.work.lengths[row]))
        if task.cancelled() or task.exception():
            self.work.put_back(row)

    async def _extract(self, row: int, attempt: int) -> Entry:
        token_ids = self.job.token_ids(row)
        rid, before = f"{self.job.run_prefix}{row}-{attempt}", time.monotonic()
        path = await self.requests.ask(token_ids.tolist(), rid)
        try:
            given = self.server, row, rid, path, token_ids, attempt, before, self._pause
            return await _whole(self._loop.run_in_executor(self.pool, self.job.publisher.publish, *given))
        finally:
            self.requests.free(path, len(token_ids))
            self._through.set()

    # -- trust ---------------------------------------------------------------------------------------------------

    async def _canary(self) -> None:
        """Ask the canary; what was entered before it was asked is trusted when it agrees. Raises CanaryOut."""
        before = list(self.entered)
        ids = self.job.token_ids(self.job.canary_row)[: canary.TOKENS].tolist()
        checks = await canary.ask(self.requests, self.job.data.path / FOLDER, ids, self.job.run_prefix)
        self.canaries += len(checks)
        self.blurred += checks[-1].not_proved
        for row in before:
            self.entered.pop(row, None)

    def _distrust(self) -> None:
        """Withdraw what was entered since the canary last agreed: it is owed again, and another server may do it."""
        why = f"entered since the canary last agreed; now {self.error}"
        for row in self.entered:
            self.job.ledger.fail(row, why, 1, now())
        self.work.again(list(self.entered), sum(self.entered.values()))

    async def _watch(self) -> None:
        """Raise ServerLost when the server hangs."""
        watch = HangWatch(self.server.spool, self.limits.hang_s)
        while True:
            await asyncio.sleep(min(1.0, self.limits.hang_s / 4))
            try:
                hangs = await asyncio.to_thread(watch.hangs, self.flow.requests, self.requests.answered)
            except OSError as error:
                raise ServerLost(f"its spool is gone: {error}") from error
            if hangs:
                raise ServerLost(f"no forward for {hours(self.limits.hang_s)} while {self.flow.requests} requests wait")


async def _whole(future: asyncio.Future):
    """Await a thread's work to its end even when cancelled, and return what came of it.

    Nothing may be taken away from under the thread, and what it has entered is published: a cancelled task ends after it.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        return await future
