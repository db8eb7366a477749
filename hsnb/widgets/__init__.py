"""Explorers for JupyterLab, one function each: widgets choose, and the figures that reports have too show.

from hsnb import widgets
widgets.dumps("outputs/demo/data")      # samples: norms, largest values, neighbouring tokens, the text under the mask
widgets.divergence("outputs/demo")      # a comparison of engines: map, one boundary, positions
widgets.monitor("demo")                 # a running extraction, followed from another notebook
widgets.health("outputs/demo/data")     # a finished data set
"""

from __future__ import annotations

from hsnb.widgets.browser import dumps
from hsnb.widgets.comparison import divergence
from hsnb.widgets.dataset import health
from hsnb.widgets.extraction import monitor

__all__ = ["divergence", "dumps", "health", "monitor"]
