"""A notebook in a live kernel, as in JupyterLab: interrupted while its server starts and while it extracts, then run again in it."""

from __future__ import annotations

import json
import queue
import time

import pytest
from jupyter_client import KernelManager
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from benchmarks.lab import engine_processes
from tests.project import environment, make_project, tiny_params

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(1200)]
SAMPLES = 240
GIVEN = {"params": "params/tiny.yaml", "run": "live", "num_shards": 1, "in_flight_tokens": 60}


class Kernel:
    """A kernel in notebooks/, and the code cells of one notebook."""

    def __init__(self, project, name):
        nb = load_notebook_node(str(project / "notebooks" / f"{name}.ipynb"))
        self.cells = [c.source for c in parameterize_notebook(nb, GIVEN).cells if c.cell_type == "code" and c.source.strip()]
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(project / "notebooks"), env=environment())
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        self.pid = self.manager.provisioner.process.pid

    def run(self, code, interrupt_when=None, seconds=300):
        """Run a cell and return its error's name, "" for none; interrupt it as soon as `interrupt_when()` is true."""
        asked, end = self.client.execute(code), time.monotonic() + seconds
        while True:
            assert time.monotonic() < end, f"not done after {seconds} s: {code}"
            if interrupt_when is not None and interrupt_when():
                self.manager.interrupt_kernel()
                interrupt_when = None
            try:
                answer = self.client.get_shell_msg(timeout=0.1)
            except queue.Empty:
                continue
            if answer["parent_header"]["msg_id"] == asked:
                assert interrupt_when is None, f"ended before it was interrupted: {answer['content']}"
                return answer["content"].get("ename", "")

    def run_all(self, until=None):
        """Run the cells in order, those from the one that contains `until` on left out."""
        for code in self.cells:
            if until is not None and until in code:
                return
            assert self.run(code) == "", code

    def cell(self, part):
        (found,) = [code for code in self.cells if part in code]
        return found

    def servers(self):
        return engine_processes(self.pid)

    def no_servers(self, seconds=30):
        end = time.monotonic() + seconds
        while (left := self.servers()) and time.monotonic() < end:
            time.sleep(0.2)
        return left == []


@pytest.fixture
def kernel(tmp_path, engine):
    engine.stop()
    project = make_project(tmp_path / "project")
    tiny_params(project, SAMPLES, 30)
    live = Kernel(project, "03_extract")
    yield live
    live.client.stop_channels()
    live.manager.shutdown_kernel(now=True)


def test_interrupts_and_a_second_run_leave_no_server_behind(kernel, tmp_path, engine_starts):
    run = tmp_path / "project" / "outputs" / "live"
    published = run / "data" / "hidden_states"
    start, extraction = kernel.cell("session.open_servers"), kernel.cell("extract.run(")

    # While the server starts: its schedulers are there, and then nothing of it is.
    kernel.run_all(until="session.open_servers")
    assert kernel.run(start, lambda: any("sglang::scheduler" in p for p in kernel.servers())) == "KeyboardInterrupt"
    assert kernel.no_servers()

    # While it extracts: what is published stays, and the server is still the notebook's.
    for code in kernel.cells[kernel.cells.index(start) : kernel.cells.index(extraction)]:
        assert kernel.run(code) == "", code
    (first,) = [p for p in kernel.servers() if "launch_server" in p]
    assert kernel.run(extraction, lambda: published.is_dir() and len(list(published.glob("hs_*.safetensors"))) >= 5) == "KeyboardInterrupt"
    kept = {p.name: p.read_bytes() for p in published.glob("hs_*.safetensors")}
    assert 5 <= len(kept) < SAMPLES

    # All of it again in the same kernel: another server in the place of the first one, and none at the end.
    kernel.run_all(until="session.close_server")
    (second,) = [p for p in kernel.servers() if "launch_server" in p]
    assert second != first
    assert kernel.run(kernel.cell("session.close_server")) == ""
    assert kernel.no_servers()
    result = json.loads((run / "shard-0000.json").read_text())
    assert (result["samples"], result["ok"]) == (SAMPLES, True)
    assert result["done_before"] >= len(kept)
    assert {name: (published / name).read_bytes() for name in kept} == kept
    version = json.loads((run / "data" / "hsnb.json").read_text())["fingerprint"]["sglang"]
    for what in ("03_extract in a live kernel", "03_extract again in the same kernel"):
        engine_starts.note(what, version)


def test_a_kernel_that_is_shut_down_takes_its_server_along(kernel):
    kernel.run_all(until="probe.ensure")
    (launcher,) = [p for p in kernel.servers() if "launch_server" in p]
    import psutil

    family = [p for p in psutil.Process(kernel.pid).children(recursive=True) if p.is_running()]
    assert launcher and len(family) >= 3
    kernel.manager.shutdown_kernel()
    gone, left = psutil.wait_procs(family, timeout=30)
    assert left == [] and len(gone) == len(family)
