"""One static HTML file per executed notebook, and an index over a run's: readable offline, nothing loaded, nothing run."""

from __future__ import annotations

import argparse
import base64
import copy
import html as htmllib
import mimetypes
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsnb.errors import ParamsError
from hsnb.paths import project_root

ERROR_MARKER_TAG = "papermill-error-cell-tag"  # papermill's own notes about a failure; the banner says it better
STATUSES = ("failed", "unfinished", "not run", "passed")  # in the order of the index
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# The stock template without its scripts (RequireJS, MathJax, mermaid: all from the network), with the dark theme for those who ask.
TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block jupyter_widgets %}{% endblock %}
{% block html_head_css %}
{{ resources.include_css("static/theme-dark.css") | replace('<style', '<style media="screen and (prefers-color-scheme: dark)"') }}
<style>
body { max-width: 72rem; margin: 0 auto; padding: 1rem; background: var(--jp-layout-color0); }
img, svg { max-width: 100%; height: auto; }
.jp-RenderedImage img, .jp-RenderedSVG img { background: #fff; }
.hsnb-banner { border-left: .5rem solid #c4314b; background: #fdeaed; color: #5c0a19; padding: .8rem 1rem; margin: 0 0 1rem; }
.hsnb-banner a { color: inherit; text-decoration: underline; }
.hsnb-banner pre { white-space: pre-wrap; overflow-wrap: anywhere; color: inherit; margin: .4rem 0 0; }
</style>
{% endblock %}
{%- block body_header -%}{{ super() }}{{ resources.hsnb_banner }}{%- endblock -%}
"""

LOADED = {"src", "srcset", "data", "poster", "background", "href", "xlink:href", "action", "formaction"}
EXTERNAL = re.compile(r"\s*(?:https?:|ftp:|//)", re.I)
CSS_EXTERNAL = re.compile(r"@import[^;]*(?:;|$)|url\(\s*['\"]?\s*(?:https?:|//)[^)]*\)", re.I)
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Outcome:
    """How a notebook ended: passed, failed, unfinished (running or killed) or not run."""

    status: str
    error: str = ""
    cell: str = ""  # the id of the cell that failed
    started: str = ""
    seconds: float | None = None
    parameters: dict[str, Any] | None = None

    @classmethod
    def of(cls, nb: Any) -> Outcome:
        """Read it from the outputs and papermill's metadata."""
        pm = nb.metadata.get("papermill", {})
        facts = {"started": pm.get("start_time") or "", "seconds": pm.get("duration"), "parameters": dict(pm.get("parameters", {}))}
        for cell in nb.cells:
            for output in cell.get("outputs", []):
                if output.output_type == "error" and not (output.ename == "SystemExit" and output.evalue in ("", "0")):
                    return cls("failed", error_line(output.ename, output.evalue), cell.get("id", ""), **facts)
        if error := nb.metadata.get("hsnb", {}).get("error"):  # the kernel died, or the run was interrupted
            return cls("failed", error, **facts)
        if pm.get("start_time"):
            return cls("passed" if pm.get("end_time") else "unfinished", **facts)
        return cls("passed" if any(cell.get("execution_count") for cell in nb.cells) else "not run", **facts)


def error_line(name: str, value: str) -> str:
    """Return the last line of a traceback in plain text; an HsnbError's own line has its name already."""
    value = ANSI.sub("", value or "").strip()
    return value if value.startswith(f"{name}: ") else f"{name}: {value}".rstrip(": ")


def render(notebook: Path, html: Path | None = None) -> Path:
    """Write the report of the notebook file `notebook` to `html` (next to it by default) and return its path."""
    import nbformat

    return write_html(nbformat.read(notebook, as_version=4), html or Path(notebook).with_suffix(".html"))


def write_html(nb: Any, html: Path) -> Path:
    """Write the report of a notebook in memory to `html`, in one step; images are looked for in the folder of `html`."""
    text = to_html(nb, html.parent, fallback_title=html.stem)
    part = html.with_name(f".{html.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(html)
    return html


def to_html(nb: Any, folder: Path, *, fallback_title: str = "notebook") -> str:
    """Return one page with images embedded, no scripts and nothing external that is loaded; plain links stay."""
    from nbconvert import HTMLExporter

    outcome, nb = Outcome.of(nb), copy.deepcopy(nb)
    nb.metadata.pop("widgets", None)
    nb.metadata["title"] = title_of(nb) or fallback_title
    nb.cells = [cell for cell in nb.cells if ERROR_MARKER_TAG not in cell.metadata.get("tags", [])]
    for cell in nb.cells:
        if cell.cell_type == "code":  # a widget without its kernel is an empty box
            cell.outputs = [output for output in cell.outputs if WIDGET_VIEW not in output.get("data", {})]
    exporter = HTMLExporter(raw_template=TEMPLATE, theme="light", embed_images=True, exclude_anchor_links=True)
    page, _ = exporter.from_notebook_node(nb, resources={"metadata": {"path": str(folder)}, "hsnb_banner": _banner(outcome)})
    return _offline(page, folder)


def title_of(nb: Any) -> str:
    """Return the first level-1 heading of the notebook, or ""."""
    for cell in nb.cells:
        if cell.cell_type == "markdown" and ERROR_MARKER_TAG not in cell.metadata.get("tags", []):
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return re.sub(r"[`*]", "", line[2:]).strip()
    return ""


def _banner(outcome: Outcome) -> str:
    """Return what stands above the title of a notebook that failed or did not finish."""
    if outcome.status == "unfinished":
        return '<div class="hsnb-banner" role="alert"><b>This notebook has not finished:</b> it is still running, or was killed.</div>'
    if outcome.status != "failed":
        return ""
    where = f' in <a href="#cell-id={htmllib.escape(outcome.cell)}">this cell</a>' if outcome.cell else ""
    error = htmllib.escape(outcome.error[:4000])
    return f'<div class="hsnb-banner" role="alert"><b>This notebook failed</b>{where}:<pre>{error}</pre></div>'


def _offline(page: str, folder: Path) -> str:
    """Take everything out of `page` that a browser would load or run."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(page, "html.parser")
    for tag in soup.find_all(["script", "base", "link"]):
        tag.decompose()
    for tag in soup.find_all("meta", attrs={"http-equiv": True}):
        tag.decompose()
    for style in soup.find_all("style"):
        style.string = CSS_EXTERNAL.sub("", style.string or "")
    for tag in soup.find_all(True):
        for name, value in list(tag.attrs.items()):
            if name.startswith("on"):
                del tag[name]
            elif name == "style":
                tag[name] = CSS_EXTERNAL.sub("none", str(value))
            elif name in LOADED and tag.name != "a":
                _embed(tag, name, str(value), folder)
    return str(soup)


def _embed(tag: Any, name: str, value: str, folder: Path) -> None:
    """Embed an image of `folder`; drop what is external, saying so where an image was."""
    if EXTERNAL.search(value) if name == "srcset" else EXTERNAL.match(value):
        del tag[name]
        if tag.name == "img":
            tag["alt"] = f"not embedded: {value}"
    elif tag.name == "img" and name == "src" and not value.startswith("data:") and (file := folder / value).is_file():
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        tag[name] = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


@dataclass(frozen=True)
class RunReport:
    """The index of a run, and one row per notebook: failed first, then unfinished, not run and passed."""

    index: Path
    rows: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json. A report about failed notebooks is no failure itself."""
        return {"index": str(self.index), "notebooks": list(self.rows)}


def report_run(run: str) -> RunReport:
    """Render every notebook of outputs/{run} and write outputs/{run}/index.html. Raises ParamsError for a run that is not there."""
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
    rows = []
    for file in sorted((outputs / run).glob("*.ipynb")):
        nb = nbformat.read(file, as_version=4)
        page = write_html(nb, file.with_suffix(".html"))
        rows.append({"notebook": file.name, "html": page.name, "title": title_of(nb) or file.stem, **asdict(Outcome.of(nb))})
    rows.sort(key=lambda row: (STATUSES.index(row["status"]), row["notebook"]))
    index = outputs / run / "index.html"
    index.write_text(_index(run, rows), encoding="utf-8")
    return RunReport(index, tuple(rows))


INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid #8886; }}
td.n {{ text-align: right; white-space: nowrap; }}
.failed, .unfinished {{ font-weight: bold; color: #c4314b; }}
small {{ overflow-wrap: anywhere; }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
<table><thead><tr><th>notebook</th><th>status</th><th>parameters given</th><th>started (UTC)</th><th>duration</th></tr></thead>
<tbody>
{rows}
</tbody></table>
</body></html>
"""


def _index(run: str, rows: list[dict[str, Any]]) -> str:
    def line(row: dict[str, Any]) -> str:
        esc = {key: htmllib.escape(str(value or "")) for key, value in row.items()}
        given = htmllib.escape(", ".join(f"{k}={v!r}" for k, v in (row["parameters"] or {}).items()) or "defaults")
        error = f"<br><small>{esc['error']}</small>" if row["error"] else ""
        return (
            f'<tr><td><a href="{esc["html"]}">{esc["notebook"].removesuffix(".ipynb")}</a><br><small>{esc["title"]}</small></td>'
            f'<td><span class="{esc["status"]}">{esc["status"]}</span>{error}</td><td>{given}</td>'
            f'<td>{esc["started"][:19].replace("T", " ")}</td><td class="n">{duration(row["seconds"])}</td></tr>'
        )

    counts = [f"{n} {status}" for status in STATUSES if (n := sum(row["status"] == status for row in rows))]
    summary = f"{len(rows)} notebooks: {', '.join(counts)}." if rows else "No executed notebooks yet."
    return INDEX.format(title=htmllib.escape(f"Run {run}"), summary=summary, rows="\n".join(map(line, rows)))


def duration(seconds: float | None) -> str:
    """Return 75.2 as "1 min 15 s"."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hsnb report`."""
    parser.add_argument("name", metavar="RUN", help="the folder below outputs/")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do `hsnb report RUN`."""
    return report_run(args.name).as_dict()


def text(result: dict[str, Any]) -> str:
    """Return what `hsnb report` prints."""
    return result["index"]
