"""The actors of one server: an actor on its node, or one on each of its nodes, all of them or none (a placement group)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from hsnb.cluster.actor import PartActor, ServerActor
from hsnb.cluster.plan import Place

NODE_ID = "ray.io/node-id"  # the label that Ray gives each node
END_S = 40.0  # for the parts of a lost server to end: their GPUs are wanted for the next one


@dataclass
class Member:
    """A server's actors, and what it does: "start", "prepare", "run" (then with its shard) or "idle".

    `actor` is on the first place, and owns the server; `parts` are on the others; `group` holds their placement group together.
    """

    places: tuple[Place, ...]
    actor: Any
    parts: tuple[Any, ...] = ()
    group: Any = None
    doing: str = "start"
    shard: int | None = None
    url: str = ""

    @property
    def place(self) -> Place:
        return self.places[0]


def hire(ray: Any, places: tuple[Place, ...], given: tuple) -> Member:
    """Make the actors of one server at `places`, `given` to each. Nothing is started yet, and they may have to wait for room.

    Ray restarts none of them (`max_restarts=0`): where a new one goes, and what its loss means, is the driver's to decide.
    """
    fixed = {"max_restarts": 0, "max_task_retries": 0}
    strategies = ray.util.scheduling_strategies
    if len(places) == 1:
        (place,) = places
        where = strategies.NodeAffinitySchedulingStrategy(place.node.id, soft=False)
        options = {"num_cpus": place.cpus, "num_gpus": place.gpus, "scheduling_strategy": where, **fixed}
        return Member(places, ray.remote(ServerActor).options(**options).remote(*given))
    # Two runs that each held half of the nodes they need would wait for each other for ever: the group is reserved whole.
    bundles = [{"CPU": p.cpus, **({"GPU": p.gpus} if p.gpus else {})} for p in places]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=[{NODE_ID: p.node.id} for p in places])
    actors = []
    for k, place in enumerate(places):
        where = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=k)
        options = {"num_cpus": place.cpus, "num_gpus": place.gpus, "scheduling_strategy": where, **fixed}
        actors.append(ray.remote(PartActor if k else ServerActor).options(**options).remote(*given))
    return Member(places, actors[0], tuple(actors[1:]), group)


def start(member: Member) -> Any:
    """Have a server start; return the call. Its actor reaches the other nodes' parts by itself."""
    return member.actor.start.remote([(p.node.address, part) for p, part in zip(member.places[1:], member.parts, strict=True)])


def dismiss(ray: Any, member: Member) -> None:
    """End a server's actors, and with them its launchers on every node that is left."""
    if member.parts:
        calls = [part.stop.remote() for part in member.parts]
        ray.wait(calls, num_returns=len(calls), timeout=END_S)
    for actor in (member.actor, *member.parts):
        ray.kill(actor)
    if member.group is not None:
        with contextlib.suppress(Exception):  # its nodes may be gone, and it with them
            ray.util.remove_placement_group(member.group)
