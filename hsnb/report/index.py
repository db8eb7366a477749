"""The index over a run: failed notebooks first with the error's four parts, shards as a grid, and summary.json with the same."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from hsnb.demo import exclusive
from hsnb.errors import ParamsError
from hsnb.paths import project_root, replace_text, write_json
from hsnb.report.facts import asked_shards, read_json, shards_of, verdict_of
from hsnb.report.outcome import MARKS, STATUSES, Outcome, duration, title_of
from hsnb.report.page import write_html
from hsnb.report.style import Html, error_block, page, table

FORMAT = 2  # of summary.json: 2 has num_shards in a row
SUMMARY = "summary.json"
GRID_CSS = """
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); gap: .35rem; padding: 0; list-style: none; }
.grid li { border: 1px solid var(--hsnb-line); padding: .25rem .4rem; font-size: .85rem; line-height: 1.3; }
.grid li.failed, .grid li.passed, .grid li.unfinished { white-space: normal; }
.grid li.failed { border: 2px solid var(--hsnb-bad); } .grid li.unfinished { border-style: dashed; border-color: var(--hsnb-odd); }
.grid li.notrun { border-style: dotted; } .grid a { color: inherit; }
"""


@dataclass(frozen=True)
class RunReport:
    """The index of a run. `rows`: one a notebook, failed first, then unfinished, not run and passed; `shards`: one a shard."""

    index: Path
    summary: Path
    rows: tuple[dict[str, Any], ...]
    shards: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json. A report about failed notebooks is no failure itself."""
        return {"index": str(self.index), "summary": str(self.summary), "notebooks": list(self.rows), "shards": list(self.shards)}


def report_run(run: str, *, health: bool = False, samples: int = 256) -> RunReport:
    """Render every notebook of outputs/{run} again and write its index and summary. Raises ParamsError for a run that is not there.

    `health`: also look at the run's data set, at the states of `samples` of its samples (0: all), and write health.html.
    """
    import nbformat

    outputs = project_root() / "outputs"
    # Hidden files are no run: a refused `hsnb prepare` leaves its lock.
    runs = (
        sorted(p.name for p in outputs.iterdir() if p.is_dir() and any(f.name[0] != "." for f in p.iterdir())) if outputs.is_dir() else []
    )
    if run not in runs:
        raise ParamsError(
            got=f"no run {run!r} in {outputs}",
            expected=f"one of: {', '.join(runs) or 'none yet'}",
            likely="a typo, or nothing was run yet under this name",
            next=f"hsnb report {runs[0]}" if runs else "hsnb run 01_probe",
        )
    for file in sorted((outputs / run).glob("*.ipynb")):
        write_html(nbformat.read(file, as_version=4), file.with_suffix(".html"))
    if health:
        from hsnb.health import examine
        from hsnb.report.health import write_health

        write_health(examine(outputs / run / "data", samples=samples), outputs / run)
    return update_index(outputs / run)


def is_run(folder: Path) -> bool:
    """Say whether `folder` is outputs/{run} of a project: an index is written nowhere else."""
    return folder.parent.name == "outputs" and (folder.parents[1] / "notebooks").is_dir()


def update_index(folder: Path) -> RunReport:
    """Write index.html and summary.json of a run's folder from what lies there.

    A notebook that has not changed since the last summary is not read again, so that the thousandth shard costs no more than
    the first. Runs that end at the same time write one after the other, and the last one sees all.
    """
    with exclusive(folder / "index"):
        before = read_json(folder / SUMMARY) or {}
        known = {row["notebook"]: row for row in before.get("notebooks", [])} if before.get("format") == FORMAT else {}
        rows = [_row(file, known.get(file.name)) for file in sorted(folder.glob("*.ipynb"))]
        for row in rows:
            row["verdict"] = verdict_of(row, folder)
        rows.sort(key=lambda row: (STATUSES.index(row["status"]), row["notebook"]))
        shards = shards_of(rows, folder)
        made = datetime.now(UTC).isoformat(timespec="seconds")
        health = read_json(folder / "health.json")
        tree = {
            "format": FORMAT,
            "run": folder.name,
            "made": made,
            "ok": all(row["status"] == "passed" for row in rows) and not any(s["status"] == "failed" for s in shards),
            "counts": dict(Counter(row["status"] for row in rows)),
            "seconds": round(sum(row["seconds"] or 0.0 for row in rows), 1),
            "extracted": {key: sum(s[key] or 0 for s in shards) for key in ("samples", "tokens", "bytes")} if shards else None,
            "health": health and {"ok": health["ok"], "findings": [f["what"] for f in health["findings"]]},
            "notebooks": rows,
            "shards": shards,
        }
        write_json(folder / SUMMARY, tree)
        replace_text(folder / "index.html", _index(tree))
    return RunReport(folder / "index.html", folder / SUMMARY, tuple(rows), tuple(shards))


