"""The extraction monitor: a run that another notebook or process writes, followed by its status files and ledgers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hsnb import figures
from hsnb.ledger import FOLDER
from hsnb.paths import default_spool, run_dir
from hsnb.tally import tally
from hsnb.widgets.explorer import Explorer, table_html

SHARD = re.compile(r"shard-(\d+)-of-(\d+)")
FOLLOWED = ("running", "paused")  # states of a run that may still change
MOST = 500  # points of the figure
NOTHING = "–"  # in a cell that has nothing to say


class Seen:
    """What was seen of a run so far: seconds and tokens, for the rate and the figure."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.points: list[tuple[float, int]] = []

    def add(self, tokens: int) -> float:
        """Note the tokens now; return tokens/s over the last minute that was looked at, 0 while there is no more than one look."""
        now = time.monotonic() - self.since
        self.points = [*self.points[-MOST:], (now, tokens)]
        first = next(p for p in self.points if p[0] >= now - 60 or p is self.points[-1])
        return (tokens - first[1]) / (now - first[0]) if now > first[0] else 0.0


def monitor(run: str | Path, seconds: float = 5.0, quiet: float = 600.0) -> Explorer:
    """Follow the extraction of outputs/{run} (or of a data set's folder); drawn again every `seconds`.

    It ends when nothing has run for `quiet` seconds: the next shard's run begins a while after the last one's end.
    """
    data = Path(run) if isinstance(run, Path) or "/" in str(run) else run_dir(run, make=False) / "data"
    data = data / "data" if (data / "data").is_dir() else data
    seen, last = Seen(), {"ran": time.monotonic()}

    def draw() -> str:
        shards = statuses(data)
        now = tally(data)
        rate = seen.add(now.tokens)
        if any(s["state"] in FOLLOWED for s in shards) or not shards:
            last["ran"] = time.monotonic()
        head = f"<p><b>{now.samples:,} samples, {now.tokens:,} tokens, {now.bytes / 1e9:,.2f} GB published</b>, "
        pace = f"; {rate:,.0f} tokens/s in the last minute" if len(seen.points) > 1 else ""
        head += f"{now.owed:,} owed{pace}; {escape(str(data.resolve()))}</p>"
        if not shards:
            return head + "<p>No run has written its status here yet.</p>"
        head += table_html(frame(shards))
        if len(seen.points) < 2:  # one look is no curve
            return head
        return head + figures.image(figures.published([p[0] for p in seen.points], [p[1] for p in seen.points]).figure)

    return Explorer({}, draw, again="look again").follow(seconds, until=lambda: time.monotonic() - last["ran"] > quiet)


def statuses(data: Path) -> list[dict[str, Any]]:
    """Return what each shard's run last wrote of itself (once a minute), by name; half-written ones are left out."""
    found = []
    for path in sorted((data / FOLDER).glob("*.status.json")):
        try:
            found.append({"name": path.name.removesuffix(".status.json"), **json.loads(path.read_text())})
        except (OSError, ValueError):
            continue
    return found


def frame(shards: list[dict[str, Any]], spool_bytes: Callable[[str], int | None] | None = None):
    """Return one row a shard: state, published, owed, rate, time left, spool and what went wrong."""
    import pandas as pd

    size = spool_bytes or spool_of
    rows = []
    for s in shards:
        runs, held = s["state"] in FOLLOWED, [size(server["url"]) for server in s["servers"]]
        wrong = [s["reason"], s["disk"], *(server["error"] for server in s["servers"])]
        rows.append(
            {
                "shard": f"{int(m[1])} of {int(m[2])}" if (m := SHARD.fullmatch(s["name"])) else s["name"],
                "state": s["state"],
                "published": f"{s['published']:,} of {s['samples']:,}",
                "owed": s["owed"],
                "tokens/s": s["tokens_per_s"],
                "left": NOTHING if s["eta_s"] is None or not runs else f"{s['eta_s'] // 3600}:{s['eta_s'] // 60 % 60:02d} h",
                "in the spool": NOTHING if not runs else "elsewhere" if None in held else f"{sum(held) / 1e6:,.1f} MB",
                "told": "; ".join(w for w in wrong if w) or NOTHING,
                "written": s["updated"],
            }
        )
    return pd.DataFrame(rows)


def spool_of(url: str) -> int | None:
    """Return the bytes in the default spool of the server at `url`, None when it is not on this machine."""
    folder = default_spool(urlsplit(url).port or 0)
    if not folder.is_dir():
        return None
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
