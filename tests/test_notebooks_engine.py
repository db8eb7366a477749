"""The notebooks as a user runs them, on real servers: by the user's own line, by hsnb run, and killed in the middle."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import nbformat
import pexpect
import psutil
import pytest
import torch
import yaml
from datasets import load_from_disk

from hsnb.dumps import open_dump
from tests.conftest import EVERYTHING, SETTINGS
from tests.project import BIN, environment, make_project, shell, tiny_params

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(1500)]


@pytest.fixture
def alone(engine):
    """Stop the shared server: the notebooks start their own."""
    engine.stop()


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A project whose demo run is shared by the tests below, in their order."""
    return make_project(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A project whose demo data are 256 samples: a shard is 16."""
    project = make_project(tmp_path_factory.mktemp("small"))
    params = project / "params" / "demo.yaml"
    params.write_text(params.read_text().replace("samples: 2048", "samples: 256"))
    return project


def outputs_of(notebook: Path) -> str:
    """Return all text that an executed notebook shows."""
    nb = nbformat.read(notebook, 4)
    shown = [
        o.get("text", "") or o.get("data", {}).get("text/html", "") or o.get("data", {}).get("text/plain", "")
        for c in nb.cells
        for o in c.get("outputs", [])
    ]
    return "\n".join(shown)


def test_make_demos_job_from_nothing(demo, alone, engine_starts):
    """What `make demo` runs: server, probe, shard 0 of the demo data, reports, and a table."""
    done = shell(BIN / "python", "-m", "hsnb.demo", cwd=demo)
    assert done.returncode == 0, done.stdout + done.stderr
    engine_starts.note("make demo", fingerprint(demo)["sglang"])
    table = dict(line.split("  ", 1) for line in done.stdout.strip().splitlines() if "  " in line)
    table = {k.strip(): v.strip() for k, v in table.items()}
    assert table["samples"] == "128 of 128 (0 done before)"
    assert int(table["tokens"].replace(",", "")) > 20_000
    assert table["probe"].startswith("PASS, ")
    assert Path(table["reports"]).name == "index.html" and Path(table["states"]).is_dir()
    run = demo / "outputs" / "demo"
    states = sorted((run / "data" / "hidden_states").iterdir())
    assert len(states) == 128
    data = load_from_disk(str(run / "data"))
    for path in states[::40]:
        row = int(path.stem[3:])
        dump = open_dump(path)
        assert row % 16 == 0 and torch.equal(dump.token_ids, data[row]["input_ids"])
        assert (dump.dtype, dump.boundaries, dump.final, dump.hidden_size) == (torch.bfloat16, (2, 15, 27), "pre", 576)
    for name in ("00_server", "01_probe", "03_extract-shard-0000", "index"):
        page = (run / f"{name}.html").read_text()
        assert "<html" in page and len(page) > 1000
    assert "Verdict" in (run / "01_probe.html").read_text()


def fingerprint(project: Path, run: str = "demo") -> dict:
    return json.loads((project / "outputs" / run / "data" / "hsnb.json").read_text())["fingerprint"]


def test_the_users_own_line_in_a_pipe_then_on_a_terminal(small, alone, engine_starts):
    """cd notebooks && ../.venv/bin/papermill 03_extract.ipynb --p shard 4"""
    line = "../.venv/bin/papermill 03_extract.ipynb --p shard 4"
    piped = shell("bash", "-o", "pipefail", "-c", f"{line} 2>&1 | cat", cwd=small / "notebooks", stdin=subprocess.DEVNULL)
    assert piped.returncode == 0, piped.stdout
    engine_starts.note("papermill in a pipe", fingerprint(small)["sglang"])
    run = small / "outputs" / "demo"
    rows = sorted(int(p.stem[3:]) for p in (run / "data" / "hidden_states").iterdir() if int(p.stem[3:]) % 16 == 4)
    assert rows == list(range(4, 256, 16))
    notebook = run / "03_extract-shard-0004.ipynb"
    assert "16 of 16 samples" in outputs_of(notebook)
    assert notebook.with_suffix(".html").is_file()
    first = json.loads((run / "shard-0004.json").read_text())
    assert (first["samples"], first["done_before"], first["ok"]) == (16, 0, True)
    assert sorted(p.name for p in (small / "notebooks").iterdir()) == [
        "00_server.ipynb",
        "01_probe.ipynb",
        "02_divergence.ipynb",
        "03_extract.ipynb",
        "04_handoff.ipynb",
    ]

    output, status = pexpect.run(
        f"bash -c '{line}'", cwd=str(small / "notebooks"), env=environment(), withexitstatus=True, timeout=600, encoding="utf-8"
    )
    assert status == 0, output
    engine_starts.note("papermill on a terminal", fingerprint(small)["sglang"])
    assert json.loads((run / "shard-0004.json").read_text()) == first and "16 of 16 samples" in outputs_of(notebook)  # kept
    second = json.loads((run / "shard-0004.again.json").read_text())
    assert (second["samples"], second["done_before"], second["new_tokens"], second["tokens"]) == (16, 16, 0, first["tokens"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--p shrad 4", ["unknown parameter 'shrad'", "shard, num_shards", "a typo for 'shard'"]),
        ("-p shard 99", ["0..15 (16 shards)"]),
        ("-p layout specfroge", ["layout"]),
        ("-p params params/dmeo.yaml", ["demo.yaml"]),
    ],
)
def test_a_slip_is_refused_before_a_kernel_starts(arguments, words, demo):
    before = time.monotonic()
    done = shell("bash", "-c", f"../.venv/bin/papermill 03_extract.ipynb {arguments}", cwd=demo / "notebooks", stdin=subprocess.DEVNULL)
    assert done.returncode != 0
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - before < 60  # no server was started: that alone takes a good half minute
    assert not (demo / "outputs" / "demo" / "03_extract-shard-0099.ipynb").exists()


def test_the_probe_notebook_on_a_running_server(engine, tmp_path):
    project = make_project(tmp_path / "project")
    server = engine("smollm2")
    (project / "params" / "all.yaml").write_text(yaml.safe_dump(SETTINGS["smollm2"]))
    prompts = "['Hidden states are not layer outputs.']"
    done = shell(
        BIN / "hsnb", "run", "01_probe", "-p", "params", "params/all.yaml", "-p", "server_url", server.url, "-p", "run", "probe", "-p", "prompts", prompts, "--json",
        cwd=project,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((project / "outputs" / "probe" / "probe.json").read_text())
    assert result["verdict"] == "PASS"
    assert {"ids 1..10", "fox sentence", "prompt 1", "same", "norm", "layer"} <= {c["name"].split(":")[0] for c in result["checks"]}
    assert result["layer_witnesses"] == ["the second tap", "transformers"]
    assert "Verdict: PASS" in outputs_of(project / "outputs" / "probe" / "01_probe.ipynb")
    assert server.running()

    (project / "params" / "other.yaml").write_text(yaml.safe_dump({**SETTINGS["smollm2"], "capture": {"boundaries": [3, 16, 28]}}))
    done = shell(
        BIN / "hsnb",
        "run",
        "01_probe",
        "-p",
        "params",
        "params/other.yaml",
        "-p",
        "server_url",
        server.url,
        "-p",
        "run",
        "other",
        cwd=project,
    )
    assert done.returncode == 1
    assert "[3, 16, 28]" in done.stdout + done.stderr
    assert "[3, 16, 28]" in (project / "outputs" / "other" / "01_probe.html").read_text()


def test_the_server_notebook_keeps_its_server_until_hsnb_stop(tmp_path, alone, engine_starts):
    project = make_project(tmp_path / "project")
    tiny_params(project, 4, 10)
    before = Leftovers()
    done = shell(BIN / "hsnb", "run", "00_server", "-p", "params", "params/tiny.yaml", "-p", "run", "up", "-p", "keep", "True", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(name.startswith("sglang") for name in before.processes())
    text = outputs_of(project / "outputs" / "up" / "00_server.ipynb")
    assert "DeepseekV2Model" in text and "SGLANG_HS_DUMP_BOUNDARIES" in text
    stopped = shell(BIN / "hsnb", "stop", "--all", "--json", cwd=project)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    before.assert_none(15)
    engine_starts.note("00_server, kept", "0.5." + text.split("0.5.")[1].split("<")[0].split()[0])


def test_the_command_line_from_serve_to_stop(tmp_path, alone, engine_starts):
    project = make_project(tmp_path / "project")
    tiny_params(project, 10, 10)
    before = Leftovers()

    def hsnb(*words: str, status: int = 0) -> dict:
        done = shell(BIN / "hsnb", *words, "--json", cwd=project)
        assert done.returncode == status, done.stdout + done.stderr
        return json.loads(done.stdout)

    up = hsnb("serve", "params/tiny.yaml", "--detach")
    engine_starts.note("hsnb serve --detach", up["sglang"])
    assert (up["boundaries"], up["final"], up["capture"]) == ([2, 4, 6], "pre", "armed")
    verdict = hsnb("probe", "params/tiny.yaml", "--server", up["url"])
    assert (verdict["verdict"], verdict["boundaries"]) == ("PASS", [2, 4, 6])
    assert (
        "runs without the plug-in"
        in hsnb("probe", "params/tiny.yaml", "--server", up["url"], "--spool", str(tmp_path), status=2)["error"]["got"]
    )
    assert hsnb("prepare", "params/tiny.yaml", "--run", "x")["rows"] == 10
    shards = ["--shards", "0-1", "-p", "num_shards", "2", "-p", "params", "params/tiny.yaml", "-p", "run", "x"]
    ran = hsnb("run", "03_extract", *shards, "-p", "server_url", up["url"])
    assert ran["ok"] is True
    assert len(list((project / "outputs" / "x" / "data" / "hidden_states").iterdir())) == 10
    assert Path(hsnb("report", "x")["index"]).is_file()
    hsnb("stop", up["url"])
    before.assert_none(15)
    assert "no server" in str(hsnb("stop", status=2)["error"]).lower()


# -- killed in the middle -------------------------------------------------------------------------------------------


class Leftovers:
    """Processes called sglang and files of /dev/shm that were not there before."""

    def __init__(self):
        self.pids, self.shm = set(psutil.pids()), self._shm()

    @staticmethod
    def _shm() -> set[str]:
        return {str(p) for p in Path("/dev/shm").rglob("*")}

    def processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter(["pid", "name", "cmdline", "status"]):
            info = process.info
            words = " ".join(info["cmdline"] or [])
            if (
                info["pid"] not in self.pids
                and info["status"] != psutil.STATUS_ZOMBIE
                and (info["name"].startswith("sglang") or "sglang" in words)
            ):
                found.append(words or info["name"])
        return found

    def files(self) -> set[str]:
        return {f for f in self._shm() - self.shm if f != "/dev/shm/hsnb"}

    def assert_none(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (self.processes() or self.files()) and time.monotonic() < end:
            time.sleep(0.3)
        assert (self.processes(), self.files()) == ([], set())


def published(project: Path) -> dict[str, bytes]:
    folder = project / "outputs" / "killed" / "data" / "hidden_states"
    return {p.name: p.read_bytes() for p in folder.glob("hs_*.safetensors")} if folder.is_dir() else {}


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.05)


SIGNALS = [(signal.SIGTERM, signal.SIGKILL)] + ([(signal.SIGKILL, signal.SIGTERM)] if EVERYTHING else [])


@pytest.mark.parametrize(("starting", "extracting"), SIGNALS, ids=lambda sent: sent.name)
def test_a_killed_papermill_leaves_nothing_and_the_next_run_goes_on(starting, extracting, tmp_path, alone, engine_starts):
    """Killed by one signal while the server starts, by another while it extracts."""
    project = make_project(tmp_path / "project")
    tiny_params(project, 240, 30)
    line = [
        "03_extract.ipynb",
        "--p",
        "params",
        "params/tiny.yaml",
        "--p",
        "run",
        "killed",
        "--p",
        "num_shards",
        "1",
        "--p",
        "in_flight_tokens",
        "60",
    ]

    def start() -> tuple[subprocess.Popen, Leftovers]:
        before = Leftovers()
        return subprocess.Popen(
            [str(BIN / "papermill"), *line], cwd=project / "notebooks", env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ), before  # fmt: skip

    process, before = start()
    wait_for(lambda: any("sglang::" in p for p in before.processes()), process)  # the server is starting: its schedulers are there
    assert published(project) == {}
    os.kill(process.pid, starting)
    process.wait(15)
    before.assert_none(15)

    process, before = start()
    wait_for(lambda: len(published(project)) >= 5, process)
    engine_starts.note("03_extract, killed", fingerprint(project, "killed")["sglang"])
    os.kill(process.pid, extracting)
    process.wait(15)
    before.assert_none(15)
    kept = published(project)
    assert 5 <= len(kept) < 240

    process, before = start()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    engine_starts.note("03_extract, resumed", fingerprint(project, "killed")["sglang"])
    before.assert_none(15)
    result = json.loads((project / "outputs" / "killed" / "shard-0000.json").read_text())
    assert (result["samples"], result["ok"]) == (240, True)
    assert len(kept) <= result["done_before"] <= len(kept) + 5  # what had a file, and what was staged and noted
    now = published(project)
    assert sorted(now) == sorted(f"hs_{n}.safetensors" for n in range(240))
    assert {name: now[name] for name in kept} == kept  # a published file never changes
    assert not (project / "outputs" / "killed" / "data" / ".staging").exists()
    assert list((project / "outputs" / "killed" / "data" / "hidden_states").glob(".*")) == []
