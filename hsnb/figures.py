"""The figures of notebooks and reports: white ground, colour-blind-safe, units and n on them."""

from __future__ import annotations

import numpy as np

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito's palette


def axes(ax, size=(7, 3)):
    """Return `ax`, or axes of a new figure of `size` inches."""
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=size, layout="constrained", facecolor="white")
    ax.set_facecolor("white")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def logprob_errors(errors: dict[str, tuple[float, ...]], bar: float, ax=None):
    """Draw |rebuilt - server's| log p (nats) per token of each prompt, with the largest error allowed."""
    ax = axes(ax)
    for n, (name, values) in enumerate(errors.items()):
        ax.plot(
            np.arange(1, len(values) + 1),
            np.maximum(values, 1e-9),
            "osD^v"[n % 5],
            ms=4,
            color=[BLUE, ORANGE, GREY][n % 3],
            label=f"{name} (n = {len(values)})",
        )
    ax.axhline(bar, color="black", ls="--", lw=1, label=f"bar: {bar:g} nats")
    ax.set(
        yscale="log",
        xlabel="token predicted",
        ylabel="|error| of log p (nats)",
        title="Logprobs rebuilt from the dump against the server's own",
    )
    ax.legend(fontsize=8)
    return ax


def lengths(values, shard_values=None, max_length: int | None = None, ax=None, server_takes: int | None = None):
    """Draw the length histogram (tokens) of a data set, and of one shard over it; `server_takes`: the longest prompt it answers."""
    ax = axes(ax)
    values = np.asarray(values)
    bins = np.linspace(0, max(int(values.max()), 1), 33)
    ax.hist(values, bins, color=BLUE, label=f"all (n = {len(values):,}, {values.sum():,} tokens)")
    if shard_values is not None and len(shard_values):
        ax.hist(
            shard_values,
            bins,
            color="white",
            edgecolor=ORANGE,
            hatch="////",
            label=f"this shard (n = {len(shard_values):,}, {np.sum(shard_values):,} tokens)",
        )
    if max_length:
        ax.axvline(max_length, color="black", ls="--", lw=1, label=f"max_length {max_length:,}")
    if server_takes and (not max_length or server_takes < max_length):  # else it bounds nothing, and would flatten the histogram
        ax.axvline(server_takes, color=GREY, ls=":", lw=1.5, label=f"the server takes {server_takes:,}")
    ax.set(xlabel="tokens a sample", ylabel="samples", title="Sample lengths")
    ax.legend(fontsize=8)
    return ax
