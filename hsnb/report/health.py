"""The health page of a run: findings on top, figures with their text, samples with the trained tokens marked."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from hsnb.health.result import Health
from hsnb.paths import replace_text
from hsnb.report.outcome import MARKS
from hsnb.report.style import Html, page, table
from hsnb.show import number

CSS = "ins { text-decoration: underline; text-decoration-thickness: 2px; background: var(--hsnb-soft); }"


def write_health(health: Health, folder: Path) -> Path:
    """Write health.html and health.json into a run's folder and return the page."""
    health.save(folder)
    return replace_text(folder / "health.html", health_page(health))


def health_page(health: Health) -> str:
    """Return the whole page; its figures are the ones that notebooks and widgets draw."""
    from hsnb import figures

    mark = {"FAIL": MARKS["failed"], "LOOK": "!", "PASS": MARKS["passed"]}[health.verdict]
    body = ["<h1>Health of a data set</h1>", f'<p><a href="index.html">the run</a></p><p>{escape(health.about)}</p>']
    body.append(f'<p class="{"look" if health.verdict == "LOOK" else health.verdict}"><b>{mark} {health.verdict}</b></p>')
    rows = [
        {
            "result": Html(f'<span class="{f.level}">{MARKS["failed"] if f.level == "FAIL" else "!"} {f.level}</span>'),
            "finding": f.what,
            "where": Html("<br>".join(map(escape, f.where))),
        }
        for f in health.findings
    ]
    body.append(
        table(rows) or "<p>Nothing found: no NaN, zero, constant or repeated row, no states twice, no norm or mask out of line.</p>"
    )
    if health.looked:
        body += ["<h2>Norms</h2>", figures.image(health.plot().figure), _frame(health.norm_frame())]
        body += [
            "<h2>Largest values</h2>",
            "<p>Massive activations sit at few tokens and dimensions, in every model; a new place is worth a look.</p>",
        ]
        body.append(_frame(health.massive_frame()))
    if len(health.lengths):
        body += ["<h2>Lengths</h2>", figures.image(health.plot_lengths().figure)]
        share = health.trained.sum() / max(1, health.lengths.sum())
        body += [
            "<h2>Loss mask</h2>",
            f"<p>{share:.1%} of {health.lengths.sum():,} tokens are trained.</p>",
            figures.image(health.plot_mask().figure),
        ]
    if health.texts:
        note = f" {escape(health.note)}." if health.note else ""
        body += [
            "<h2>Samples</h2>",
            f"<p>Trained tokens are underlined and in ⟦brackets⟧.{note}</p>",
            *(text.html() for text in health.texts),
        ]
    return page("Health of a data set", "\n".join(body), CSS)


def _frame(frame: Any) -> str:
    """Return a pandas table as one for phones too."""
    rows = [{key: number(v) if isinstance(v, float) else str(v) for key, v in row.items()} for row in frame.to_dict("records")]
    return table(rows, numbers=tuple(k for k in frame.columns if frame[k].dtype.kind in "fi"))
