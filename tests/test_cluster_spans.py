"""Where a server over several nodes goes in a cluster, and what the loss of one of them means. Ray is played by a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hsnb.cluster import connect
from hsnb.cluster import driver as drivers
from hsnb.cluster.actor import ServerActor
from hsnb.cluster.plan import groups, places
from hsnb.errors import ParamsError, ServerError
from tests.cluster_stand_in import StandIn, deployment, driving, events, node, whole

TWO = {"tp_size": 2, "nnodes": 2}


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Return drive(ray, shards, server...): a driver that has run its loop in a project of its own."""
    return driving(tmp_path, monkeypatch)


# -- where -------------------------------------------------------------------------------------------------------------


def test_a_server_takes_a_place_on_each_of_its_nodes():
    large = deployment(device="cuda", tp_size=16, nnodes=2)
    found = groups(places(large, [node(n, 64, 8) for n in "abcde"]), 2)
    assert [[p.node.id for p in group] for group in found] == [["a", "b"], ["c", "d"]]
    assert {(p.gpus, p.cpus) for group in found for p in group} == {(8, 8)}
    small = groups(places(deployment(device="cuda", tp_size=8, nnodes=2), [node("a", 64, 8), node("b", 64, 8)]), 2)
    assert [[p.key for p in group] for group in small] == [[("a", 0), ("b", 0)], [("a", 1), ("b", 1)]]
    cpu = groups(places(deployment(**TWO), [node("head", 0), node("a", 2), node("b", 16)]), 2)
    assert [[(p.node.id, p.cpus) for p in group] for group in cpu] == [[("a", 2), ("b", 16)]]
    assert groups(places(deployment(**TWO), [node("a", 2)]), 2) == []


def test_more_gpus_a_node_than_there_are_is_refused_in_words():
    words = r"tp_size 16 over 2 nodes, and 4 GPUs on the largest of 3 nodes, expected 8 GPUs on a node"
    with pytest.raises(ParamsError, match=words):
        places(deployment(device="cuda", tp_size=16, nnodes=2), [node(n, 64, 4) for n in "abc"])


# -- what the driver does ------------------------------------------------------------------------------------------------


def test_its_nodes_are_reserved_together_and_the_first_one_has_the_parts(drive):
    ray = StandIn([node("a"), node("b"), node("c")], whole)
    driver = drive(ray, range(4), **TWO)
    (group,) = ray.reserved
    assert group.nodes == ["a", "b"] and group.bundles == [{"CPU": 4}, {"CPU": 4}]
    ((_, _, (parts,)),) = [c for c in ray.calls if c[1] == "start"]
    assert [(address, actor.node) for address, actor in parts] == [("10.0.0.b", "b")]
    (started,) = [e for e in driver.journal if e["what"] == "starting"]
    assert (started["node"], started["with"]) == ("a", [{"node": "b", "address": "10.0.0.b"}])
    assert len(events(driver, "done")) == 4
    driver.stop()
    assert ray.killed == ["a", "b"] and ray.removed == [group]


def test_the_loss_of_either_node_ends_all_of_it_and_the_shard_waits_for_one_to_come(drive, monkeypatch):
    looks = []

    def answer(node_id, method, args):
        if method == "run" and "b" in ray.living and "c" not in ray.living:
            del ray.living["b"]
            raise ServerError(got="the server over 2 nodes is lost: b", expected="answers", likely="x", next="y")
        return whole(node_id, method, args)

    def sleep(_):
        looks.append(1)
        if len(looks) == 3:
            ray.living["c"] = node("c")

    ray = StandIn([node("a"), node("b")], answer)
    monkeypatch.setattr(drivers.time, "sleep", sleep)
    driver = drive(ray, [0], **TWO)
    assert ray.killed == ["a", "b"] and ("b", "stop") in [c[:2] for c in ray.calls] and ray.removed == ray.reserved[:1]
    assert [e["why"] for e in driver.journal if e["what"] == "waiting"] == ["1 of the 2 nodes that a server needs"]
    assert [g.nodes for g in ray.reserved] == [["a", "b"], ["c", "a"]] and driver.shards.losses == {0: 1}
    assert events(driver, "done") == [("c", 0)]


