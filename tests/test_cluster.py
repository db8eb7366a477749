"""What a cluster run decides: which servers go where, which shard is dealt when, what a loss means. Ray is played by a stand-in."""

import importlib.util
import json
import socket
import subprocess
import sys

import pytest

from hsnb import cli
from hsnb.cluster import driver as drivers
from hsnb.cluster.driver import run_on_cluster
from hsnb.cluster.plan import on_place, places
from hsnb.cluster.queue import LOSSES, PAUSE_S, Shards
from hsnb.errors import DataError, ExtractError, ParamsError, ServerError
from hsnb.trainers.place import file_digest
from tests.cluster_stand_in import StandIn, deployment, driving, events, node, whole
from tests.project import ROOT, environment, make_project

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make setup-ray")


# -- places -----------------------------------------------------------------------------------------------------------


def test_a_cpu_server_takes_its_whole_node_and_a_head_without_cpus_takes_none():
    found = places(deployment(), [node("head", 0), node("1", 2), node("2", 16)])
    assert [(p.node.id, p.cpus, p.gpus, p.of) for p in found] == [("1", 2, 0, 1), ("2", 16, 0, 1)]


def test_a_node_takes_as_many_servers_as_its_gpus_hold():
    found = places(deployment(device="cuda", tp_size=4), [node("1", 64, 8), node("2", 64, 4), node("3", 64, 2)])
    assert [(*p.key, p.gpus, p.cpus, p.of) for p in found] == [("1", 0, 4, 4, 2), ("1", 1, 4, 4, 2), ("2", 0, 4, 4, 1)]
    auto = places(deployment(device="auto"), [node("1", 8, 1), node("2", 8, 0)])
    assert [(p.node.id, p.gpus) for p in auto] == [("1", 1)]


def test_a_server_that_no_node_holds_is_refused_in_words():
    with pytest.raises(ParamsError, match=r"tp_size 16 over 1 node, and 8 GPUs on the largest of 2 nodes.*with server\.nnodes"):
        places(deployment(device="cuda", tp_size=16), [node("1", 64, 8), node("2", 64, 8)])
    assert places(deployment(device="cuda", tp_size=16), []) == []  # none yet: they may come


def test_two_servers_on_a_node_have_ports_and_spools_of_their_own():
    two = places(deployment(device="cuda", tp_size=1, port=30000), [node("1", 8, 2)])
    assert [on_place(deployment(port=30000), p) for p in two] == [{"port": 0}, {"port": 0}]
    (one,) = places(deployment(port=30000), [node("1")])
    assert on_place(deployment(port=30000), one) == {}
    with pytest.raises(ParamsError, match=r"server\.spool /dev/shm/x for 2 servers on one node"):
        on_place(deployment(spool="/dev/shm/x"), two[0])


# -- the queue --------------------------------------------------------------------------------------------------------


def test_a_lost_shard_waits_a_moment_and_is_given_up_in_the_end():
    now = [0.0]
    shards = Shards([7, 8], clock=lambda: now[0])
    assert shards.take() == 7
    assert shards.lost(7, "node down") and shards.left == 2
    assert shards.take() == 8 and shards.take() is None  # 7 is not due yet
    for n in range(2, LOSSES + 1):
        now[0] += PAUSE_S
        assert shards.take() == 7
        assert shards.lost(7, f"down again, {n}") is (n < LOSSES)
    assert shards.given_up == {7: f"lost {LOSSES} times, the last time: down again, {LOSSES}"}
    shards.settle(8, "whole")
    assert (shards.left, shards.results) == (0, {8: "whole"})


