"""Shared by all tests: one real server at a time, counted, and reused by every test that asks for the same setting."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from dataclasses import dataclass, field

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

# What CI's time has no room for is run by make test-engines: every family, order, signal and precision, the
# trainings and the cluster.
EVERYTHING = os.environ.get("HSNB_TEST_ENGINES") == "all"
LEFT_OUT = "left to make test-engines: HSNB_TEST_ENGINES=all runs it"

# Real engine starts that the whole suite makes at least; test_zz_engine_starts compares. Raise it when tests are added.
ENGINE_STARTS_NEEDED = 75 if EVERYTHING else 64


@dataclass
class EngineStarts:
    """Every SGLang that answered over HTTP, and every vLLM that captured, with a version of its own, in this test run."""

    seen: list[str] = field(default_factory=list)

    def note(self, what: str, version: str, engine: str = "SGLang") -> None:
        begins = {"SGLang": "0.5.", "vLLM": "0.32."}[engine]
        assert version.startswith(begins), f"{what} is no {engine}: version {version!r}"
        self.seen.append(f"{what} ({engine} {version})")


@pytest.fixture(scope="session")
def engine_starts(request) -> EngineStarts:
    starts = request.config.engine_starts = getattr(request.config, "engine_starts", None) or EngineStarts()
    return starts


def pytest_configure(config):
    config.engine_starts = EngineStarts()


def pytest_runtest_logreport(report):
    """Say at once why a test failed: a run that is cut short never comes to pytest's own summary."""
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n" + "\n".join(report.longreprtext.splitlines()[-40:]), flush=True)


def pytest_terminal_summary(terminalreporter, config):
    starts = config.engine_starts.seen
    terminalreporter.write_line(f"real engine starts: {len(starts)}")
    for line in starts:
        terminalreporter.write_line(f"  {line}")


def pytest_collection_modifyitems(items):
    """Unit tests first, so that a slip shows in seconds; then the engines, those of one server together; the count of starts last."""

    def rank(item):
        engine = item.get_closest_marker("engine")
        name = engine.args[0] if engine and engine.args else ""
        layer = 3 if item.name.startswith("test_zz_") else 2 if item.get_closest_marker("notebook") else 1 if engine else 0
        return layer, name == "smollm2", name  # the slowest to start last

    items.sort(key=rank)


def tiny(**server) -> dict:
    """Return a deployment of the tiny DeepSeek in float32; `server` overrides its server part."""
    return {
        "name": "tiny",
        "model": "demo:tiny-deepseek",
        "server": {"device": "cpu", "dtype": "float32", **server},
        "capture": {"boundaries": [2, 4, 6]},
        "data": {"source": "demo", "samples": 64},
    }


def first_boundary(body: str) -> int:
    """Return 1 where the installed SGLang cannot copy B_0 of this class (docs/models.md), else 0."""
    from hsnb.patch.bodies import BODIES
    from hsnb.patch.settings import version_tuple

    return int(version_tuple(importlib.metadata.version("sglang")) < version_tuple(BODIES[body].boundary_0_since))


def llama_boundaries(num_layers: int) -> list[int]:
    """Return every boundary that the installed SGLang gives of a Llama."""
    return list(range(first_boundary("LlamaModel"), num_layers + 1))


SETTINGS = {
    "smollm2": {
        "name": "smollm2",
        "model": "demo:smollm2-fp32",
        "server": {"device": "cpu", "dtype": "float32", "chunked_prefill_size": 64},
        "capture": {"boundaries": llama_boundaries(30)},
    },
    "tiny": {**tiny(chunked_prefill_size=64), "capture": {"boundaries": list(range(9))}},
    "kimi-shape": "params/kimi-shape.yaml",
}


@pytest.fixture(scope="session")
def engine(tmp_path_factory, engine_starts):
    """Return `engine(name)`: the running server of SETTINGS[name]. One runs at a time; another name stops it first."""
    from hsnb.params import Deployment
    from hsnb.server import Server

    current: dict[str, Server] = {}

    def get(name: str) -> Server:
        if name not in current or not current[name].running():
            stop()
            setting = SETTINGS[name]
            deployment = Deployment.load(setting) if isinstance(setting, str) else Deployment.parse(setting, origin=name)
            current[name] = Server.start(deployment, log_dir=tmp_path_factory.mktemp(name))
            engine_starts.note(name, current[name].sglang_version)
        return current[name]

    def stop() -> None:
        while current:
            current.popitem()[1].stop()

    get.stop = stop
    yield get
    stop()


@pytest.fixture(autouse=True)
def staging_in_threads(monkeypatch):
    """Stage in threads on every machine, as on one with few cores: tests that break a disk do so in this process."""
    monkeypatch.setattr("hsnb.extract.staging.CORES", 1 << 20)


@pytest.fixture
def disk(tmp_path):
    """Return mount(name, MiB, options): a file system of its own in memory."""
    mounted = []

    def mount(name: str, size: float, options: str = "mode=0700"):
        folder = tmp_path / name
        folder.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={round(1024 * size)}k,{options}", "tmpfs", folder], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"mounting is not allowed here: {made.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)