def test_some_of_the_nodes_are_waited_for_and_then_the_run_says_so(drive, monkeypatch):
    monkeypatch.setattr(drivers, "EMPTY_S", 0.05)
    ray = StandIn([node("a")], whole)
    driver = drive(ray, [0, 1], **TWO)
    assert ray.calls == [] and driver.shards.given_up == dict.fromkeys((0, 1), "1 of the 2 nodes that a server needs")
    assert [e["what"] for e in driver.journal] == ["waiting", "given up"]


def test_a_group_that_waits_for_a_node_that_is_gone_is_given_back(drive, monkeypatch):
    def wait(refs, num_returns=1, timeout=None):
        if [r for r in refs if r.method == "start"] and len(ray.reserved) == 1:
            ray.living.pop("b", None)  # while another job holds it: nothing of ours runs there
            ray.living["c"] = node("c")
            return [], refs
        return refs[:num_returns], refs[num_returns:]

    ray = StandIn([node("a"), node("b")], whole)
    monkeypatch.setattr(ray, "wait", wait)
    driver = drive(ray, [0], **TWO)
    assert [e["why"] for e in driver.journal if e["what"] == "dropped"] == ["node 10.0.0.b is gone"]
    assert [g.nodes for g in ray.reserved][1:] == [["c", "a"]] and len(events(driver, "done")) == 1


def test_a_node_on_which_nothing_starts_does_not_keep_the_others_from_it(drive):
    def answer(node_id, method, args):
        if method == "start" and "b" in (node_id, *(actor.node for _, actor in args[0])):
            raise ServerError(got="a server over several nodes has lost node b", expected="x", likely="y", next="z")
        return whole(node_id, method, args)

    ray = StandIn([node("a"), node("b"), node("c")], answer)
    driver = drive(ray, [0], **TWO)
    assert [g.nodes for g in ray.reserved] == [["a", "b"], ["c", "a"]] and events(driver, "done") == [("c", 0)]


def test_the_actor_of_a_lost_server_over_nodes_ends_it_and_does_not_start_it_again_alone(tmp_path, monkeypatch):
    ended = []
    link = SimpleNamespace(lost="10.0.0.2: its launcher has ended: the GPU's memory is too small")
    actor = ServerActor("root", "params", "run", {})
    actor.deployment = deployment(**TWO)
    actor.server = SimpleNamespace(
        url="http://a", spool=tmp_path, link=link, running=lambda: not link.lost, stop=lambda: ended.append(1), deployment=actor.deployment
    )
    failed = {"ok": False, "error": "ServerError: the server at http://a is lost", "notebook": "", "html": None, "seconds": 1.0}
    monkeypatch.setattr("hsnb.cluster.actor.run_notebook", lambda *_, **__: SimpleNamespace(as_dict=lambda: failed))
    monkeypatch.setattr("hsnb.cluster.actor.restart", lambda _: pytest.fail("started again on one node"))
    words = r"the server over 2 nodes is lost: 10\.0\.0\.2: its launcher has ended: the GPU's memory is too small"
    with pytest.raises(ServerError, match=words):
        actor.run("03_extract", {"shard": 0})
    assert ended == [1]


def test_a_part_that_cannot_be_reached_for_a_moment_is_asked_again_and_started_once(monkeypatch):
    class Unavailable(Exception):
        pass

    class TaskError(Exception):
        cause = ServerError(got="4 GPUs", expected="8", likely="x", next="y")

    said = []

    def get(ref, timeout):
        what = said.pop(0)
        if isinstance(what, Exception):
            raise what
        return what

    fake = SimpleNamespace(get=get, exceptions=SimpleNamespace(ActorUnavailableError=Unavailable, RayTaskError=TaskError))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(connect.time, "sleep", lambda _: None)
    method = SimpleNamespace(remote=lambda *given: given)
    part = connect.Remote(SimpleNamespace(news=method, start=method))
    said[:] = [Unavailable(), Unavailable(), {"files": {}, "gone": ""}]
    assert part.news() == {"files": {}, "gone": ""} and said == []
    said[:] = [Unavailable(), "a second launcher"]
    with pytest.raises(Unavailable):
        part.start()
    said[:] = [TaskError()]
    with pytest.raises(ServerError, match="4 GPUs, expected 8"):
        part.start()
    monkeypatch.setattr(connect, "REACH_S", -1.0)
    said[:] = [Unavailable(), Unavailable()]
    with pytest.raises(Unavailable):
        part.news()
