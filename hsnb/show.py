"""How results show themselves in a notebook where a pandas table would be too much."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any


def pairs_html(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return (name, value) pairs as a table of two columns, the names at its left; colours are the page's own."""
    rows = "".join(f"<tr><th style='text-align:left'>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in pairs)
    return f"<table class='hsnb'>{rows}</table>"
