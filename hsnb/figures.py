"""The figures of notebooks and reports: white ground, colour-blind-safe, units and n on them."""

from __future__ import annotations

import numpy as np

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito's palette
PALETTE = (BLUE, ORANGE, "#009E73", "#CC79A7", GREY, "#E69F00", "#56B4E9")


def axes(ax, size=(7, 3)):
    """Return `ax`, or axes of a new figure of `size` inches."""
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=size, layout="constrained", facecolor="white")
        _speak()
    ax.set_facecolor("white")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def line_look(k: int) -> dict:
    """Return the k-th line's colour, mark and dashes: no two differ in colour alone."""
    return {"color": PALETTE[k % len(PALETTE)], "ls": ("-", "--", ":", "-.")[k % 4], "marker": "osD^v<>"[k % 7]}


def bar_look(k: int) -> dict:
    """Return the k-th bar's colour and hatching."""
    colour, hatch = PALETTE[k % len(PALETTE)], ("", "////", "....", "xxxx", "----")[k % 5]
    return {"color": "white" if hatch else colour, "edgecolor": colour, "hatch": hatch}


def alt_text(figure) -> str:
    """Return what a figure shows in words, for those who do not see it: title, axes and legend of each panel."""
    said = []
    for ax in figure.axes:
        if ax.get_label() == "<colorbar>":
            said.append(f"Colours: {ax.get_ylabel() or ax.get_xlabel()}.")
            continue
        labels = [text for text in ax.get_legend_handles_labels()[1] if not text.startswith("_")]
        axes_said = "; ".join(f"{name}: {text}" for name, text in (("x", ax.get_xlabel()), ("y", ax.get_ylabel())) if text)
        said += [f"{text}." for text in (ax.get_title(), axes_said) if text]
        said += [f"Shown: {'; '.join(labels)}."] if labels else []
    return " ".join(" ".join(said).split()) or "A figure"


def png(figure, dpi: int = 144) -> bytes:
    """Return `figure` as PNG and close it; 144 dots an inch are sharp on any screen."""
    import io

    import matplotlib.pyplot as plt

    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, facecolor="white")
    plt.close(figure)
    return out.getvalue()


def image(figure, dpi: int = 144) -> str:
    """Return `figure` as an <img> with its text that needs no file beside it, and close it."""
    import base64
    from html import escape

    alt, width = alt_text(figure), round(figure.get_figwidth() * 96)
    data = base64.b64encode(png(figure, dpi)).decode()
    return (
        f'<img alt="{escape(alt)}" width="{width}" style="max-width:100%;height:auto;background:#fff" src="data:image/png;base64,{data}">'
    )


def _speak() -> None:
    """In a kernel, let figures be displayed sharp and with their text: JupyterLab and the report show what is in the output's metadata."""
    import sys

    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return
    from IPython.core.pylabtools import print_figure
    from matplotlib.figure import Figure

    def show(figure):
        dpi = figure.dpi
        data = print_figure(figure, fmt="png", base64=True, dpi=2 * dpi)
        return data, {"alt": alt_text(figure), "width": round(figure.get_figwidth() * dpi)}

    shell.display_formatter.formatters["image/png"].for_type(Figure, show)


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
    ax.legend(fontsize=8, framealpha=1)
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
    ax.legend(fontsize=8, framealpha=1)
    return ax


def norms_of_tokens(values, first: int, name: str, ax=None):
    """Draw the norm of each row [n] of one sample's column; `first`: the position of its first row."""
    return norms_of_states({name: values}, first, f"Norm by token, {name}", ax)


def norms_of_states(norms, first: int = 0, title: str = "Norm by token", ax=None):
    """Draw the norms [n] of one sample's rows, {state: norms}, a line each; `first`: the position of the first row."""
    ax = axes(ax)
    for k, (name, values) in enumerate(norms.items()):
        ax.plot(
            np.arange(first, first + len(values)),
            np.maximum(values, 1e-12),
            ms=3,
            lw=0.8,
            label=f"{name} (n = {len(values):,})",
            **line_look(k),
        )
    ax.set(yscale="log", xlabel="position (token)", ylabel="norm of the row", title=title)
    ax.legend(fontsize=8, framealpha=1)
    return ax


