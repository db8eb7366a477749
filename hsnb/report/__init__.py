"""Reports to send: every executed notebook as one HTML that needs no network, an index over the run, summary.json, a health page."""

from __future__ import annotations

import argparse
from typing import Any

from hsnb.report.index import RunReport, report_run, update_index
from hsnb.report.outcome import Outcome, error_line, parts_of, title_of
from hsnb.report.page import render, to_html, write_html

__all__ = [
    "Outcome", "RunReport", "add", "error_line", "parts_of", "render", "report_run", "run", "text", "title_of", "to_html", "update_index",
    "write_html",
]  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hsnb report`."""
    parser.add_argument("name", metavar="RUN", help="the folder below outputs/")
    parser.add_argument("--health", action="store_true", help="look at the states of the run's data set too, and write health.html")
    parser.add_argument("--samples", type=int, default=256, metavar="N", help="of how many samples --health reads the states (0: all)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do `hsnb report RUN`."""
    return report_run(args.name, health=args.health, samples=args.samples).as_dict()


def text(result: dict[str, Any]) -> str:
    """Return what `hsnb report` prints."""
    return result["index"]
