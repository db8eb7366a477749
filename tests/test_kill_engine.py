"""SIGKILL at fifty random moments over one shard: the client forty times, the real server ten, once while it starts.

In the end the same samples, each once, in files that never changed once they were there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from datasets import load_from_disk

from hsnb import extract, probe
from hsnb.data import load_prepared, prepare
from hsnb.dumps import open_dump
from hsnb.extract.output import checksum
from hsnb.ledger import files as ledger_files
from hsnb.ledger import read_ledgers
from hsnb.params import Deployment
from hsnb.server import Server
from hsnb.trainers.speculators import SpeculatorsLayout
from hsnb.verify import verify
from tests.project import environment, make_project, tiny_params
from tests.reference import relative_l2
from tests.zygote import Zygote

pytestmark = [pytest.mark.engine("tiny, killed"), pytest.mark.timeout(1800)]

SAMPLES, CLIENT_KILLS, SERVER_KILLS, SEVERAL_KILLS = 300, 40, 10, 6
SLACK = 5  # samples that may be published before a killer on a busy machine sees that its moment has come
SEED = 20261130


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("kill") / "project")
    params = tiny_params(folder, SAMPLES, 16)
    tree = yaml.safe_load(params.read_text())
    tree["server"]["env"] = {"OMP_NUM_THREADS": "1"}  # threads of so small a model wait for each other longer than they work
    params.write_text(yaml.safe_dump(tree))
    return folder


@pytest.fixture(scope="module")
def deployment(project) -> Deployment:
    return Deployment.load(project / "params" / "tiny.yaml")


@pytest.fixture(scope="module")
def zygote(project):
    zygote = Zygote({**environment(), "HSNB_ROOT": str(project)})
    yield zygote
    zygote.close()


@pytest.fixture
def float32(monkeypatch):
    """Publish float32 here too, as the zygote's clients do."""
    monkeypatch.setattr(SpeculatorsLayout, "DTYPE", torch.float32)


def data_of(project: Path, run: str) -> Path:
    return project / "outputs" / run / "data"


def make_run(project: Path, deployment: Deployment, run: str) -> Path:
    """Prepare a run's data; every run has the same."""
    folder = data_of(project, run)
    if data_of(project, "calm").exists():
        folder.parent.mkdir()
        shutil.copytree(
            data_of(project, "calm"), folder, ignore=shutil.ignore_patterns("hidden_states", "ledger", "hsnb.json", "*.sqlite*")
        )
    else:
        prepare(deployment, folder)
    return folder


def sums(folder: Path) -> dict[str, str]:
    """Return {file: xxh3-128} of everything that is published."""
    return {p.name: checksum(p) for p in (folder / "hidden_states").glob("hs_*.safetensors")} if folder.exists() else {}


class Client:
    """Clients of one run on one server, forked one after the other."""

    def __init__(self, project: Path, zygote: Zygote, server: Server, run: str, *options: str):
        self.zygote, self.log = zygote, project / f"{run}.log"
        self.args = ["params/tiny.yaml", "--run", run, "--num-shards", "1", "--server", server.url, *options]

    def whole(self) -> float:
        """Run one to its end and return the seconds it took."""
        before = time.monotonic()
        pid = self.zygote.start(self.args, self.log)
        assert self.zygote.wait(pid) == 0, self.log.read_text()[-3000:]
        return time.monotonic() - before

    def killed(self, moment: Callable[[float], bool]) -> None:
        """Start one and kill it once `moment(seconds since)` says so."""
        pid, before = self.zygote.start(self.args, self.log), time.monotonic()
        while not moment(time.monotonic() - before) and psutil.pid_exists(pid):
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself: its status says so below
            os.kill(pid, signal.SIGKILL)
        status = self.zygote.wait(pid)
        assert status == -signal.SIGKILL, self.log.read_text()[-3000:]


def unchanged(before: dict[str, str], now: dict[str, str]) -> None:
    """A published file is there for good, and the same."""
    assert {name: now.get(name) for name in before} == before


