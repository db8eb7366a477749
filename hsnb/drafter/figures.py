"""Figures of trainings and acceptance: losses over steps, acceptance per draft position, what each mistake costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hsnb.figures import BLUE, ORANGE, axes, bar_look, line_look

_SMOOTH = 10  # steps; a single step's loss is that of one small batch


def losses(runs: Mapping[str, Sequence[float]], ax=None):
    """Draw the loss of each run over its steps, a mean over ten of them."""
    ax = axes(ax)
    for n, (name, values) in enumerate(runs.items()):
        width = min(_SMOOTH, len(values))
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        every = (n, max(1, len(smooth) // 8))  # marks beside each other, not over each other
        ax.plot(np.arange(width, len(values) + 1), smooth, markevery=every, label=f"{name} (last {smooth[-1]:.2f})", ms=4, **line_look(n))
    ax.set(xlabel="step", ylabel="training loss (KL, nats)", title=f"Loss, mean over {_SMOOTH} steps")
    ax.legend(fontsize=8, framealpha=1)
    return ax


def acceptance(results: Mapping[str, object], ax=None):
    """Draw the share of verifications in which draft k was accepted, per result (`Acceptance`)."""
    ax = axes(ax)
    width = 0.8 / max(1, len(results))
    for n, (name, result) in enumerate(results.items()):
        shares = result.per_position
        x = np.arange(1, len(shares) + 1) + (n - (len(results) - 1) / 2) * width
        label = f"{name}: accept length {result.accept_length:.3f} (n = {result.verifications:,} verifications)"
        ax.bar(x, shares, width, label=label, **bar_look(n))
    steps = max(len(r.per_position) for r in results.values())
    ax.set(xticks=range(1, steps + 1), xlabel="draft", ylabel="share accepted", title="Accepted drafts")
    ax.set_ylim(0, 1.35 * max(max(r.per_position) for r in results.values()) or 1)  # room for the legend
    ax.legend(fontsize=8, framealpha=1)
    return ax


def costs(values: Mapping[str, Mapping[str, Sequence[float]]], baseline: str, ax=None):
    """Draw accept length and last loss of each variant side by side, one dot a seed: {name: {"accept_length": [...], "loss": [...]}}.

    The two panels are the notebook's whole point: the left one moves, the right one does not.
    """
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(1, 2, figsize=(9, 0.5 + 0.4 * len(values)), layout="constrained", facecolor="white", sharey=True)
    for panel, key, title, least in zip(
        ax, ("accept_length", "loss"), ("accept length, served", "last training loss, nats"), (1.0, 0.0), strict=True
    ):
        panel.set_facecolor("white")
        panel.spines[["top", "right"]].set_visible(False)
        for n, name in enumerate(values):
            points = values[name][key]
            panel.plot(
                points,
                [n] * len(points),
                "o" if name.startswith(baseline) else "X",
                color=BLUE if name.startswith(baseline) else ORANGE,
                ms=6,
            )
        panel.axvline(float(np.mean(values[baseline][key])), color=BLUE, lw=1, ls="--", label=f"{baseline}, mean")
        most = max(max(v[key]) for v in values.values())
        panel.set(yticks=range(len(values)), yticklabels=list(values), title=f"{title} (n = {len(values[baseline][key])} a row)")
        panel.set_xlim(least, most + 0.1 * (most - least))  # from the least there can be: else the smallest difference fills the panel
    ax[0].invert_yaxis()
    return ax
