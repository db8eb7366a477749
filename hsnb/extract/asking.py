"""Ask one server for dumps: what is sent, what came back, and what the server has seen that was not ours."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from hsnb.collect import acollect, free
from hsnb.errors import CaptureError, DumpError, ServerError
from hsnb.extract.faults import ServerLost
from hsnb.extract.flow import Flow
from hsnb.patch.armed import read_armed

ALIVE_S = 10.0


class Requests:
    """The requests of one client to one server, counted in its `flow` from the sending to the freeing of the dump."""

    def __init__(self, server, client, flow: Flow):
        self.server, self.client, self.flow = server, client, flow
        self.answered = 0

    async def ask(self, ids: list[int], rid: str) -> Path:
        """Send one request and return the path of its dump; `free` it.

        Raises ServerLost when the server is not there any more, DumpError or CaptureError when only this request failed.
        """
        n, path = len(ids), None
        self.flow.sent(n)
        try:
            reply = await self.client.agenerate(ids, rid=rid)
            if reply.prompt_tokens != n:
                raise DumpError(
                    got=f"request {rid}: an answer to {reply.prompt_tokens} tokens",
                    expected=f"one to {n}",
                    likely="a server that answers without having run the request",
                    next="see the server's log",
                )
            self.answered += 1
            path = await acollect(self.server.spool, rid, self.server.armed[0].format)
        except ServerError as error:
            if getattr(error, "status", None) is None and not await self.alive():
                raise ServerLost(error.got) from error
            raise CaptureError(got=error.got, expected=error.expected, likely=error.likely, next=error.next) from error
        finally:
            self.flow.answered(n)
            if path is None:
                self.flow.freed(n)
        return path

    def free(self, path: Path, tokens: int) -> None:
        """Remove a dump of so many tokens."""
        free(path)
        self.flow.freed(tokens)

    async def alive(self) -> bool:
        """Say whether the server still answers; one of ours whose process has ended does not."""
        with contextlib.suppress(ServerError, TimeoutError):
            async with asyncio.timeout(ALIVE_S):
                await self.client.arequest("GET", "/model_info")
            return self.server.running()
        return False


class Others:
    """Requests that a server has seen and that were not this worker's, over its restarts."""

    def __init__(self, server):
        self.server, self.earlier = server, 0
        self.begin()

    def begin(self) -> None:
        """Count from here on: the server is new, or was just attached to."""
        self._before = self._counts()

    def seen(self, ours: int) -> int:
        """Return how many, when `ours` of those with hsnb's prefix were this worker's. Captured ones are another client's."""
        other, captured = self._counts()
        return self.earlier + max(0, other - self._before[0]) + max(0, captured - self._before[1] - ours)

    def settle(self, ours: int) -> None:
        """Keep the sum before a restart begins the counts anew."""
        self.earlier = self.seen(ours)

    def _counts(self) -> tuple[int, int]:
        """Return (requests without hsnb's prefix, captured ones) as rank 0 has counted them: every rank counts all."""
        with contextlib.suppress(OSError, ValueError):
            if armed := read_armed(self.server.spool):
                return armed[0].counts.get("other", 0), armed[0].counts.get("captured", 0)
        return getattr(self, "_before", (0, 0))
