"""What a run's folder holds besides notebooks: the verdicts its results wrote, and the state of every shard."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from hsnb.errors import ParamsError
from hsnb.ledger import FOLDER
from hsnb.notebook import parameters_of_cell

SHARD = re.compile(r".*-shard-(\d+)(\.again)?")
WRITER = re.compile(r"shard-\d+-of-(\d+)\.(sqlite|parquet|status\.json)")  # what a shard's ledger and status are called
RESULTS = {"00_server": "server.json", "01_probe": "probe.json", "02_divergence": "divergence.json", "04_handoff": "handoff.json"}


def verdict_of(row: dict[str, Any], folder: Path) -> str:
    """Return the verdict that the notebook of an index's row reached, "" when it reached none.

    A result older than the notebook's start is an earlier run's and says nothing of this one.
    """
    stem = row["notebook"].removesuffix(".ipynb")
    shard = SHARD.fullmatch(stem)
    name = f"shard-{shard[1]}{shard[2] or ''}.json" if shard else RESULTS.get(stem, "")
    tree = read_json(folder / name) if name else None
    if tree is None or _older(folder / name, row["started"]):
        return ""
    if shard:
        owed = len(tree.get("failed", {}))
        return f"whole: {tree['samples']:,} samples" if tree["ok"] else f"{owed:,} of {tree['samples']:,} samples owed"
    return str(tree.get("verdict") or ("PASS" if tree.get("ok") else "FAIL"))


def shards_of(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return one row a shard, 0 to n - 1: shard, status, html, error, samples, tokens, bytes, tokens_per_s; none without an extraction.

    The status is the notebook's; of a shard that was done otherwise (hsnb redo, a worker) it is what its JSON says. n is the
    largest that the run itself names (`shard_count`); where it names none, the highest shard that is there is the last one listed.
    """
    by_shard = {int(m[1]): row for row in rows if (m := SHARD.fullmatch(row["notebook"].removesuffix(".ipynb"))) and not m[2]}
    facts = {
        int(m[1]): tree for p in folder.glob("shard-*.json") if (m := re.fullmatch(r"shard-(\d+)\.json", p.name)) and (tree := read_json(p))
    }
    count = max([shard_count(by_shard.values(), facts.values(), folder), *(k + 1 for k in {*by_shard, *facts})])
    shards = []
    for k in range(count if by_shard or facts else 0):
        row, tree = by_shard.get(k), facts.get(k) or {}
        status = row["status"] if row else ("passed" if tree.get("ok") else "failed") if tree else "not run"
        owed = tree.get("failed") or {}
        error = row["error"] if row else next(iter(owed.values()), "")
        numbers = {key: tree.get(key) for key in ("samples", "tokens", "bytes", "tokens_per_s")}
        shards.append({"shard": k, "status": status, "html": row["html"] if row else "", "error": error, "owed": len(owed), **numbers})
    return shards


def shard_count(rows: Iterable[dict[str, Any]], facts: Iterable[dict[str, Any]], folder: Path) -> int:
    """Return of how many shards a run is, 0 when nothing says it: its notebooks, the shards' JSON, or its ledgers' names."""
    said = [row.get("num_shards") for row in rows] + [tree.get("num_shards") for tree in facts]
    said += [int(m[1]) for p in (folder / "data" / FOLDER).glob("shard-*") if (m := WRITER.fullmatch(p.name))]
    return max([n for n in said if type(n) is int], default=0)


def asked_shards(nb: Any, parameters: dict[str, Any] | None) -> int | None:
    """Return of how many shards a notebook's is: as it was given, else as its own parameters cell has it; None when it says neither."""
    given = (parameters or {}).get("num_shards")
    if given is None:
        with contextlib.suppress(ParamsError):
            given = parameters_of_cell(nb).get("num_shards", (None, None))[1]
    return given if type(given) is int else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, None when there is none, or half of one."""
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def _older(path: Path, started: str) -> bool:
    try:
        return path.stat().st_mtime < datetime.fromisoformat(started).timestamp()
    except ValueError:  # run by hand: no start is known
        return False
