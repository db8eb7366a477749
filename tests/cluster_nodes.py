"""A Ray cluster of several nodes on this machine, for tests."""

from __future__ import annotations

import socket
from contextlib import ExitStack, contextmanager

LOCAL = "127.0.0.1"
STORE = 80_000_000  # bytes of each node's object store: nothing large goes through it


@contextmanager
def cluster(*cpus: int):
    """Yield (Cluster, its nodes) with a head that takes no work and a node of so many CPUs each; all end with the block."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=settings(0))
    try:
        yield made, [made.add_node(**settings(n)) for n in cpus]
    finally:
        made.shutdown()


def settings(cpus: int) -> dict:
    """Return a node's arguments. Its ports are given: a raylet waits 30 s at most for agents that choose their own."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in names]
        for one in sockets:
            one.bind((LOCAL, 0))
        ports = {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    return {"num_cpus": cpus, "include_dashboard": False, "node_ip_address": LOCAL, "object_store_memory": STORE, **ports}
