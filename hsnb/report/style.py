"""What all pages share: one style sheet for light, dark, paper and phones, and small pieces of HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from hsnb.report.outcome import PARTS, parts_of

# Four statuses by the colours of Okabe and Ito, each with a mark and a word beside it. Contrast is at least 4.5 on either ground.
CSS = """
:root { color-scheme: light dark; --hsnb-bad: #a8324a; --hsnb-good: #00694a; --hsnb-odd: #8a5a00; --hsnb-line: #8888; --hsnb-soft: #8882;
  --hsnb-faint: #5c5c5c; }
@media screen and (prefers-color-scheme: dark) { :root { --hsnb-bad: #ff9aa8; --hsnb-good: #5fd3a8; --hsnb-odd: #f0c060; --hsnb-faint: #a6a6a6; } }
.hsnb-error { border: 1px solid var(--hsnb-bad); border-left-width: .5rem; padding: .6rem 1rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
.hsnb-error b.hsnb-head { color: var(--hsnb-bad); }
.hsnb-error a { color: inherit; text-decoration: underline; }
.hsnb-error dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .5rem 0 0; }
.hsnb-error dt { font-weight: bold; } .hsnb-error dd { margin: 0; white-space: pre-wrap; }
.hsnb-error pre { white-space: pre-wrap; overflow-wrap: anywhere; color: inherit; background: none; margin: .4rem 0 0; }
@media (max-width: 40rem) { .hsnb-error dl { grid-template-columns: 1fr; gap: 0; } .hsnb-error dd { margin-bottom: .4rem; } }
"""

PAGE_CSS = """
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 72rem; margin: 1.5rem auto; padding: 0 1rem; background: Canvas; color: CanvasText; overflow-wrap: anywhere; }
h1 { line-height: 1.2; } h2 { margin: 2rem 0 .5rem; } a { color: LinkText; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--hsnb-line); overflow-wrap: break-word; }
th.n { text-align: right; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
img { max-width: 100%; height: auto; background: #fff; }
small, .note { color: var(--hsnb-faint); } small { overflow-wrap: anywhere; }
.failed, .FAIL { color: var(--hsnb-bad); font-weight: bold; } .passed, .PASS { color: var(--hsnb-good); }
.failed, .passed, .unfinished { white-space: nowrap; }
.unfinished, .look { color: var(--hsnb-odd); font-weight: bold; }
.scroll { overflow-x: auto; }
@media (max-width: 40rem) {
  table.cards thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table.cards, table.cards tbody, table.cards tr, table.cards td { display: block; }
  table.cards tr { border: 1px solid var(--hsnb-line); padding: .5rem .8rem; margin: 0 0 .8rem; }
  table.cards td { border: 0; padding: .15rem 0; text-align: left; white-space: normal; overflow-wrap: anywhere; }
  table.cards td[data-label]:not(:empty)::before { content: attr(data-label) ": "; font-weight: bold; }
}
"""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style></head><body>
{body}
</body></html>
"""


def page(title: str, body: str, css: str = "") -> str:
    """Return a whole page that loads nothing; `body` is HTML, `title` plain text."""
    return PAGE.format(title=escape(title), css=CSS + PAGE_CSS + css, body=body)


def error_block(error: str, head: str) -> str:
    """Return an error with its four parts apart, or whole where it has none; `head` is HTML."""
    parts = parts_of(error)
    if parts is None:
        said = f"<pre>{escape(error[:4000])}</pre>"
    else:
        lines = "".join(f"<dt>{label}</dt><dd>{escape(parts[key][:4000])}</dd>" for key, label in PARTS.items())
        said = f"<dl><dt>Error</dt><dd>{escape(parts['name'])}</dd>{lines}</dl>"
    return f'<div class="hsnb-error" role="alert"><b class="hsnb-head">{head}</b>{said}</div>'


def table(rows: list[dict[str, Any]], numbers: tuple[str, ...] = (), kind: str = "cards") -> str:
    """Return rows of {heading: plain text} as a table that a phone shows as cards ("cards") or scrolls ("wide"); "" for none."""
    if not rows:
        return ""
    heads = list(rows[0])
    head = "".join(f'<th scope="col"{" class=n" * (h in numbers)}>{escape(h)}</th>' for h in heads)
    cells = ("".join(f'<td data-label="{escape(h)}"{" class=n" * (h in numbers)}>{_cell(row[h])}</td>' for h in heads) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in cells)
    return f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class Html(str):
    """A cell that is HTML already."""


def _cell(value: Any) -> str:
    return value if isinstance(value, Html) else escape(str(value))
