"""The pages in headless Chromium, with the network cut: figures shown, nothing asked for, nothing wider than a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from hsnb import report
from hsnb.health import examine
from hsnb.report.health import write_health
from tests.test_health import good, write_folder
from tests.test_notebook_params import make_project
from tests.test_report import OWED, PIXEL, executed, failure, new, shard_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDE = "<table><tr>" + "".join(f"<th>a_heading_{k}</th>" for k in range(30)) + "</tr></table>"
# Measures each page in a frame 400 pixels wide, as a phone has them.
LOOK = """<body><script>
const found = {}, pages = %s;
pages.forEach(name => {
  const frame = document.createElement("iframe");
  frame.style = "width:400px;height:800px;border:0"; frame.src = name;
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    const images = [...page.images];
    found[name] = {wide: root.scrollWidth, images: images.length, shown: images.filter(i => i.naturalWidth > 0).length,
                   alt: images.filter(i => i.alt).length, asked: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name)
                   .filter(n => !n.startsWith("data:"))};
    if (Object.keys(found).length == pages.length) document.body.innerText = "FOUND " + JSON.stringify(found) + " END";
  };
  document.body.append(frame);
});
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_pages_on_a_phone_without_a_network(tmp_path, monkeypatch):
    root = make_project(tmp_path / "project")
    monkeypatch.setenv("HSNB_ROOT", str(root))
    folder = root / "outputs" / "demo"
    (folder / "data").mkdir(parents=True)
    write_folder(folder / "data", good(5))
    write_health(examine(folder / "data"), folder)
    figure = new.new_output("display_data", data={"image/png": PIXEL})
    nbformat.write(executed(figure, new.new_output("display_data", data={"text/html": WIDE})), folder / "01_probe.ipynb")
    for shard in range(3):
        shard_run(folder, shard, *([failure(OWED)] if shard == 1 else []))
    report.report_run("demo")
    pages = ["index.html", "health.html", "01_probe.html", "03_extract-shard-0001.html"]
    (folder / "look.html").write_text(LOOK % json.dumps(pages))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND"]
    flags += [f"--user-data-dir={tmp_path / 'chromium'}", "--virtual-time-budget=20000", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, (folder / "look.html").as_uri()], capture_output=True, text=True, timeout=240)
    said = re.search(r"FOUND (\{.*\}) END", done.stdout)
    assert said, done.stdout[-500:] + done.stderr[-2000:]
    found = json.loads(said[1])
    assert "CONSOLE" not in done.stderr
    for name in pages:
        page = found[name]
        assert page["wide"] <= 400, (name, page)  # what is wider scrolls on its own
        assert page["shown"] == page["alt"] == page["images"], (name, page)
        assert page["asked"] == [], (name, page)
    assert [found[name]["images"] for name in pages] == [0, 3, 1, 0]
    assert Path(folder / "summary.json").is_file()
