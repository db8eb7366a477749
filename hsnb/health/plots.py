"""The figures of the health page: lines told apart by marks and dashes too, units and n on them."""

from __future__ import annotations

import numpy as np

from hsnb.figures import BLUE, axes, line_look


def norms(health, ax=None):
    """Draw the median norm of each column by position (bins double in width), with the 5 to 95 % band."""
    ax = axes(ax)
    x = np.array(health.norms.starts, dtype=float)
    for c, name in enumerate(health.columns):
        low, middle, high = health.norms.of_positions[c].T
        (line,) = ax.plot(x, middle, ms=4, label=name, **line_look(c))
        ax.fill_between(x, low, high, color=line.get_color(), alpha=0.12, lw=0)
    ax.set_xscale("symlog", base=2, linthresh=1)
    ax.set_xticks(x, [f"{int(v):,}" for v in x])
    ax.set(yscale="log", xlabel="position (token; each bin starts here)", ylabel="norm of a row (median, 5 to 95 %)")
    ax.set_title(f"Norm by state and position (n = {health.looked:,} samples)")
    ax.legend(fontsize=8, framealpha=1)
    return ax


def coverage(health, ax=None):
    """Draw the share of each sample's tokens that is trained; all ones and all zeros are the outermost bars."""
    ax = axes(ax)
    share = health.trained / np.maximum(health.lengths, 1)
    ax.hist(share, np.linspace(0, 1, 41), color=BLUE, edgecolor="white", lw=0.3, label=f"all (n = {len(share):,})")
    ax.set(xlabel="trained tokens / tokens of the sample", ylabel="samples", title="How much of each sample is trained", xlim=(-0.01, 1.01))
    ax.legend(fontsize=8, framealpha=1)
    return ax
