"""A Ray cluster of several nodes on this machine, for tests. Read with Ray 2.60."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE = 80_000_000  # bytes of each node's object store: nothing large goes through it
# No report to Ray's makers; a node that was removed is noticed in five seconds, not fifteen; a busy machine starts workers slowly, at nice 15.
SETTINGS = {"USAGE_STATS_ENABLED": 0, "health_check_period_ms": 1000, "worker_register_timeout_seconds": 300}
SETTINGS |= {"worker_niceness": 0, "kill_child_processes_on_worker_exit": 0}  # as docs/cluster.md says


@contextmanager
def cluster(*cpus: int) -> Iterator[Any]:
    """Yield (Cluster, its nodes) with a head that takes no work and a node of so many CPUs each; all end with the block."""
    os.environ |= {f"RAY_{name}": str(value) for name, value in SETTINGS.items()}
    from ray.cluster_utils import Cluster

    with patient_raylets():
        made = Cluster()
        try:
            add(made, 0, no_monitor=True)  # the autoscaler's: no node is to come by itself
            yield made, [add(made, n) for n in cpus]
        finally:
            made.shutdown()


def add(made: Any, cpus: int, **more: Any) -> Any:
    """Add a node of so many CPUs.

    Its address is Ray's own choice: ray.init takes 127.0.0.1 for the machine's outer address, where a GCS of 127.0.0.1 does not listen.
    """
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    quiet = {"include_dashboard": False, "include_log_monitor": False}
    return made.add_node(num_cpus=cpus, object_store_memory=STORE, runtime_env_agent_port=port, **quiet, **more)


@contextmanager
def patient_raylets() -> Iterator[None]:
    """Say beforehand that a node's agent serves nothing, which it does not without the extra ray[default].

    A raylet waits for the agent to say so, 15 s and no setting for it, and ends itself then: two busy cores take longer to import Ray.
    """
    from ray._private.node import Node
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, persist_port

    start = Node.start_ray_processes

    def told(self: Node) -> None:
        for name in (DASHBOARD_AGENT_LISTEN_PORT_NAME, METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME):
            persist_port(self.get_session_dir_path(), self.node_id, name, -1)
        start(self)

    Node.start_ray_processes = told
    try:
        yield
    finally:
        Node.start_ray_processes = start
