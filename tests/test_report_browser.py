"""The pages in headless Chromium with the network cut, light and dark, on a screen and on a phone: all is shown, and can be read."""

from __future__ import annotations

import base64
import io

import nbformat
import pytest
from PIL import Image

from benchmarks.browser import CHROMIUM, REASON, browser
from hsnb import report
from hsnb.health import examine
from hsnb.report.health import write_health
from tests.test_health import good, write_folder
from tests.test_notebook_params import make_project
from tests.test_report import OWED, executed, failure, new, shard_run

WIDE = (
    "<p>"
    + "a sentence beside a wide table, " * 5
    + "</p><table><tr>"
    + "".join(f"<th>a_heading_{k}</th>" for k in range(30))
    + "</tr></table>"
)
PAGES = ["index.html", "health.html", "01_probe.html", "03_extract-shard-0001.html"]
# What a reader sees: width, figures, cells with nothing in them, and texts by their contrast (WCAG 2) with what lies behind them.
LOOK = """(() => {
  const rgb = c => { const m = c.match(/[\\d.]+/g).map(Number); return [m[0], m[1], m[2], m.length > 3 ? m[3] : 1]; };
  const over = (top, under) => [0, 1, 2].map(k => top[k] * top[3] + under[k] * (1 - top[3]));
  const light = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
                       return .2126 * r + .7152 * g + .0722 * b; };
  const ground = e => { const layers = []; for (; e; e = e.parentElement) layers.push(rgb(getComputedStyle(e).backgroundColor));
    let under = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
    for (const layer of layers.reverse()) under = over(layer, under); return under; };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = [];
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), e = texts.currentNode.parentElement;
    if (!text || e.closest('style, .jp-InputArea') || !e.checkVisibility()) continue;
    const under = ground(e), a = light(over(rgb(getComputedStyle(e).color), under)), b = light(under);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) faint.push([Math.round(ratio * 100) / 100, text.slice(0, 60)]);
  }
  const images = [...document.images];
  return {wide: document.documentElement.scrollWidth, images: images.length, shown: images.filter(i => i.naturalWidth > 0 && i.width > 0).length,
          alt: images.filter(i => i.alt).length, faint, texts: document.body.innerText.length,
          cut: [...document.querySelectorAll('p, li, h1, h2, dd')].filter(e => !e.closest('.hsnb-wide, .scroll')
                && e.getBoundingClientRect().right > innerWidth).map(e => e.innerText.slice(0, 60)),
          hidden: [...document.querySelectorAll('.jp-OutputArea-output img, .jp-OutputArea-output pre')].filter(e => { const box = e.closest('.jp-OutputArea');
                return e.getBoundingClientRect().right > box.getBoundingClientRect().right + 1; }).length,
          blank: [...document.querySelectorAll('.jp-Cell')].filter(c => !c.innerText.trim() && !c.querySelector('img')).length};
})()"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = make_project(tmp_path_factory.mktemp("pages") / "project")
    folder = root / "outputs" / "demo"
    (folder / "data").mkdir(parents=True)
    write_folder(folder / "data", good(5))
    write_health(examine(folder / "data"), folder)
    picture = io.BytesIO()
    Image.new("RGB", (900, 300)).save(picture, "png")
    figure = new.new_output("display_data", data={"image/png": base64.b64encode(picture.getvalue()).decode()})
    log = new.new_output("stream", name="stdout", text="[2026-01-02 03:04:05] INFO: a line of a log that is wider than a phone is\n" * 3)
    nbformat.write(
        executed(figure, new.new_output("display_data", data={"text/html": WIDE}), log),
        folder / "01_probe.ipynb",
    )
    for shard in range(3):
        shard_run(folder, shard, *([failure(OWED)] if shard == 1 else []))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HSNB_ROOT", str(root))
        report.report_run("demo")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip(REASON)
    with browser(tmp_path_factory.mktemp("chromium"), flags=["--host-resolver-rules=MAP * ~NOTFOUND"]) as tab:
        yield tab


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_pages_without_a_network(name, dark, width, folder, page):
    page.asked.clear()
    page.said.clear()
    page.look(width, 800, dark)
    page.open((folder / name).as_uri())
    seen = page.js(LOOK)
    assert seen["wide"] <= width  # what is wider scrolls on its own
    assert seen["shown"] == seen["alt"] == seen["images"] == dict(zip(PAGES, (0, 3, 1, 0), strict=True))[name]
    assert seen["blank"] == 0 and seen["texts"] > 50
    assert seen["faint"] == [] and seen["cut"] == [] and seen["hidden"] == 0
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == [] and page.said == []


def test_the_look_of_this_test_finds_what_cannot_be_read(tmp_path, page):
    (tmp_path / "bad.html").write_text(
        "<body style='background:#111;color:#eee'><b style='background:#cfe8f7'>light on light</b><p style='color:#444'>dark on dark</p>"
        "<p style='width:2000px;color:#eee'>wide</p><img src='http://far.example/x.png' alt='x'><div class='jp-Cell'></div>"
        "<div class='jp-OutputArea' style='overflow:hidden;width:300px'><div class='jp-OutputArea-output' style='margin-left:10px'>"
        "<pre style='width:300px;color:#eee'>a log</pre></div></div></body>"
    )
    page.asked.clear()
    page.look(400, 800, True)
    page.open((tmp_path / "bad.html").as_uri())
    seen = page.js(LOOK)
    assert [text for _, text in seen["faint"]] == ["light on light", "dark on dark"]
    assert seen["cut"] == ["wide"]
    assert (seen["wide"] > 400, seen["shown"], seen["images"], seen["blank"]) == (True, 0, 1, 1)
    assert seen["hidden"] == 1
    assert "http://far.example/x.png" in page.asked
    page.said.clear()