def moments(folder: Path, kills: int, samples: float, startup_s: float, cycle_s: float, rng: random.Random) -> Iterator[Callable]:
    """Yield `kills` random moments: a third while what is killed starts, the others after some more samples and a part of a cycle.

    Told by samples and not by a clock, they are spread over the shard on a slow machine and on a fast one: by the last one
    about `samples` of those that are left are published, and never all.
    """
    each = max(1, round(2 * samples / (kills * 2 / 3)))
    for n in range(kills):
        have = count(folder)
        early = rng.uniform(0.0, startup_s)
        if rng.random() < 1 / 3:
            yield partial(_early, folder, have, early)
        else:
            more = min(rng.randint(0, each), max(0, SAMPLES - have - SLACK * (kills - n)))
            yield partial(_after_samples, folder, have + more, 0.0 if more else early, rng.uniform(0.0, cycle_s), [])


def _early(folder: Path, have: int, after_s: float, since: float) -> bool:
    return since > after_s or count(folder) > have


def _after_samples(folder: Path, goal: int, after_s: float, jitter_s: float, reached: list[float], since: float) -> bool:
    if not reached and since >= after_s and count(folder) >= goal:
        reached.append(since)
    return bool(reached) and since >= reached[0] + jitter_s


def count(folder: Path) -> int:
    """Return how many files are published."""
    try:
        return sum(name.startswith("hs_") for name in os.listdir(folder / "hidden_states"))
    except FileNotFoundError:
        return 0


def kill_clients(client: Client, folder: Path, moments: Iterator[Callable]) -> int:
    """Kill a client at each of `moments`; return how many of them had published something new."""
    published, busy = sums(folder), 0
    for moment in moments:
        client.killed(moment)
        now = sums(folder)
        unchanged(published, now)
        busy += len(now) > len(published)
        published = now
    assert len(published) < SAMPLES, "the shard was whole before the last kill: they were not spread over it"
    return busy


def whole(folder: Path, spool: Path) -> None:
    """Every sample once, entered once, with its own token ids and rows, and nothing beside."""
    table, data = load_from_disk(str(folder)), load_prepared(folder)
    rows = [int(r) for p in ledger_files(folder) for r in _rows(p)]
    assert sorted(rows) == list(range(SAMPLES))
    found = verify(folder)
    assert found.ok, found.text()
    for row, entry in read_ledgers(folder).items():
        dump = open_dump(folder / entry.file)
        assert torch.equal(dump.token_ids, table[row]["input_ids"]) and dump.num_tokens == data.lengths[row]
    assert sorted(p.name for p in (folder / "hidden_states").iterdir()) == sorted(f"hs_{r}.safetensors" for r in range(SAMPLES))
    assert not (folder / ".staging").exists() and not (folder / "set-aside").exists()
    writers = {f"hsnb-{_meta(p, 'writer')}-" for p in ledger_files(folder)}
    assert [p for p in spool.glob("*.safetensors") if open_dump(p).request_id.startswith(tuple(writers))] == []


def _meta(path: Path, key: str) -> str:
    with sqlite3.connect(path) as db:
        return db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]


def _rows(path: Path) -> list[int]:
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM moving").fetchone()[0] == 0
        return [row for (row,) in db.execute("SELECT row FROM done")]


