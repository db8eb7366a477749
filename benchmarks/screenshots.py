"""Pictures of every page of a run and of the explorers, as a reader sees them: light and dark, on a screen and on a phone.

python -m benchmarks.screenshots outputs/demo [outputs/shards]   # runs that are there already; nothing is run or made up here

The first run needs 00_server to 04_handoff and its data set; a second one's index is taken as `shards`. One picture a page is
kept in docs/figures/pages; --raw DIR keeps the four that it is made of, in full size. With --only explorer-monitor it is best taken
while the run's 03_extract is at work.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import nbformat

from benchmarks.browser import CHROMIUM, REASON, Page, browser
from benchmarks.lab import PANEL, jupyterlab

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "figures" / "pages"
LOOKS = [(1400, False), (1400, True), (400, False), (400, True)]  # (CSS pixels, dark?)
EXPLORERS = {  # name: (code, what is chosen in its drop-down lists before the picture, how many seconds it is looked at)
    "explorer-dumps": ('widgets.dumps("data")', {}, 1),
    "explorer-divergence": ('widgets.divergence("divergence.json")', {0: "each by its own setting"}, 1),
    "explorer-health": ('widgets.health("data")', {0: "norms"}, 1),
    "explorer-monitor": ('widgets.monitor("./data", seconds=2)', {}, 20),
}
SHOWN = "document.querySelector('.jupyter-widgets .widget-html-content')?.innerHTML"
CHOOSE = """((k, text) => { const list = document.querySelectorAll('.jupyter-widgets select')[k];
  list.selectedIndex = [...list.options].findIndex(o => o.text.replaceAll('\u00a0', ' ').includes(text)); list.dispatchEvent(new Event('change', {bubbles: true})); })"""


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run, outputs/demo")
    parser.add_argument("shards", type=Path, nargs="?", help="the folder of a run of many shards")
    parser.add_argument("--raw", type=Path, help="where the pictures in full size are kept")
    parser.add_argument("--only", default="", help="pages whose name contains this")
    args = parser.parse_args()
    if CHROMIUM is None:
        sys.exit(REASON)
    with tempfile.TemporaryDirectory() as temporary:
        state = Path(temporary)
        raw = args.raw or state / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        names = []
        with browser(state / "chromium") as page:
            for name, file in pages(args.run.resolve(), args.shards).items():
                if args.only in name:
                    take_page(page, name, file, raw)
                    names.append(name)
            if wanted := [name for name in EXPLORERS if args.only in name]:
                take_explorers(page, wanted, args.run.resolve(), raw, state)
                names += wanted
        for name in names:
            file = sheet([raw / f"{name}-{look(*each)}.png" for each in LOOKS], KEPT / f"{name}.png")
            print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 1000:.0f} kB")
        if (screen := raw / "explorer-dumps-1400-light.png").exists() and "explorer-dumps" in names:
            smaller(screen, KEPT.parent / "explorer.png", 1000)
        if (screen := raw / "01_probe-1400-light.png").exists() and "01_probe" in names:
            smaller(screen, KEPT.parent / "report.png", 1000, top=600)  # the figure and the verdict


def look(width: int, dark: bool) -> str:
    """Return the end of a picture's name."""
    return f"{width}-{'dark' if dark else 'light'}"


def pages(run: Path, shards: Path | None) -> dict[str, Path]:
    """Return {name: page} of the runs; one shard's page stands for all of them."""
    found = {file.stem: file for file in sorted(run.glob("0[0-4]_*.html")) if "-shard-" not in file.stem}
    if shard_pages := sorted(run.glob("03_extract-shard-*.html")):
        found["03_extract"] = shard_pages[0]
    found |= {name: run / f"{name}.html" for name in ("index", "health") if (run / f"{name}.html").exists()}
    if shards is not None:
        found["shards"] = shards.resolve() / "index.html"
        if failed := [row["html"] for row in json.loads((shards / "summary.json").read_text())["notebooks"] if row["status"] == "failed"]:
            found["failed"] = shards.resolve() / failed[0]
    return found


def take_page(page: Page, name: str, file: Path, raw: Path) -> None:
    """Take one page in its four looks."""
    for width, dark in LOOKS:
        page.look(width, 900, dark)
        page.open(file.as_uri())
        page.picture(raw / f"{name}-{look(width, dark)}.png", most=6000)


def take_explorers(page: Page, names: list[str], run: Path, raw: Path, state: Path) -> None:
    """Take explorers in JupyterLab, in its mode of one document: the run's own data set and divergence.json."""
    v4 = nbformat.v4
    folder = state / "explore"
    folder.mkdir()
    for name in ("data", "divergence.json"):
        (folder / name).symlink_to(run / name)
    kernel = nbformat.read(ROOT / "notebooks" / "01_probe.ipynb", as_version=4).metadata
    for name in names:
        cells = [v4.new_code_cell("from hsnb import widgets"), v4.new_code_cell(EXPLORERS[name][0])]
        nbformat.write(v4.new_notebook(cells=cells, metadata=kernel), folder / f"{name}.ipynb")
    with jupyterlab(folder, state, page) as lab:
        for name in names:
            for width, dark in LOOKS:
                lab.open(f"{name}.ipynb", dark=dark, width=width, mode="doc")
                page.js("jupyterapp.commands.execute('notebook:run-all-cells')")
                _, choices, seconds = EXPLORERS[name]
                shown = page.wait(SHOWN, 180)
                for k, text in choices.items():
                    page.js(f"{CHOOSE}({k}, {json.dumps(text)})")
                    shown = page.wait(f"{SHOWN} != {json.dumps(shown)} && {SHOWN}", 120, f"{name} shows {text}")
                page.wait(f"{PANEL}.sessionContext.session.kernel.status == 'idle'", 120)
                page.js(f"new Promise(done => setTimeout(done, {1000 * seconds}))")
                page.picture(raw / f"{name}-{look(width, dark)}.png", most=1000)
                lab.close_kernel()


def sheet(shots: list[Path], file: Path, height: int = 900) -> Path:
    """Write four looks beside each other: both screens at half their size, both phones at three quarters; what is longer is cut."""
    from PIL import Image

    scaled = []
    for shot, share in zip(shots, (0.5, 0.5, 0.75, 0.75), strict=True):
        picture = Image.open(shot).convert("RGB")
        picture = picture.crop((0, 0, picture.width, min(picture.height, round(height / share))))
        scaled.append(picture.resize((round(picture.width * share), round(picture.height * share)), Image.Resampling.LANCZOS))
    gap = 8
    whole = Image.new("RGB", (sum(p.width for p in scaled) + gap * (len(scaled) - 1), max(p.height for p in scaled)), "#808080")
    left = 0
    for picture in scaled:
        whole.paste(picture, (left, 0))
        left += picture.width + gap
    return write_small(whole, file)


def smaller(shot: Path, file: Path, width: int, height: int = 640, top: int = 0) -> Path:
    """Write a picture scaled to a width, from `top` down."""
    from PIL import Image

    picture = Image.open(shot).convert("RGB")
    picture = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    return write_small(picture.crop((0, top, width, min(top + height, picture.height))), file)


def write_small(picture, file: Path, most: int = 150_000) -> Path:
    """Write PNG of at most `most` bytes: with as many colours as that allows, and smaller when sixteen are too many."""
    from PIL import Image

    while True:
        for colours in (128, 64, 32, 16):
            picture.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(file, optimize=True)
            if file.stat().st_size <= most:
                return file
        picture = picture.resize((round(picture.width * 0.85), round(picture.height * 0.85)), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
