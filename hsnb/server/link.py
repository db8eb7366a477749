"""What the first node of a server over several does about the others: start their parts, take what their ranks say, notice their loss.

A part is asked all the time, by a thread each. What it hands over goes into the first node's spool, where every check of the
ranks looks: that all are armed, and alike, and that their states are equal in the probe. A part that has ended, or does not
answer, ends the whole server: its ranks wait for each other, and would wait for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hsnb.errors import HsnbError, ServerError
from hsnb.server.far import write_far
from hsnb.server.part import ARMED, DIGEST

log = logging.getLogger(__name__)
ARMED_S = 30.0  # for what was armed to be handed over, once the server is ready: its ranks have all written it by then
BLAME_S = 3.0  # for a part's own reason to be heard, when the first node's launcher ended first


class PartLike(Protocol):
    """A further node's part as the first node reaches it; every call may raise when its node is gone."""

    def start(self, deployment: dict, node_rank: int, address: str) -> dict[str, Any]: ...
    def news(self, heard: int) -> dict[str, Any]: ...
    def stop(self) -> None: ...


@dataclass
class Link:
    """The further nodes of one server: `parts` by (address, part), in the order of their node ranks; `meet` is HOST:PORT on this node."""

    meet: str
    parts: Sequence[tuple[str, PartLike]]
    lost: str = ""  # why the server is lost

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ranks: set[int] = set()

    def begin(self, deployment: dict, spool: Path, weights: str, on_loss: Callable[[], None]) -> None:
        """Start all parts and ask them from now on; `on_loss` is called once a part is gone.

        `weights`: what this node's checkpoint is known by. Raises ServerError for a part that does not start, or serves another one.
        """
        far: dict[int, tuple[str, int]] = {}
        for node_rank, (address, part) in enumerate(self.parts, 1):
            try:
                about = part.start(deployment, node_rank, self.meet)
            except HsnbError as error:
                error.got = f"node {address}: {error.got}"
                raise
            except Exception as error:
                raise self._gone(address, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
            if about["weights"] != weights:
                raise ServerError(
                    got=f"another checkpoint on node {address} than here",
                    expected=f"the same config.json and weight files in {deployment['model']} on every node",
                    likely="a revision that was updated on one of them, or a download that is not whole",
                    next="copy the folder from one node to the others, or put it on a file system that they share",
                )
            far |= dict.fromkeys(about["ranks"], (address, about["port"]))
        self._ranks = set(far)
        write_far(spool, far)
        for address, part in self.parts:
            self._threads.append(threading.Thread(target=self._ask, args=(address, part, spool, on_loss), daemon=True))
            self._threads[-1].start()

    def check(self) -> None:
        """Raise ServerError once a part is gone."""
        if self.lost:
            raise self._gone(*self.lost.split(": ", 1))

    def blame(self) -> None:
        """Give a part the time to say that it was the one that failed, and raise its ServerError; return when none does."""
        until = time.monotonic() + BLAME_S
        while not self.lost and time.monotonic() < until:
            time.sleep(0.05)
        self.check()

    def wait_armed(self, spool: Path) -> None:
        """Wait until every far rank's account is here; what is missing in the end is named by the check of the ranks."""
        until = time.monotonic() + ARMED_S
        while not all((spool / f"armed-{r}.json").exists() for r in self._ranks) and time.monotonic() < until:
            self.check()
            time.sleep(0.05)

    def leave(self) -> None:
        """Take nothing for a loss any more: the server is about to be stopped."""
        self._closing.set()

    def end(self) -> None:
        """Stop asking, and end every part that can still be told."""
        self.leave()
        for address, part in self.parts:
            try:
                part.stop()
            except Exception as error:
                log.info(f"node {address} could not be told to stop ({type(error).__name__}): its part ends with what started it")
        for thread in self._threads:
            thread.join(timeout=5)

    def _ask(self, address: str, part: PartLike, spool: Path, on_loss: Callable[[], None]) -> None:
        waiting: dict[str, bytes] = {}
        heard = 0
        while not self._closing.is_set():
            try:
                news = part.news(heard)
                heard, gone = news["number"], news["gone"]
                waiting |= news["files"]
                self._take(spool, waiting)
            except Exception as error:
                gone = f"what it says could not be had ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            if gone and not self._closing.is_set():
                self.lost = self.lost or f"{address}: {gone}"
                log.warning(f"node {address}: {gone}; the server ends on every node")
                on_loss()
                return

    def _take(self, spool: Path, waiting: dict[str, bytes]) -> None:
        """Put files where the first node's own ranks put theirs, whole or not at all; what this node's disk does not take stays waiting."""
        for name in list(waiting):
            if not (ARMED.fullmatch(name) and int(name[6:-5]) in self._ranks) and not DIGEST.fullmatch(name):
                raise ValueError(f"a file {name!r} of a rank that is not its own")
            temporary = spool / f".{name}.{os.getpid()}.new"  # not .tmp: rank 0 removes those when it arms
            try:
                temporary.write_bytes(waiting[name])
                os.replace(temporary, spool / name)
            except OSError as error:  # a full spool is no loss of a node
                log.warning(f"{spool / name} could not be written ({error.strerror}): it is tried again")
                temporary.unlink(missing_ok=True)
                return
            del waiting[name]

    @staticmethod
    def _gone(address: str, why: str) -> ServerError:
        return ServerError(
            got=f"a server over several nodes has lost node {address}: {why}",
            expected="every node of it, as long as it runs",
            likely="the node or its launcher ended; the ranks of the others would wait for it for ever",
            next="the run deals its shard again, on a server that is started anew",
        )