def test_fifty_kills_over_one_shard(project, deployment, zygote, engine, engine_starts, float32, tmp_path, monkeypatch):
    monkeypatch.setenv("HSNB_ROOT", str(project))
    engine.stop()
    rng = random.Random(SEED)
    calm, torn, several = (make_run(project, deployment, run) for run in ("calm", "torn", "several"))
    with Server.start(deployment, log_dir=tmp_path) as server:
        engine_starts.note("tiny, whose clients are killed", server.sglang_version)
        probe.ensure(server)
        spool = set(server.spool.iterdir())

        undisturbed = Client(project, zygote, server, "calm", "--in-flight-tokens", "1")
        seconds = undisturbed.whole()
        nothing = undisturbed.whole()  # what a client takes that has nothing to do
        rate = SAMPLES / max(seconds - nothing, 0.1)
        whole(calm, server.spool)

        client = Client(project, zygote, server, "torn", "--in-flight-tokens", "1")
        busy = kill_clients(client, torn, moments(torn, CLIENT_KILLS, 0.6 * SAMPLES, nothing, 1 / rate, rng))
        assert busy >= CLIENT_KILLS / 4

        many = Client(project, zygote, server, "several")
        kill_clients(many, several, moments(several, SEVERAL_KILLS, 0.4 * SAMPLES, nothing, 1 / rate, rng))
        many.whole()
        whole(several, server.spool)
        left = [open_dump(p).request_id for p in set(server.spool.iterdir()) - spool]
        assert len(left) <= 1 and all(_meta(ledger_files(torn)[0], "writer") in rid for rid in left)  # what the last kill left

    print(f"{SAMPLES} samples in {seconds:.1f} s, {nothing:.1f} s of it the start; {busy} of {CLIENT_KILLS} killed clients had published; "
          f"{count(torn)} samples published by then")  # fmt: skip
    starts = kill_servers(deployment, torn, tmp_path, rng, rate)
    for n in range(starts):
        engine_starts.note(f"tiny, killed {n}", deployment.name and json.loads((torn / "hsnb.json").read_text())["fingerprint"]["sglang"])

    assert sums(torn) == sums(calm)  # byte for byte
    for name in sums(calm):
        a, b = (open_dump(folder / "hidden_states" / name).states() for folder in (calm, several))
        assert relative_l2(b, a).max() < 1e-5


def kill_servers(deployment: Deployment, folder: Path, log_dir: Path, rng: random.Random, rate: float) -> int:
    """Extract the rest on a server of our own, killed SERVER_KILLS times, once while it starts; return how often it was started."""
    data, killed, trouble = load_prepared(folder), [], []
    with Server.start(deployment, log_dir=log_dir) as server:
        before = time.monotonic()
        probe.ensure(server)
        when = moments(folder, SERVER_KILLS, 0.6 * (SAMPLES - count(folder)), time.monotonic() - before, 1 / rate, rng)
        over = threading.Event()

        def killer() -> None:
            last = 0
            try:
                for moment in when:
                    if len(killed) == SERVER_KILLS // 2:  # this time before it is ready
                        pid = wait_for_scheduler(not_pid=last, over=over)
                    else:
                        while server.armed[0].pid == last and not over.wait(0.02):
                            pass
                        before = time.monotonic()
                        while not moment(time.monotonic() - before) and not over.wait(0.002):
                            pass
                        pid = rng.choice([server.armed[0].pid, server.pid])
                        last = server.armed[0].pid
                    published = sums(folder)
                    if over.is_set():
                        break
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    time.sleep(0.2)
                    unchanged(published, sums(folder))
            except BaseException as error:
                trouble.append(error)

        thread = threading.Thread(target=killer, daemon=True)
        thread.start()
        result = extract.run(server, data, num_shards=1, in_flight_tokens=1, limits=extract.Limits(restarts=20, hang_s=30))
        over.set()
        thread.join(10)
        assert not trouble, trouble
        assert len(killed) == SERVER_KILLS, "the shard was whole before the last kill"
        assert result.ok and result.restarts >= SERVER_KILLS
        whole(folder, server.spool)
        assert server.running() and probe.require_receipt(server).verdict == "PASS"
    return result.restarts


def wait_for_scheduler(not_pid: int, over: threading.Event) -> int:
    """Return the pid of a scheduler of ours that is not ready yet."""
    while not over.wait(0.05):
        for process in psutil.Process().children(recursive=True):
            try:
                name = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if "sglang::scheduler" in name and process.pid != not_pid:
                return process.pid
    return 0
