"""The divergence explorer: a comparison of two parties, live or as a run saved it; pair, metric, boundary, position."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hsnb import figures
from hsnb.divergence import plots
from hsnb.errors import DumpError
from hsnb.paths import project_root
from hsnb.widgets.explorer import Explorer, choice

VIEWS = ("map", "one boundary", "numerics and shift", "positions")


def divergence(source: Any) -> Explorer:
    """Explore a Comparison, or the divergence.json of a run (its name, its folder or the file). Raises DumpError without one."""
    comparison, pairs = _saved(source) if isinstance(source, str | Path) else (source, {f"{source.a} on {source.b}": _live(source)})
    metrics = list(dict.fromkeys(metric for maps in pairs.values() for metric in maps["matrices"]))
    rows = list(dict.fromkeys(row for maps in pairs.values() for row in maps["rows"]))

    def draw(pair: str, metric: str, boundary: str, view: str) -> str:
        maps = pairs[pair]
        if view in ("map", "one boundary") and metric not in maps["matrices"]:
            return f"<p>{metric} was not kept for this pair; {', '.join(maps['matrices'])} was.</p>"
        if view == "map":
            ax = plots.draw_map(maps["matrices"][metric], maps["rows"], maps["columns"], maps["a"], maps["b"], metric)
        elif view == "one boundary":
            if boundary not in maps["rows"]:
                return f"<p>{boundary} is not in this pair; it has {', '.join(maps['rows'])}.</p>"
            values = np.asarray(maps["matrices"][metric])[maps["rows"].index(boundary)]
            ax = figures.against_all(values, maps["columns"], f"{maps['a']}: {boundary}", maps["b"], metric)
        elif view == "positions":
            ax = plots.positions(comparison)
        else:
            ax = plots.noise_and_shift(comparison)
        return figures.image(ax.figure)

    controls = {
        "pair": choice("pair", pairs),
        "metric": choice("metric", metrics),
        "boundary": choice("boundary", rows),
        "view": choice("view", VIEWS),
    }
    return Explorer(controls, draw)


def _live(comparison: Any) -> dict[str, Any]:
    from hsnb.divergence.measure import METRICS

    found = comparison.found
    matrices = {name: found.metric(name).numpy() for name in METRICS}
    return {"a": found.a, "b": found.b, "rows": list(found.rows), "columns": list(found.columns), "matrices": matrices}


def _saved(source: str | Path) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return (what the figures need of a comparison, {pair: its map}) of a saved record."""
    path = Path(source)
    if not path.exists() and path.name == str(source):
        path = project_root() / "outputs" / path
    path = path / "divergence.json" if path.is_dir() else path
    try:
        record = json.loads(path.read_text())
        c = record["comparison"]
    except (OSError, ValueError, KeyError) as error:
        raise DumpError(
            got=f"{path}: {error}",
            expected="a comparison that 02_divergence saved",
            likely="another run's folder, or the notebook did not get to its end",
            next="hsnb run 02_divergence",
        ) from error
    comparison = SimpleNamespace(
        a=c["a"], b=c["b"], dtype=c["dtype"], tokens=c["tokens"], boundaries=[SimpleNamespace(**b) for b in c["boundaries"]],
        found=SimpleNamespace(tokens=sum(t["position"] > 0 for t in c["tokens"])),
    )  # fmt: skip
    pairs = {"through hsnb": {**c["map"], "a": c["a"], "b": c["b"]}}
    if own := record.get("own_map"):
        pairs["each by its own setting"] = own  # short: a list cuts long words, and the axes name the engines
    for maps in pairs.values():
        maps["matrices"] = {"relative L2": np.asarray(maps["relative_l2"], dtype=float)}
    return comparison, pairs
