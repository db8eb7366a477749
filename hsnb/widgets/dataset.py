"""The health explorer: the findings of a data set, and its figures one at a time."""

from __future__ import annotations

from pathlib import Path

from hsnb import figures
from hsnb.health import Health, examine
from hsnb.widgets.explorer import Explorer, choice, table_html


def health(data: Health | str | Path, samples: int = 32) -> Explorer:
    """Show the health of a folder (the states of `samples` of its samples are read; 0: all), or a result that is there already."""
    result = data if isinstance(data, Health) else examine(data, samples=samples)
    views = {
        "findings": lambda: f"<p><b>{result.verdict}</b></p>{table_html(result.frame())}",
        "norms": lambda: figures.image(result.plot().figure) + table_html(result.norm_frame()),
        "largest values": lambda: table_html(result.massive_frame()),
        "lengths": lambda: figures.image(result.plot_lengths().figure),
        "loss mask": lambda: figures.image(result.plot_mask().figure),
        "text": lambda: "".join(text.html() for text in result.texts) or "<p>No sample with ids and a mask.</p>",
    }
    return Explorer({"view": choice("view", views)}, lambda view: views[view]())
