"""The figures of the divergence analysis: static, white ground, no meaning in colour alone."""

from __future__ import annotations

import numpy as np

from hsnb.figures import BLUE, GREY, ORANGE, axes

GOOD_HIGH = ("cosine", "linear CKA")  # nearer means larger; for the others nearer means smaller


def similarity_map(found, metric: str = "relative L2", ax=None):
    """Draw a's columns (rows) against b's: dark is near, a ring marks each row's best fit, the dashes where the numbers are equal."""
    matrix = found.metric(metric).numpy()
    return draw_map(matrix, found.rows, found.columns, found.a, found.b, metric, found.tokens, ax)


def draw_map(matrix, rows, columns, a: str, b: str, metric: str = "relative L2", tokens: int = 0, ax=None):
    """Draw a similarity map from plain values, such as a saved one's."""
    matrix = np.asarray(matrix, dtype=float)
    ax = axes(ax, (1.2 + 0.22 * max(len(columns), 12), 1.4 + 0.22 * max(len(rows), 8)))
    shown = matrix if metric in GOOD_HIGH else np.log10(np.maximum(matrix, 1e-8))
    low = None if metric in GOOD_HIGH else -6.5  # nearer than that is rounding
    image = ax.imshow(shown, cmap="cividis_r" if metric in GOOD_HIGH else "cividis", vmin=low, aspect="auto", interpolation="nearest")
    best = matrix.argmax(1) if metric in GOOD_HIGH else matrix.argmin(1)
    ax.plot(best, np.arange(len(rows)), "o", mfc="none", mec=ORANGE, mew=1.5, ms=8, label="best fit")
    same = [(x, y) for y, row in enumerate(rows) for x, column in enumerate(columns) if _number(row) == _number(column) is not None]
    if same:
        ax.plot(*zip(*same, strict=True), "s--", color="black", mfc="white", ms=3, lw=0.8, label="the same number")
    for axis, labels in ((ax.xaxis, columns), (ax.yaxis, rows)):
        every = 1 + len(labels) // 36
        axis.set_ticks(range(0, len(labels), every), labels[::every], fontsize=7)
    ax.tick_params(axis="x", rotation=90)
    ax.set(xlabel=b, ylabel=a)
    ax.set_title(f"{metric}, median of {tokens} tokens" if tokens else metric, pad=22)
    ax.figure.colorbar(image, ax=ax, label=f"{metric if metric in GOOD_HIGH else f'log₁₀ {metric}'} (dark: near)", shrink=0.8)
    ax.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False)
    return ax


def _number(label: str) -> int | None:
    digits = label.split("_")[-1].split(" ")[-1]
    return int(digits) if digits.isdigit() else None


def noise_and_shift(comparison, ax=None):
    """Draw, for each common boundary, how far the two parties are apart beside what a shift by one would cost."""
    ax = axes(ax)
    rows = comparison.boundaries
    x = [b.number for b in rows]
    n = comparison.found.tokens
    ax.plot(x, [b.shift for b in rows], "^-", color=ORANGE, ms=4, label="nearest other boundary (the cost of a shift)")
    if any(b.half_noise is not None for b in rows):
        half = [np.nan if b.half_noise is None else b.half_noise for b in rows]
        ax.plot(x, half, "x:", color=GREY, ms=4, label="bfloat16 against float32 (transformers)")
    errors = np.maximum([b.error for b in rows], 1e-9)
    low, high = np.maximum([b.low for b in rows], 1e-9), np.maximum([b.high for b in rows], 1e-9)
    label = f"{comparison.a} against {comparison.b}, {comparison.dtype}"
    ax.errorbar(x, errors, [errors - low, high - errors], fmt="o-", color=BLUE, ms=4, lw=1, capsize=2, label=label)
    ax.plot(x, np.maximum([b.noise for b in rows], 1e-9), "s--", color="black", ms=3, lw=0.8, label="noise that margins are measured in")
    ax.set(
        yscale="log",
        xlabel="boundary",
        ylabel="relative L2 (median, quartiles)",
        title=f"Numerics beside the cost of a shift (n = {n} tokens, first ones left out)",
    )
    ax.legend(fontsize=7, framealpha=1)
    return ax


def positions(comparison, ax=None):
    """Draw each token's difference against its position; filled where its norm is over ten times the median (a massive activation)."""
    ax = axes(ax)
    rows = comparison.tokens
    prompts = list(dict.fromkeys(r["prompt"] for r in rows))
    for n, prompt in enumerate(prompts):
        mine = [r for r in rows if r["prompt"] == prompt]
        style = {"marker": "osD^"[n % 4], "color": (BLUE, ORANGE, GREY, "black")[n % 4]}
        y = np.maximum([r["relative_l2"] for r in mine], 1e-9)
        fill = ["full" if r["norm_over_median"] > 10 else "none" for r in mine]
        ax.plot([r["position"] for r in mine], y, lw=0.6, color=style["color"])
        ax.plot([], [], lw=0.6, ms=4, fillstyle="none", label=f"{prompt} (n = {len(mine)})", **style)
        for kind in ("full", "none"):
            at = [i for i, f in enumerate(fill) if f == kind]
            ax.plot([mine[i]["position"] for i in at], y[at], ls="", ms=4, fillstyle=kind, **style)
    ax.set(yscale="log", xlabel="position (token)", ylabel="relative L2, median over boundaries")
    ax.set_title("Where the two differ; filled: norm over ten times the median", fontsize=10)
    ax.legend(fontsize=7, framealpha=1)
    return ax