def shares(parts, unit: str, title: str, ax=None):
    """Draw {part: count} as one bar, parts told apart by hatching too, with their counts in the legend."""
    ax = axes(ax, (7, 1.6))
    left = 0
    for k, (name, n) in enumerate(parts.items()):
        ax.barh(0, n, left=left, label=f"{name} ({n:,})", **bar_look(k))
        left += n
    ax.set(yticks=[], xlabel=unit, title=title, xlim=(0, max(left, 1)))
    ax.figure.legend(fontsize=8, ncols=3, loc="outside lower center", frameon=False)
    return ax


def similarity(matrix, first: int, name: str, ax=None):
    """Draw the cosines [n, n] of the rows of one sample's column; dark is near."""
    ax = axes(ax, (5.6, 4.6))
    last = first + len(matrix) - 0.5
    shown = ax.imshow(matrix, cmap="cividis_r", vmin=-1, vmax=1, extent=(first - 0.5, last, last, first - 0.5), interpolation="nearest")
    ax.set(xlabel="position (token)", ylabel="position (token)", title=f"Cosine of each token with each other, {name} (n = {len(matrix)})")
    ax.figure.colorbar(shown, ax=ax, label="cosine (dark: near)")
    return ax


def against_all(values, columns, row: str, other: str, metric: str, ax=None):
    """Draw one party's column against every column of the other; a ring marks the best fit."""
    ax = axes(ax)
    values = np.asarray(values, dtype=float)
    good_high = metric in ("cosine", "linear CKA")
    best = int(np.nanargmax(values) if good_high else np.nanargmin(values))
    ax.plot(
        values if good_high else np.maximum(values, 1e-9), "s-", ms=4, lw=0.8, color=BLUE, label=f"{metric} (n = {len(values)} columns)"
    )
    ax.plot(
        [best],
        [values[best] if good_high else max(values[best], 1e-9)],
        "o",
        ms=11,
        mfc="none",
        mec=ORANGE,
        mew=2,
        label=f"best fit: {columns[best]}",
    )
    every = 1 + len(columns) // 36
    ax.set_xticks(range(0, len(columns), every), list(columns)[::every], rotation=90, fontsize=7)
    ax.set(yscale="linear" if good_high else "log", xlabel=other, ylabel=metric, title=f"{row} against every column of {other}")
    ax.legend(fontsize=8, framealpha=1)
    return ax


def published(seconds, tokens, ax=None):
    """Draw the tokens published over the time that somebody has looked on."""
    ax = axes(ax, (7, 2.2))
    ax.plot(seconds, tokens, "o-", ms=3, lw=0.8, color=BLUE, label=f"seen {len(seconds)} times")
    ax.set(xlabel="seconds since this page was opened", ylabel="tokens published", title="Tokens published")
    ax.set_xlim(-0.3, max(10.0, *seconds))
    ax.set_ylim(0, 1.15 * max(1, *tokens))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.legend(fontsize=8, framealpha=1)
    return ax


def requests(counts, ax=None):
    """Draw what each scheduler counted, {scheduler: {kind: requests}}, as bars told apart by hatching too, their sums in the legend."""
    kinds = list(dict.fromkeys(kind for counted in counts.values() for kind in counted)) or ["captured"]
    ax = axes(ax, (7, 1.6 + 0.25 * len(counts)))
    left = np.zeros(len(counts))
    for k, kind in enumerate(kinds):
        n = np.array([counted.get(kind, 0) for counted in counts.values()], dtype=float)
        ax.barh(list(counts), n, left=left, label=f"{kind} ({n.sum():,.0f})", **bar_look(k))
        left += n
    ax.set(xlabel="requests", title="What the schedulers counted", xlim=(0, max(float(left.max(initial=0)), 1)))
    ax.figure.legend(fontsize=8, ncols=5, loc="outside lower center", frameon=False)
    return ax
