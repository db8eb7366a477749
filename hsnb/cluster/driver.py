"""Deal shards to servers that live on the nodes of a Ray cluster, until none is left. Nodes may come and go meanwhile.

Which nodes a server goes to, and what its loss means for the shard, is decided here. Everything that was published is entered,
so a shard that is dealt again goes on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat

from hsnb import notebook as contract
from hsnb.cluster.connect import connect
from hsnb.cluster.hire import Member, dismiss, hire, start
from hsnb.cluster.plan import Node, Place, groups, on_place, places
from hsnb.cluster.queue import Shards
from hsnb.errors import ExtractError, HsnbError, ParamsError
from hsnb.ledger import take_lock
from hsnb.params import Deployment
from hsnb.paths import project_root, resolve, run_dir, write_json
from hsnb.run import RunResult
from hsnb.server.flags import check_nodes
from hsnb.trainers.place import file_digest

log = logging.getLogger(__name__)
STARTS = 3  # of a server at one place: after that the place is left alone
LOOK_S = 1.0
SAY_S = 60.0  # without a server that is ready, the user is told what may hold it up
EMPTY_S = 300.0  # without any node that could take a server, living or starting, the run ends
STOP_S = 40.0  # for the servers to stop at the end; what is left ends with Ray's workers
BUSY = "being written by another process"  # what a shard says whose last writer has not quite ended


def run_on_cluster(source: Path, parameters: Mapping[str, Any], shards: Sequence[int], address: str = "auto") -> list[RunResult]:
    """Run the notebook once a shard on the cluster at `address`; return the results in the order of `shards`.

    `parameters` are those of the notebook, without shard, server_url and spool. A shard that no node could do has a result
    that is not ok. Raises ParamsError, ServerError or ExtractError before anything is started.
    """
    for name in ("server_url", "spool"):
        if parameters.get(name):
            raise ParamsError(
                got=f"--ray and -p {name}",
                expected="one of the two",
                likely="a command made of two others",
                next=f"leave {name} out: each node starts its own server",
            )
    parameters = dict(parameters)
    known = contract.declared(source) | contract.cell_values(nbformat.read(source, as_version=4), source) | parameters
    deployment = Deployment.load(known["params"])
    check_nodes(deployment.server, node_rank=0)
    known["params"] = parameters["params"] = portable(known["params"])
    ray = connect(address)
    try:
        with alone(known["run"]):
            driver = Driver(ray, source, parameters, known, deployment, Shards(shards))
            try:
                driver.loop()
            finally:
                driver.stop()
            return [driver.result(shard) for shard in shards]
    finally:
        ray.shutdown()


@contextlib.contextmanager
def alone(run: str) -> Iterator[None]:
    """Be the only one that deals this run's shards from here: nodes see each other's ledgers late. Raises ExtractError."""
    folder = run_dir(run)
    lock = take_lock(folder / "cluster")
    if lock is None:
        raise ExtractError(
            got=f"the shards of run {run} are being dealt by another hsnb run --ray",
            expected="one of them a run",
            likely="the command was started twice, or an earlier one still runs",
            next=f"follow it in {folder}/cluster.json, or wait for its end",
        )
    with lock:
        yield


def portable(params: str) -> str:
    """Return a params file as every node finds it: below the project by its place there, which may differ from node to node."""
    file, root = resolve(params), project_root()
    return str(file.relative_to(root) if file.is_relative_to(root) else file) if file.is_file() else params


class Driver:
    """The loop. `members` by place; `refs` are the calls in flight."""

    def __init__(self, ray, source: Path, parameters: dict, known: dict, deployment: Deployment, shards: Shards):
        self.ray, self.source, self.parameters, self.known = ray, source, parameters, known
        self.deployment, self.shards, self.prepared = deployment, shards, False
        self.members: dict[tuple[str, int], Member] = {}
        self.refs: dict[Any, Member] = {}
        self.starts: Counter = Counter()
        self.trouble = ""  # the last reason why a server did not start
        self.short = ""  # of nodes for a single server: how many are there
        self.journal: list[dict] = []

    def loop(self) -> None:
        """Deal until every shard is done or given up. Raises the servers' error when none of them starts anywhere."""
        alone_since = began = time.monotonic()
        while self.shards.left:
            self.bury()
            self.grow()
            self.say_short()
            self.deal()
            if began and time.monotonic() - began > SAY_S:
                if not any(m.url for m in self.members.values()):
                    log.info("no server is ready yet: a model that loads long, or another job that holds the nodes (ray status)")
                began = 0.0
            ready, _ = self.ray.wait(list(self.refs), timeout=LOOK_S) if self.refs else ([], time.sleep(LOOK_S))
            for ref in ready:
                self.land(ref)
            if self.members:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > EMPTY_S or (self.trouble and not self.short and not self.untried()):
                why = self.short or self.trouble or "no node has room for a server"
                self.note("given up", why=why)
                self.shards.drain(why)

    # -- servers ---------------------------------------------------------------------------------------------------

    def room(self) -> list[Place]:
        """Return the places on living nodes that no server holds."""
        held = {place.key for m in self.members.values() for place in m.places}
        nodes = [Node.of(n) for n in self.ray.nodes() if n["Alive"]]
        return [p for p in places(self.deployment, nodes) if p.key not in held]

    def untried(self) -> list[tuple[Place, ...]]:
        """Return where a server would have all its places, none of them one where too many did not start; the best first."""
        free = [p for p in self.room() if self.starts[p.key] < STARTS]
        return groups(sorted(free, key=lambda p: self.starts[p.key]), self.deployment.server.nnodes)

    def grow(self) -> None:
        """Start a server wherever there is room for one, while there are shards for it."""
        for where in self.untried():
            if len(self.members) >= self.shards.left:
                return
            self.starts.update(place.key for place in where)
            given = (str(project_root()), self.known["params"], self.known["run"], on_place(self.deployment, where[0]))
            member = self.members[where[0].key] = hire(self.ray, where, given)
            self.refs[start(member)] = member
            self.note("starting", member)

    def bury(self) -> None:
        """Drop a server that waits for room on several nodes of which one is gone: Ray would go on waiting for it."""
        alive = {n["NodeID"] for n in self.ray.nodes() if n["Alive"]}
        for ref, member in list(self.refs.items()):
            gone = [p.node.address for p in member.places if p.node.id not in alive]
            if member.group is not None and member.doing == "start" and gone:
                del self.refs[ref]
                self.drop(member, None, f"node {gone[0]} is gone")

    def say_short(self) -> None:
        """Say when there are some of a server's nodes and not all, and that they are waited for."""
        nnodes, here = self.deployment.server.nnodes, {p.node.id for p in self.room()}
        short = f"{len(here)} of the {nnodes} nodes that a server needs" if not self.members and len(here) < nnodes > 1 else ""
        if short and short != self.short:
            self.note("waiting", why=short)
            log.warning(f"there {'is' if len(here) == 1 else 'are'} {short}: waiting {EMPTY_S:.0f} s for the others")
        self.short = short

    def deal(self) -> None:
        """Give each idle server something to do; the data set is prepared by the first of them."""
        for member in [m for m in self.members.values() if m.doing == "idle"]:
            if not self.prepared:
                if not any(m.doing == "prepare" for m in self.members.values()):
                    member.doing = "prepare"
                    self.refs[member.actor.prepare.remote(self.known["max_length"], self.known["too_long"])] = member
            elif (shard := self.shards.take()) is not None:
                member.doing, member.shard = "run", shard
                self.refs[member.actor.run.remote(self.source.stem, {**self.parameters, "shard": shard})] = member
                self.note("dealt", member, shard=shard)

    def land(self, ref) -> None:
        """Take what a call came back with: an answer, the user's error, or the loss of whoever ran it."""
        member = self.refs.pop(ref)
        did, shard, member.doing, member.shard = member.doing, member.shard, "idle", None
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if did == "prepare" and isinstance(cause, HsnbError):  # the data are at fault, on any node
                raise cause from error
            log.warning(f"{member.url or member.place.node.address}: {cause}")
            self.drop(member, shard, str(cause))
        except self.ray.exceptions.RayError as error:
            last = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
            self.drop(member, shard, f"its node or its process is gone ({type(error).__name__}: {last[:300]})")
        else:
            if did == "start":
                member.url = answer["url"]
                self.note("ready", member, **answer)
            elif did == "prepare":
                self.prepared = True
            else:
                self.landed(member, shard, answer)

    def landed(self, member: Member, shard: int, answer: dict) -> None:
        """Settle a shard that ran to its end, or deal it again when it was the server that failed, not the shard."""
        if answer["lost"] or (not answer["ok"] and BUSY in answer["error"]):
            self.note("lost", member, shard=shard, why=answer["error"])
            self.shards.lost(shard, answer["error"])
            return
        self.fetch(member, answer["files"])
        for place in member.places:
            self.starts[place.key] = 0
        self.shards.settle(shard, answer)
        self.note("done", member, shard=shard, ok=answer["ok"], seconds=round(answer["seconds"], 1))
        log.info(f"shard {shard}: {'ok' if answer['ok'] else answer['error']} ({answer['seconds']:.1f} s, {member.place.node.address})")

    def drop(self, member: Member, shard: int | None, why: str) -> None:
        """Forget a server that is gone; its shard waits again."""
        self.members.pop(member.place.key, None)
        self.note("dropped", member, shard=shard, why=why)
        if shard is None:
            self.trouble = why
        elif self.shards.lost(shard, why):
            log.warning(f"shard {shard} is dealt again: {why} ({member.place.node.address})")
        dismiss(self.ray, member)

    def fetch(self, member: Member, files: dict[str, str]) -> None:
        """Copy a shard's notebook, report and JSON from a node that does not share this machine's disk."""
        for name, theirs in files.items():
            here = Path(name)
            if here.is_file() and file_digest(here) == theirs:
                continue
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_bytes(self.ray.get(member.actor.read.remote(name)))

    # -- the end ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop every server that is left."""
        calls = [m.actor.stop.remote() for m in self.members.values() if m.doing == "idle"]
        if calls:
            self.ray.wait(calls, num_returns=len(calls), timeout=STOP_S)
        for member in self.members.values():
            dismiss(self.ray, member)

    def result(self, shard: int) -> RunResult:
        """Return what came of a shard."""
        if shard in self.shards.results:
            tree = self.shards.results[shard]
            html = Path(tree["html"]) if tree["html"] else None
            return RunResult(Path(tree["notebook"]), html, tree["ok"], tree["error"], tree["seconds"])
        name = contract.output_name(self.source.stem, {"shard": shard})
        return RunResult(run_dir(self.known["run"], make=False) / name, None, False, self.shards.given_up[shard], 0.0)

    def note(self, what: str, member: Member | None = None, **more: Any) -> None:
        """Write what happened to outputs/{run}/cluster.json, the place to look at while it runs."""
        where = {"node": member.place.node.id, "address": member.place.node.address, "server": member.url} if member else {}
        if member and member.parts:
            where["with"] = [{"node": p.node.id, "address": p.node.address} for p in member.places[1:]]
        self.journal.append({"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "what": what, **where, **more})
        write_json(
            run_dir(self.known["run"]) / "cluster.json", {"left": self.shards.left, "servers": len(self.members), "events": self.journal}
        )
