"""Shards on many machines, through Ray (the extra `ray`): `hsnb run 03_extract --shards 0-15 --ray auto`.

plan.py     which servers fit on which nodes; plain values, no Ray
queue.py    the shards that wait, and how often one may be lost; no Ray
actor.py    what lives on a node: one server, and the notebook run against it shard after shard; or a part of a server over several
hire.py     the actors of one server, reserved all or none; their end
driver.py   the loop that pairs servers and shards
connect.py  the way to Ray: the only module that imports it, and only when it is called

Slurm and SkyPilot (deploy/) start Ray; they do not replace it.
"""

from hsnb.cluster.driver import run_on_cluster

__all__ = ["run_on_cluster"]
