"""JupyterLab as `make lab` starts it, and what a reader does in it: open, Run All, move a widget. For browser tests and pictures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil

from benchmarks.browser import Page

BIN = Path(sys.executable).parent
PANEL = "[...jupyterapp.shell.widgets('main')].find(w => w.context?.path?.endsWith('.ipynb'))"
SETTINGS = {  # nothing that waits for a click, asks the network, or leaves cells off the screen without a picture
    "@jupyterlab/apputils-extension:notification": {"checkForUpdates": False, "fetchNews": "false"},
    "@jupyterlab/apputils-extension:themes": {"adaptive-theme": True},  # dark for those who like it dark
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}


@dataclass
class Lab:
    """A JupyterLab that answers, the folder that it shows, and a tab of a browser."""

    url: str
    folder: Path
    page: Page
    process: subprocess.Popen

    def open(self, name: str, dark: bool = False, width: int = 1400, mode: str = "lab") -> None:
        """Open a notebook of the folder and wait until its kernel is idle. `mode`: "lab", or "doc" for one document alone."""
        self.page.look(width, 1000, dark=dark)
        self.page.open(f"{self.url}/{mode}/tree/{name}?reset", 120)  # without the tabs of the last one
        self.page.wait("window.jupyterapp && document.querySelector('.jp-Notebook .jp-Cell') && 1", 120, "JupyterLab shows the notebook")
        self.page.wait(f"{PANEL}?.context?.path == {json.dumps(name)} && {self._status()} == 'idle'", 180, "the kernel is idle")

    @staticmethod
    def _status() -> str:
        return f"{PANEL}?.sessionContext?.session?.kernel?.status"

    def run_all(self, seconds: float) -> nbformat.NotebookNode:
        """Choose Run > Run All Cells in the menu with the mouse, wait until nothing runs, save, and return the notebook's file."""
        self.page.click(".jp-Notebook .jp-Cell")
        self.page.click(".lm-MenuBar-item", "Run")
        self.page.click('.lm-Menu-item[data-command="notebook:run-all-cells"], .lm-Menu-item[data-command="runmenu:run-all"]')
        cells = f"[...{PANEL}.content.model.cells].filter(c => c.type == 'code' && c.sharedModel.source.trim())"
        ended = f"{cells}.every(c => c.executionState != 'running' && c.executionCount)"
        failed = f"{cells}.some(c => [...Array(c.outputs.length).keys()].some(i => c.outputs.get(i).type == 'error'))"
        self.page.wait(f"({failed} || {ended}) && {self._status()} == 'idle'", seconds, "all cells have run")
        return self.saved()

    def saved(self) -> nbformat.NotebookNode:
        """Save the notebook that is shown and read its file."""
        path = self.page.js(f"jupyterapp.commands.execute('docmanager:save').then(() => {PANEL}.context.path)")
        return nbformat.read(self.folder / path, as_version=4)

    def servers(self) -> list[str]:
        """Return the processes of SGLang and of its supervisor below JupyterLab's kernels."""
        return engine_processes(self.process.pid)

    def close_kernel(self) -> None:
        """End the kernel of the notebook that is shown, as File > Close and Shut Down does, and wait until the server says so."""
        self.page.js(f"window.jupyterapp && {PANEL}?.sessionContext.shutdown()")
        end = time.monotonic() + 60
        while kernels(self.url):
            assert time.monotonic() < end, "the kernel did not end"
            time.sleep(0.2)


def engine_processes(pid: int) -> list[str]:
    """Return what runs of SGLang, or of what supervises it, below a process, by name or command line."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            words = f"{child.name()} {' '.join(child.cmdline())}"
            if ("sglang" in words or "hsnb.server.supervisor" in words) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(words)
        except psutil.Error:
            continue
    return found


def kernels(url: str) -> list[dict]:
    """Return the kernels that a Jupyter server runs."""
    with urllib.request.urlopen(f"{url}/api/kernels", timeout=60) as answer:
        return json.load(answer)


@contextmanager
def jupyterlab(folder: Path, state: Path, page: Page) -> Iterator[Lab]:
    """Start JupyterLab on `folder`, its settings and files of its own in `state`; it and its kernels end with the block."""
    settings = state / "settings"
    for plugin, values in SETTINGS.items():
        package, _, name = plugin.partition(":")
        file = settings / package / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k != "HSNB_ROOT" and not k.startswith("PYTEST")} | {
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"),
        "JUPYTER_DATA_DIR": str(state / "data"),
        "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
        "JUPYTER_CONFIG_DIR": str(state / "config"),
    }
    options = [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--no-browser", "--allow-root"]
    options += ["--LabApp.expose_app_in_browser=True", f"--notebook-dir={folder}"]
    with (state / "lab.log").open("w") as log:
        process = subprocess.Popen(
            [BIN / "jupyter", "lab", *options], cwd=folder.parent, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + 120
            while True:
                try:
                    kernels(url)
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < end, (state / "lab.log").read_text()[-2000:]
                    time.sleep(0.3)
            yield Lab(url, folder, page, process)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
