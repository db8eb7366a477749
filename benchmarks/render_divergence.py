"""`make figures`: draw the README's figure of the layer offset from a real run of 02_divergence, and keep that run's numbers.

Without an argument docs/divergence-smollm2.json, the numbers of the run that is kept, is drawn again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "divergence-smollm2.json"
FIGURE = ROOT / "docs" / "figures" / "layer-offset.png"


def draw(record: dict, path: Path) -> Path:
    """Draw both maps side by side: the tools' own settings, and the same boundaries asked through hsnb."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from hsnb.divergence.plots import draw_map

    figure, axes = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained", facecolor="white")
    for ax, found, title in (
        (axes[0], record["own_map"], "The same ids, each tool's own setting: one layer off"),
        (
            axes[1],
            {**record["comparison"]["map"], "a": record["comparison"]["a"], "b": record["comparison"]["b"]},
            "Boundaries asked through hsnb: they agree",
        ),
    ):
        draw_map(found["relative_l2"], found["rows"], found["columns"], found["a"], found["b"], ax=ax)
        ax.set_title(title, fontsize=11, pad=22)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="?", type=Path, help="a run's divergence.json, which is then kept")
    args = parser.parse_args()
    if args.record:
        record = json.loads(args.record.read_text())
        record["comparison"].pop("tokens")
        KEPT.write_text(json.dumps(record, indent=1) + "\n")
    print(draw(json.loads(KEPT.read_text()), FIGURE))


if __name__ == "__main__":
    main()
