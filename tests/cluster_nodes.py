"""A Ray cluster of several nodes on this machine, for tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE = 80_000_000  # bytes of each node's object store: nothing large goes through it
TRIES = 3

log = logging.getLogger(__name__)


@contextmanager
def cluster(*cpus: int) -> Iterator[Any]:
    """Yield (Cluster, its nodes) with a head that takes no work and a node of so many CPUs each; all end with the block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        add(made, 0, no_monitor=True)  # the autoscaler's: no node is to come by itself
        yield made, [add(made, n) for n in cpus]
    finally:
        made.shutdown()


def add(made: Any, cpus: int, **more: Any) -> Any:
    """Add a node. A raylet gives its agents 15 s to start (fixed in Ray 2.60), which a busy machine may not keep: it is tried again.

    The node's address is Ray's own choice: ray.init takes 127.0.0.1 for the machine's outer address, where a local GCS does not listen.
    """
    for left in reversed(range(TRIES)):
        try:
            return made.add_node(num_cpus=cpus, include_dashboard=False, include_log_monitor=False, object_store_memory=STORE, **more)
        except Exception as error:  # Ray raises a bare one
            if not left:
                raise
            log.warning(f"a node of the cluster did not start, {left} tries left: {error}")
    raise AssertionError
