"""What a run's folder holds besides notebooks: the verdicts its results wrote, and the state of every shard."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

SHARD = re.compile(r".*-shard-(\d+)(\.again)?")
RESULTS = {"01_probe": "probe.json", "02_divergence": "divergence.json", "04_handoff": "handoff.json"}


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

    The status is the notebook's; of a shard that was done otherwise (hsnb redo, a worker) it is what its JSON says.
    """
    by_shard = {int(m[1]): row for row in rows if (m := SHARD.fullmatch(row["notebook"].removesuffix(".ipynb"))) and not m[2]}
    facts = {
        int(m[1]): tree for p in folder.glob("shard-*.json") if (m := re.fullmatch(r"shard-(\d+)\.json", p.name)) and (tree := read_json(p))
    }
    if not by_shard and not facts:
        return []
    asked = [(row["parameters"] or {}).get("num_shards") for row in by_shard.values()]
    asked += [tree.get("num_shards") for tree in facts.values()]
    default = 16 if by_shard and not all(asked[: len(by_shard)]) and not facts else 0
    count = max([n for n in asked if isinstance(n, int)] + [default, *(k + 1 for k in {*by_shard, *facts})])
    shards = []
    for k in range(count):
        row, tree = by_shard.get(k), facts.get(k) or {}
        status = row["status"] if row else ("passed" if tree.get("ok") else "failed") if tree else "not run"
        owed = tree.get("failed") or {}
        error = row["error"] if row else next(iter(owed.values()), "")
        numbers = {key: tree.get(key) for key in ("samples", "tokens", "bytes", "tokens_per_s")}
        shards.append({"shard": k, "status": status, "html": row["html"] if row else "", "error": error, "owed": len(owed), **numbers})
    return shards


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
