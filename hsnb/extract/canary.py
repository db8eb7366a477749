"""One fixed prompt, asked now and then and compared with the first time: a restart with other flags, a failing device.

The prompt is the beginning of the data set's first sample, and the first answer is kept beside the ledgers, so that it speaks
for the whole data set: every server of every run is compared with the one that began it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import math
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from hsnb.checks import Check
from hsnb.dumps import Dump, open_dump
from hsnb.errors import CaptureError, DumpError
from hsnb.extract.asking import Requests
from hsnb.extract.faults import CanaryOut
from hsnb.paths import write_json
from hsnb.probe.bars import compare, middle, relative_l2

log = logging.getLogger(__name__)
TOKENS = 32
TRIES = 3  # it is out only when it is out as often in a row
BASELINE = 4  # answers at the same time that the first noise is measured on
NOISE = "canary.json"


@dataclass(frozen=True)
class Canary:
    """The first answer, where it is kept, and this engine's own noise for each column (relative L2, median over tokens)."""

    folder: Path
    noise: dict[str, float]
    dtype: str

    @staticmethod
    def known(folder: Path) -> bool:
        return (folder / NOISE).is_file()

    @classmethod
    def load(cls, folder: Path, dtype: str) -> Canary:
        return cls(folder, json.loads((folder / NOISE).read_text()), dtype)

    @classmethod
    def keep(cls, folder: Path, dumps: list[Dump], dtype: str) -> Canary:
        """Keep the first of `dumps` (one alone, the others asked together) as the answer to compare with.

        Several shards may begin at once: the first one's stays.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".canary.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not cls.known(folder):
                target = folder / f"canary{dumps[0].path.suffix}"
                (shutil.copytree if dumps[0].path.is_dir() else shutil.copyfile)(dumps[0].path, target)
                write_json(folder / NOISE, noise_of(dumps))
            return cls.load(folder, dtype)

    def check(self, dump: Dump) -> Check:
        """Compare an answer with the first one: the column that comes off worst."""
        first = open_dump(next(p for p in self.folder.glob("canary*") if p.suffix != ".json"))
        if first.num_tokens != dump.num_tokens or first.columns != dump.columns:
            what = f"{dump.num_tokens} tokens, {dump.columns} columns"
            return Check("canary", what, f"{first.num_tokens} tokens, {first.columns} columns", False)
        judged = []
        for name, k in columns(first).items():
            a, b = first.column(k), dump.column(k)
            error = middle(relative_l2(b, a))
            others = (middle(relative_l2(first.column(j), a)) for j in range(first.columns) if j != k)
            distance = min((d for d in others if d), default=math.inf)  # 0: the last boundary and the final may be the same state
            judged.append((compare("canary", error, distance, self.noise[name], self.dtype, says=f" ({name})"), error))
        return min(judged, key=lambda pair: (pair[0].ok, pair[0].not_proved, -pair[1]))[0]


def columns(dump: Dump) -> dict[str, int]:
    """Return {name: index} of a dump's columns."""
    return {**{f"B_{b}": k for k, b in enumerate(dump.boundaries)}, "final": dump.columns - 1}


def noise_of(dumps: list[Dump]) -> dict[str, float]:
    """Return the largest difference between any two answers to the same prompt, for each column."""
    pairs = list(itertools.combinations(dumps, 2))
    return {n: max((middle(relative_l2(a.column(k), b.column(k))) for a, b in pairs), default=0.0) for n, k in columns(dumps[0]).items()}


async def ask(requests: Requests, folder: Path, ids: list[int], prefix: str) -> list[Check]:
    """Ask the canary `ids` until it agrees with the first answer, and return the checks made; the data set's first is kept.

    Raises CanaryOut when it is out `TRIES` times in a row. A check that noise blurs counts as agreeing, and says so.
    """
    dtype = requests.server.armed[0].dtype
    if not Canary.known(folder):
        paths = [await _sing(requests, ids, prefix)]
        paths += await asyncio.gather(*(_sing(requests, ids, prefix) for _ in range(BASELINE)))
        canary = await asyncio.to_thread(lambda: Canary.keep(folder, [open_dump(p) for p in paths], dtype))
        for path in paths:
            requests.free(path, len(ids))
    else:
        canary = await asyncio.to_thread(Canary.load, folder, dtype)
    checks: list[Check] = []
    while len(checks) < TRIES:
        path = await _sing(requests, ids, prefix)
        try:
            checks.append(await asyncio.to_thread(lambda p=path: canary.check(open_dump(p))))
        finally:
            requests.free(path, len(ids))
        if checks[-1].ok or checks[-1].not_proved:
            return checks
        log.warning(f"{requests.server.url}: the canary is out ({len(checks)} of {TRIES}): {checks[-1].value}, {checks[-1].threshold}")
    raise CanaryOut(f"{checks[-1].value}, expected {checks[-1].threshold}, {TRIES} times in a row")


async def _sing(requests: Requests, ids: list[int], prefix: str) -> Path:
    for _ in range(TRIES - 1):
        with contextlib.suppress(DumpError, CaptureError):
            return await requests.ask(ids, f"{prefix}canary-{uuid.uuid4().hex}")
    return await requests.ask(ids, f"{prefix}canary-{uuid.uuid4().hex}")
