"""How results show themselves in a notebook where a pandas table would be too much."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

NOT_SET = "(not set)"  # instead of a cell with nothing in it


def pairs_html(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return (name, value) pairs as a table of two columns, the names at its left; colours are the page's own."""
    rows = ((html.escape(k), html.escape(NOT_SET if v is None or v in ("", {}, []) else str(v))) for k, v in pairs)
    return "<table class='hsnb'>" + "".join(f"<tr><th style='text-align:left'>{k}</th><td>{v}</td></tr>" for k, v in rows) + "</table>"


def token(text: str) -> str:
    """Return a token's text as it is, one of nothing that is seen in quotes.

    >>> [token(text) for text in (" the", "\\n    ", "")]
    [' the', "'\\\\n    '", "''"]
    """
    return text if text.strip() else repr(text)


def number(value: float) -> str:
    """Return a measured number in four digits, or whole from a thousand on.

    >>> [number(v) for v in (0.123456, 24731.2, 3.1e-7, float("nan"))]
    ['0.1235', '24,731', '3.1e-07', 'nan']
    """
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"