def _row(file: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    """Return the row of one notebook: the last summary's when the file is the same one."""
    import nbformat

    stat = file.stat()
    if known and known.get("file") == [stat.st_mtime_ns, stat.st_size]:
        return known | {"html": _page_of(file)}
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # papermill is writing it, or was killed while it was
        tree = {}
    if isinstance(tree, dict) and "cells" in tree:
        nb = nbformat.v4.rwbase.rejoin_lines(nbformat.from_dict(tree))  # as nbformat.read, without its validation: a second for 100
        title, outcome = title_of(nb) or file.stem, Outcome.of(nb).as_dict()
        outcome["num_shards"] = asked_shards(nb, outcome["parameters"])
    else:
        title, outcome = file.stem, Outcome("unfinished").as_dict() | {"num_shards": None}
    return {"notebook": file.name, "html": _page_of(file), "title": title, **outcome, "file": [stat.st_mtime_ns, stat.st_size]}


def _page_of(file: Path) -> str:
    """Return the name of a notebook's report, "" where none was written (a killed run's)."""
    return file.with_suffix(".html").name if file.with_suffix(".html").is_file() else ""


def _index(tree: dict[str, Any]) -> str:
    """Return the page: errors, shards, notebooks, health."""
    rows, shards = tree["notebooks"], tree["shards"]
    counts = [f"{n} {status}" for status in STATUSES if (n := tree["counts"].get(status, 0))]
    body = [f"<h1>Run {escape(tree['run'])}</h1>"]
    noun = "notebook" if len(rows) == 1 else "notebooks"
    body.append(f"<p>{len(rows)} {noun}: {', '.join(counts)}.</p>" if rows else "<p>No executed notebooks yet.</p>")
    for row in rows:
        if row["status"] == "failed":
            body.append(error_block(row["error"], f"{MARKS['failed']} {_link(row)} failed"))
    named = {row["html"] for row in rows if row["html"]}
    for shard in shards:
        if shard["status"] == "failed" and shard["html"] not in named:
            body.append(error_block(shard["error"], f"{MARKS['failed']} shard {shard['shard']}: {shard['owed']:,} samples owed"))
    if shards:
        body.append(_grid(shards, tree["extracted"]))
    if rows:
        body += ["<h2>Notebooks</h2>", table([_line(row) for row in rows], numbers=("duration",))]
    if tree["health"] is not None:
        said = "; ".join(tree["health"]["findings"]) or "nothing found"
        body += ["<h2>Health of the data set</h2>", f'<p><a href="health.html">{escape(said)}</a></p>']
    body.append(f'<p class="note">Written {tree["made"][:19].replace("T", " ")} UTC. The same as plain values: {SUMMARY}</p>')
    return page(f"Run {tree['run']}", "\n".join(body), GRID_CSS)


def _grid(shards: list[dict[str, Any]], sums: dict[str, int]) -> str:
    counts = Counter(s["status"] for s in shards)
    legend = ", ".join(f"{MARKS[status]} {counts[status]} {status}" for status in STATUSES if counts[status])
    cells = []
    for shard in shards:
        words = f"{MARKS[shard['status']]} {shard['status']}"
        number = f"<b>{shard['shard']}</b>"
        number = f'<a href="{escape(shard["html"])}">{number}</a>' if shard["html"] else number
        detail = f"<br>{shard['samples']:,} samples" if shard["samples"] and shard["status"] == "passed" else ""
        detail = f"<br>{shard['owed']:,} owed" if shard["owed"] else detail
        kind = shard["status"].replace(" ", "")
        cells.append(f'<li class="{kind}">{number}<br>{words}{detail}</li>')
    total = f"<p>{sums['samples']:,} samples, {sums['tokens']:,} tokens, {sums['bytes'] / 1e9:,.2f} GB in the shards that were run.</p>"
    return f'<h2>Shards</h2><p>{legend}</p><ul class="grid">{"".join(cells)}</ul>{total}'


def _link(row: dict[str, Any]) -> str:
    name = escape(row["notebook"].removesuffix(".ipynb"))
    return f'<a href="{escape(row["html"])}">{name}</a>' if row["html"] else name


def _line(row: dict[str, Any]) -> dict[str, Any]:
    given = ", ".join(f"{k}={v!r}" for k, v in (row["parameters"] or {}).items()) or "defaults"
    status = f'<span class="{escape(row["status"])}">{MARKS[row["status"]]} {escape(row["status"])}</span>'
    return {
        "notebook": Html(f"{_link(row)}<br><small>{escape(row['title'])}</small>"),
        "status": Html(status),
        "verdict": row["verdict"] or "–",
        "parameters given": given,
        "started (UTC)": row["started"][:19].replace("T", " ") or "–",
        "duration": duration(row["seconds"]) or "–",
    }
