"""Which servers fit on which nodes of a cluster. Plain values in and out: Ray is not needed to say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsnb.errors import ParamsError
from hsnb.params import Deployment


@dataclass(frozen=True)
class Node:
    """A living machine of the cluster, with what Ray says it has."""

    id: str
    address: str
    cpus: float
    gpus: float

    @classmethod
    def of(cls, tree: dict) -> Node:
        """Read one entry of ray.nodes()."""
        has = tree["Resources"]
        return cls(tree["NodeID"], tree["NodeManagerAddress"], has.get("CPU", 0.0), has.get("GPU", 0.0))


@dataclass(frozen=True)
class Place:
    """Room for one server, or for one node's part of it: the `index`-th on its node, of `of` there, and what it reserves."""

    node: Node
    index: int
    of: int
    cpus: float
    gpus: float

    @property
    def key(self) -> tuple[str, int]:
        return self.node.id, self.index


def places(deployment: Deployment, nodes: Sequence[Node]) -> list[Place]:
    """Return the places for servers of `deployment`, or for parts of them: on a node with GPUs as many as these allow, on a CPU one a node.

    A CPU server takes its whole node, because Ray sets its threads to what it reserves. A node without CPUs (a head that
    only leads) takes none. Raises ParamsError when no node, now or with others like these, can take one.
    """
    device, tp, nnodes = deployment.server.device, deployment.server.tp_size, deployment.server.nnodes
    if device == "auto":
        device = "cuda" if any(n.gpus for n in nodes) else "cpu"
    if device == "cpu":
        return [Place(n, 0, 1, n.cpus, 0) for n in nodes if n.cpus >= 1]
    most, each = max((n.gpus for n in nodes), default=0), tp // nnodes
    if nodes and each > most:
        raise ParamsError(
            got=f"server.tp_size {tp} over {nnodes} node{'s' * (nnodes > 1)}, and {most:.0f} GPUs on the largest of {len(nodes)} nodes",
            expected=f"{each} GPUs on a node",
            likely="a node that Ray was started on without its GPUs"
            if most == 0
            else "a model that wants larger machines, or more of them",
            next="ray start --num-gpus N on the nodes, or spread a server over more of them with server.nnodes, or lower tp_size",
        )
    found = []
    for node in nodes:
        fits = int(node.gpus // each)
        found += [Place(node, k, fits, max(1, min(each, node.cpus // max(1, fits))), each) for k in range(fits)]
    return [p for p in found if p.node.cpus >= p.of]


def groups(free: Sequence[Place], nnodes: int) -> list[tuple[Place, ...]]:
    """Return `free` places in groups of `nnodes`, a server each, all of its nodes different ones; what is left over is in none."""
    rest, found = list(free), []
    while rest:
        group: list[Place] = []
        for place in rest:
            if len(group) < nnodes and place.node.id not in {p.node.id for p in group}:
                group.append(place)
        if len(group) < nnodes:
            break
        found.append(tuple(group))
        rest = [place for place in rest if place not in group]
    return found


def on_place(deployment: Deployment, place: Place) -> dict:
    """Return the overrides of `deployment`'s server at a place: a fixed port cannot be had twice on a node. Raises ParamsError."""
    if place.of == 1:
        return {}
    if deployment.server.spool:
        raise ParamsError(
            got=f"server.spool {deployment.server.spool} for {place.of} servers on one node",
            expected="a spool for each",
            likely="params written for one server",
            next="leave server.spool out: each server then has /dev/shm/hsnb/{port}",
        )
    return {"port": 0}
