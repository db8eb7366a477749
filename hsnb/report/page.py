"""One static HTML file per executed notebook: readable offline and on a phone, nothing loaded, nothing run, code folded away."""

from __future__ import annotations

import base64
import copy
import html as htmllib
import mimetypes
import re
from pathlib import Path
from typing import Any

from hsnb.paths import replace_text
from hsnb.report.outcome import ERROR_MARKER_TAG, Outcome, title_of
from hsnb.report.style import CSS, error_block

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ALT = "hsnb_alt"  # where a figure's text is put for the template
IMAGES = ("image/png", "image/jpeg", "image/svg+xml")

# The stock template without its scripts (RequireJS, MathJax, mermaid: all from the network), with the dark theme for those who ask.
# Its own blocks for images (7.17) have no alt text.
TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block jupyter_widgets %}{% endblock %}
{% macro figure(output, kind, data) %}<div class="jp-RenderedImage jp-OutputArea-output"><img alt="{{ output.metadata.hsnb_alt | escape_html }}"
 src="data:{{ kind }};base64,{{ data }}"{% if output | get_metadata('width', kind) %} width="{{ output | get_metadata('width', kind) }}"{% endif %}></div>
{% endmacro %}
{% block data_png scoped %}{{ figure(output, 'image/png', output.data['image/png'] | escape_html) }}{% endblock %}
{% block data_jpg scoped %}{{ figure(output, 'image/jpeg', output.data['image/jpeg'] | escape_html) }}{% endblock %}
{% block data_svg scoped %}{{ figure(output, 'image/svg+xml', output.data['image/svg+xml'] | text_base64 | escape_html) }}{% endblock %}
{% block html_head_css %}
{{ resources.include_css("static/theme-dark.css") | replace('<style', '<style media="screen and (prefers-color-scheme: dark)"') }}
<style>{{ resources.hsnb_css }}</style>
{% endblock %}
{%- block body_header -%}{{ super() }}{{ resources.hsnb_banner }}{%- endblock -%}
"""

NOTEBOOK_CSS = """
body { max-width: 72rem; margin: 0 auto; padding: 1rem; background: var(--jp-layout-color0); color: var(--jp-content-font-color1); }
.hsnb-error { font: 1rem/1.5 system-ui, sans-serif; }
img, svg { max-width: 100%; height: auto; }
.jp-RenderedImage img, .jp-RenderedSVG img { background: #fff; }
.jp-InputPrompt, .jp-OutputPrompt, .jp-InputCollapser, .jp-OutputCollapser { display: none; }
.jp-Cell { padding: .15rem 0; } .jp-MarkdownCell h2 { margin-top: 1.8rem !important; } 
.jp-OutputArea-child, .jp-OutputArea-output { display: block !important; box-sizing: border-box; max-width: 100%; margin: 0 !important; }
details.hsnb-code { margin: .1rem 0; }
details.hsnb-code > summary { cursor: pointer; font: .8rem/1.6 system-ui, sans-serif; color: var(--jp-content-font-color2); }
.jp-RenderedHTMLCommon table { margin: .5rem 0; table-layout: auto; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th { overflow-wrap: normal; white-space: normal;
  vertical-align: top !important; max-width: 32rem; text-align: left !important; }
.hsnb-whole { white-space: nowrap !important; }
.hsnb-wide { overflow-x: auto; max-width: 100%; }
.jp-OutputArea-output pre { white-space: pre-wrap; overflow-wrap: anywhere; word-break: normal !important; }
.jp-OutputArea-output pre [class*="ansi-"] { color: inherit !important; }
@media (max-width: 40rem) {
  body, .jp-Notebook { padding: .5rem .8rem !important; }
  .jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th { font-size: .8rem; padding: .25rem .4rem; }
}
@media print { details.hsnb-code:not([open]) { display: none; } }
"""

# Where a phone may break the long words of a table (paths, variables), and where it may not though there is a hyphen.
PIECES = re.compile(r"(?<=\w[_/.=,])(?=[^\W\d]|\d{4})")
SHORT = 12  # characters: "[2, 15, 27]" and "id 30" stay in one line
NUMBER = re.compile(r"\b\d[\d.]*e-\d+")
LOADED = {"src", "srcset", "data", "poster", "background", "href", "xlink:href", "action", "formaction"}
EXTERNAL = re.compile(r"\s*(?:https?:|ftp:|//)", re.I)
CSS_EXTERNAL = re.compile(r"@import[^;]*(?:;|$)|url\(\s*['\"]?\s*(?:https?:|//)[^)]*\)", re.I)


def render(notebook: Path, html: Path | None = None) -> Path:
    """Write the report of the notebook file `notebook` to `html` (next to it by default) and return its path."""
    import nbformat

    return write_html(nbformat.read(notebook, as_version=4), html or Path(notebook).with_suffix(".html"))


def write_html(nb: Any, html: Path) -> Path:
    """Write the report of a notebook in memory to `html`, in one step; images are looked for in the folder of `html`."""
    return replace_text(html, to_html(nb, html.parent, fallback_title=html.stem))


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
    add_alt_texts(nb)
    exporter = HTMLExporter(raw_template=TEMPLATE, theme="light", embed_images=True, exclude_anchor_links=True)
    about = {"metadata": {"path": str(folder)}, "hsnb_banner": _banner(outcome), "hsnb_css": CSS + NOTEBOOK_CSS}
    page, _ = exporter.from_notebook_node(nb, resources=about)
    return _offline(page, folder, outcome.cell)


def add_alt_texts(nb: Any) -> None:
    """Give every figure its text: what it says of itself (hsnb.figures.alt_text), else the heading it stands under."""
    heading, count = title_of(nb), 0
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            heads = [line.lstrip("# ").strip() for line in cell.source.splitlines() if re.match(r"#{1,6} ", line)]
            heading = heads[-1].replace("`", "").replace("*", "") if heads else heading
        for output in cell.get("outputs", []):
            kind = next((k for k in IMAGES if k in output.get("data", {})), None)
            if kind:
                count += 1
                said = output.metadata.get(kind, {}).get("alt") if isinstance(output.metadata.get(kind), dict) else None
                output.metadata[ALT] = said or f"Figure {count}, under the heading “{heading}”"


def _banner(outcome: Outcome) -> str:
    """Return what stands above the title of a notebook that failed or did not finish."""
    if outcome.status == "unfinished":
        return '<div class="hsnb-error" role="alert"><b>This notebook has not finished:</b> it is still running, or was killed.</div>'
    if outcome.status != "failed":
        return ""
    where = f' in <a href="#cell-id={htmllib.escape(outcome.cell)}">this cell</a>' if outcome.cell else ""
    return error_block(outcome.error, f"This notebook failed{where}:")


def _offline(page: str, folder: Path, failed_cell: str) -> str:
    """Take everything out of `page` that a browser would load or run, fold its code, and let wide tables scroll on their own."""
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
    for code in soup.select(".jp-CodeCell > .jp-Cell-inputWrapper"):
        cell = code.find_parent(class_="jp-CodeCell")
        details = soup.new_tag("details", attrs={"class": "hsnb-code"})
        if failed_cell and cell.get("id") == f"cell-id={failed_cell}":
            details["open"] = ""
        code.wrap(details)
        summary = soup.new_tag("summary")
        summary.string = "code"
        details.insert(0, summary)
    for table in soup.select(".jp-OutputArea-output table, .jp-MarkdownOutput table"):
        for cell in table.select("td"):
            if len(cell.get_text()) <= SHORT:
                cell["class"] = [*cell.get("class", []), "hsnb-whole"]
        for text in [t for cell in table.select("td, th") for t in cell.find_all(string=True)]:
            if (said := _breakable(text)) != htmllib.escape(text):
                text.replace_with(BeautifulSoup(said, "html.parser"))
        table.wrap(soup.new_tag("div", attrs={"class": "hsnb-wide", "tabindex": "0", "role": "region", "aria-label": "table"}))
    return str(soup)


def _breakable(text: str) -> str:
    """Return a cell's text as HTML that breaks between the parts of its long words, and not within a number.

    >>> _breakable("/home/me/models/smollm2 <1e-05")
    '/home/<wbr>me/<wbr>models/<wbr>smollm2 &lt;<span class="hsnb-whole">1e-05</span>'
    """
    words = (htmllib.escape(w) if len(w) < 18 else "<wbr>".join(map(htmllib.escape, PIECES.split(w))) for w in re.split(r"(\s+)", text))
    return NUMBER.sub(r'<span class="hsnb-whole">\g<0></span>', "".join(words))


def _embed(tag: Any, name: str, value: str, folder: Path) -> None:
    """Embed an image of `folder`; drop what is external, saying so where an image was."""
    if EXTERNAL.search(value) if name == "srcset" else EXTERNAL.match(value):
        del tag[name]
        if tag.name == "img":
            tag["alt"] = f"not embedded: {value}"
    elif tag.name == "img" and name == "src" and not value.startswith("data:") and (file := folder / value).is_file():
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        tag[name] = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