# -- the loop, with a stand-in for Ray ----------------------------------------------------------------------------------


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Return drive(ray, shards, server...): a driver that has run its loop in a project of its own."""
    return driving(tmp_path, monkeypatch)


def test_servers_are_started_once_and_pull_the_shards(drive):
    ray = StandIn([node("a"), node("b")], whole)
    driver = drive(ray, range(8))
    assert [c[:2] for c in ray.calls if c[1] == "start"] == [("a", "start"), ("b", "start")]
    assert len([c for c in ray.calls if c[1] == "prepare"]) == 1  # by the first that is ready, before any shard
    assert [c[1] for c in ray.calls].index("prepare") < [c[1] for c in ray.calls].index("run")
    assert [s for _, s in sorted(events(driver, "done"), key=lambda e: e[1])] == list(range(8))
    assert {n for n, _ in events(driver, "done")} == {"a", "b"}
    assert all(driver.result(s).ok and driver.result(s).notebook.name == f"nb-{s}" for s in range(8))


def test_no_more_servers_than_shards(drive):
    ray = StandIn([node("a"), node("b"), node("c")], whole)
    drive(ray, [3])
    assert [c[0] for c in ray.calls if c[1] == "start"] == ["a"]


def test_a_node_that_goes_takes_its_shard_back_to_the_queue(drive):
    def answer(node_id, method, args):
        if (node_id, method) == ("b", "run"):
            del ray.living["b"]
            raise ray.RayError("the node died")
        return whole(node_id, method, args)

    ray = StandIn([node("a"), node("b")], answer)
    driver = drive(ray, range(8))
    ((gone, shard),) = events(driver, "dropped")
    assert gone == "b" and events(driver, "done").count(("a", shard)) == 1
    assert sorted(driver.shards.results) == list(range(8)) and driver.shards.losses == {shard: 1}


def test_a_node_that_comes_later_gets_a_server(drive):
    def answer(node_id, method, args):
        ray.living.setdefault("late", node("late"))
        return whole(node_id, method, args)

    ray = StandIn([node("a")], answer)
    assert "late" in {n for n, _ in events(drive(ray, range(8)), "done")}


def test_a_server_that_was_lost_does_not_fail_its_shard_but_owed_samples_do(drive):
    failed = {"ok": False, "error": "ServerError: the server at http://a is lost", "lost": True}
    said = [failed, {"ok": False, "error": f"ExtractError: shard-0001 is {drivers.BUSY}, expected", "lost": False}]

    def answer(node_id, method, args):
        tree = whole(node_id, method, args)
        if method == "run" and args[1]["shard"] == 1:
            return {**tree, **(said.pop(0) if said else {"ok": False, "error": "ExtractError: shard 1: 2 of 4 samples owed"})}
        return tree

    driver = drive(StandIn([node("a")], answer), [0, 1])
    assert driver.shards.losses == {1: 2} and driver.result(0).ok
    assert (driver.result(1).ok, driver.result(1).error) == (False, "ExtractError: shard 1: 2 of 4 samples owed")


def test_a_server_that_starts_nowhere_ends_the_run_with_its_reason(drive):
    def answer(node_id, method, args):
        raise ServerError(got="the server ended after 3 s", expected="one that becomes ready", likely="out of memory", next="a larger node")

    ray = StandIn([node("a"), node("b")], answer)
    driver = drive(ray, [0, 1])
    assert len(ray.calls) == drivers.STARTS * 2 and sorted(driver.shards.given_up) == [0, 1]
    assert "the server ended after 3 s" in driver.result(0).error and not driver.result(0).ok
    assert driver.result(1).notebook.name == "03_extract-shard-0001.ipynb"


def test_data_that_cannot_be_prepared_end_the_run_at_once(drive):
    def answer(node_id, method, args):
        if method == "prepare":
            raise DataError(got="row 3", expected="input_ids", likely="x", next="y")
        return whole(node_id, method, args)

    with pytest.raises(DataError, match="row 3"):
        drive(StandIn([node("a")], answer), [0])


def test_what_another_disk_holds_is_copied(drive, tmp_path):
    theirs = {"nb": b"notebook", "json": b"{}"}
    for name, content in theirs.items():
        (tmp_path / f"there-{name}").write_bytes(content)
    digests = {str(tmp_path / name): file_digest(tmp_path / f"there-{name}") for name in theirs}
    (tmp_path / "json").write_bytes(b"{}")  # the same here: not copied

    def answer(node_id, method, args):
        if method == "read":
            return theirs[args[0].rpartition("/")[2]]
        return {**whole(node_id, method, args), "files": digests} if method == "run" else whole(node_id, method, args)

    ray = StandIn([node("a")], answer)
    drive(ray, [0])
    assert (tmp_path / "nb").read_bytes() == b"notebook"
    assert [c[2] for c in ray.calls if c[1] == "read"] == [(str(tmp_path / "nb"),)]


# -- what is refused, and what is not imported ---------------------------------------------------------------------------


def test_a_servers_url_and_ray_exclude_each_other():
    with pytest.raises(ParamsError, match="--ray and -p server_url"):
        run_on_cluster(ROOT / "notebooks" / "03_extract.ipynb", {"server_url": "http://127.0.0.1:1"}, [0])


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return refused(*words): the one line that `hsnb run 03_extract.ipynb --shards 0-15 words...` says, having written nothing."""
    project = make_project(tmp_path / "clone")
    monkeypatch.setenv("HSNB_ROOT", str(project))
    monkeypatch.chdir(project)

    def refused(*words: str, shards: str = "0-15") -> str:
        before = [p for p in sorted(project.rglob("*")) if p.is_file()]
        assert cli.main(["run", "03_extract.ipynb", "--shards", shards, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert [p for p in sorted(project.rglob("*")) if p.is_file()] == before  # a run's folder, tried for writing, may be there: empty
        return line

    return refused


def test_without_the_extra_it_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    line = refused("--ray", "auto")
    assert line.startswith("ParamsError: --ray without Ray (")
    assert line.endswith(", expected the extra ray. Likely: an environment for one machine. Next: make setup-ray")


def test_a_slip_in_the_parameters_is_refused_before_ray_is_asked_for(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused("--ray", "auto", shards="0-16").startswith("ParamsError: shard is 16, expected 0..15 ")
    assert "unknown parameter 'shrad'" in refused("--ray", "auto", "-p", "shrad", "1")
    assert "params/mine.yaml" in refused("--ray", "auto", "-p", "params", "params/mine.yaml")
    assert "--ray and -p server_url" in refused("--ray", "auto", "-p", "server_url", "http://127.0.0.1:1")


@needs_ray
def test_without_a_cluster_the_user_is_told_at_once(refused, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", no_cluster)
    line = refused("--ray", "auto")
    assert line.startswith("ServerError: --ray auto: Could not find any running Ray instance")
    assert line.endswith("Next: ray start --head, or one of deploy/")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"  # bound and not listened on: Ray itself would try it for minutes
        assert f"--ray {nobody}: [Errno 111] Connection refused" in refused("--ray", nobody)
        monkeypatch.setenv("RAY_ADDRESS", nobody)
        assert "[Errno 111] Connection refused" in refused("--ray", "auto")
    assert "ParamsError: --ray ray://x:10001, expected auto, or HOST:PORT of the head" in refused("--ray", "ray://x:10001")


def no_cluster(**_):
    raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to")


def test_two_drivers_of_one_run_exclude_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("HSNB_ROOT", str(make_project(tmp_path / "clone")))
    with drivers.alone("demo"):
        with pytest.raises(ExtractError, match=r"run demo are being dealt by another .*cluster\.json"), drivers.alone("demo"):
            pass
        with drivers.alone("other"):
            pass
    with drivers.alone("demo"):
        pass


@pytest.mark.parametrize(("cwd", "typed"), [("", "params/demo.yaml"), ("notebooks", "../params/demo.yaml"), ("params", "demo.yaml")])
def test_params_are_named_as_every_node_finds_them(tmp_path, monkeypatch, cwd, typed):
    project = make_project(tmp_path / "clone")
    monkeypatch.setenv("HSNB_ROOT", str(project))
    monkeypatch.chdir(project / cwd)
    assert drivers.portable(typed) == "params/demo.yaml"
    elsewhere = tmp_path / "mine.yaml"
    elsewhere.write_text("{}")
    assert drivers.portable("../../mine.yaml" if cwd else "../mine.yaml") == str(elsewhere)


def test_the_path_of_one_machine_never_imports_ray():
    """Everything that a shard on one machine imports, with Ray made impossible to import."""
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import hsnb, hsnb.cli, hsnb.run, hsnb.session, hsnb.extract, hsnb.papermill_engine, hsnb.planning, hsnb.verify, hsnb.storage, hsnb.cluster\n"
        "from hsnb import notebook, probe\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('ray', 's3fs', 'gcsfs') and sys.modules[m]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_shard_is_extracted_where_importing_ray_would_end_the_process(tmp_path):
    """Not the modules alone: a whole run of a shard, on the stub of the server."""
    fake = tmp_path / "path" / "ray"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("import os; os._exit(77)")
    env = {**environment(), "PYTHONPATH": f"{fake.parent}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.many_samples", str(tmp_path), "20"], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    found = json.loads(done.stdout)
    assert (found["ok"], found["samples"]) == (True, 20)
    assert subprocess.run([sys.executable, "-c", "import ray"], cwd=tmp_path, env=env).returncode == 77  # the trap works
