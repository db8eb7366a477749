"""Ray played by a stand-in, for what a cluster run decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from hsnb.cluster import driver as drivers
from hsnb.cluster.driver import Driver
from hsnb.cluster.plan import Node
from hsnb.cluster.queue import Shards
from hsnb.errors import DataError, ParamsError, ServerError
from hsnb.params import Deployment
from tests.conftest import tiny
from tests.project import ROOT, make_project


def deployment(**server) -> Deployment:
    return Deployment.parse(tiny(**server), origin="test")


def node(name: str, cpus: float = 4, gpus: float = 0) -> Node:
    return Node(name, f"10.0.0.{name}", cpus, gpus)


@dataclass(eq=False)
class Ref:
    """A call that was made and not answered."""

    node: str
    method: str
    args: tuple


class StandIn:
    """What driver.py uses of Ray, in one thread: a call is answered when it is waited for, by `answer(node, method, args)`."""

    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        def __init__(self, cause):
            super().__init__(str(cause))
            self.cause = cause

    def __init__(self, nodes: list[Node], answer):
        self.living, self.answer, self.killed, self.calls = {n.id: n for n in nodes}, answer, [], []
        self.reserved, self.removed = [], []
        self.exceptions = SimpleNamespace(RayError=self.RayError, RayTaskError=self.RayTaskError)
        strategies = SimpleNamespace(
            NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id,
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: group.nodes[placement_group_bundle_index],
        )
        self.util = SimpleNamespace(
            scheduling_strategies=strategies, placement_group=self.placement_group, remove_placement_group=self.removed.append
        )

    def placement_group(self, bundles, strategy, bundle_label_selector):
        assert strategy == "STRICT_SPREAD"
        self.reserved.append(SimpleNamespace(bundles=bundles, nodes=[s["ray.io/node-id"] for s in bundle_label_selector]))
        return self.reserved[-1]

    def nodes(self):
        made = [(n.id, n.address, {"CPU": n.cpus, "GPU": n.gpus}) for n in self.living.values()]
        return [{"NodeID": i, "NodeManagerAddress": a, "Resources": r, "Alive": True} for i, a, r in made]

    def remote(self, cls):
        def made(node_id):
            def call(method):
                def remote(*args):
                    self.calls.append((node_id, method, args))
                    return Ref(node_id, method, args)

                return SimpleNamespace(remote=remote)

            return SimpleNamespace(node=node_id, **{name: call(name) for name in ("start", "prepare", "run", "stop", "read")})

        def options(*, scheduling_strategy, max_restarts, max_task_retries, num_cpus, num_gpus):
            assert max_restarts == max_task_retries == 0
            return SimpleNamespace(remote=lambda *_: made(scheduling_strategy))

        return SimpleNamespace(options=options)

    def wait(self, refs, num_returns=1, timeout=None):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref):
        if ref.node not in self.living:
            raise self.RayError("the actor died")
        try:
            return self.answer(ref.node, ref.method, ref.args)
        except (ParamsError, ServerError, DataError) as error:
            raise self.RayTaskError(error) from error

    def kill(self, actor):
        self.killed.append(actor.node)


def whole(node_id, method, args):
    """Answer as a node on which all goes well."""
    if method == "start":
        return {"url": f"http://{node_id}", "host": node_id, "seconds": 1.0, "python": "python"}
    if method == "run":
        shard = args[1]["shard"]
        return {"notebook": f"nb-{shard}", "html": None, "ok": True, "error": "", "seconds": 1.0, "lost": False, "files": {}}
    return 0


def driving(tmp_path, monkeypatch) -> Callable[..., Driver]:
    """Return drive(ray, shards, server...): a driver that has run its loop in a project of its own."""
    monkeypatch.setenv("HSNB_ROOT", str(make_project(tmp_path / "project")))
    monkeypatch.setattr("hsnb.cluster.queue.PAUSE_S", 0.0)
    monkeypatch.setattr(drivers, "LOOK_S", 0.0)
    known = {"params": "params/demo.yaml", "run": "demo", "max_length": 512, "too_long": "error"}

    def drive(ray, shards, **server) -> Driver:
        driver = Driver(ray, ROOT / "notebooks" / "03_extract.ipynb", {"num_shards": 8}, known, deployment(**server), Shards(shards))
        driver.loop()
        return driver

    return drive


def events(driver: Driver, what: str) -> list[tuple]:
    return [(e.get("node"), e.get("shard")) for e in driver.journal if e["what"] == what]
