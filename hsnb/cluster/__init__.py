"""Shards on many machines, through Ray (the extra `ray`): `hsnb run 03_extract --shards 0-15 --ray auto`.

plan.py    which servers fit on which nodes; plain values, no Ray
queue.py   the shards that wait, and how often one may be lost; no Ray
actor.py   what lives on a node: one server, and the notebook run against it shard after shard
driver.py  the loop that pairs them: the only module that imports Ray, and only when it is called

Slurm and SkyPilot (deploy/) start Ray; they do not replace it.
"""

from hsnb.cluster.driver import run_on_cluster

__all__ = ["run_on_cluster"]
