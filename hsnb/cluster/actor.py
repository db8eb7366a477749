"""What lives on a node: one server for the whole run and the notebook run against it, shard after shard; or a part of a server.

Plain classes: hire.py makes Ray actors of them, tests call them directly. What they started ends with their process at the
latest, however that ends (hsnb.server.supervisor), and so does a notebook's kernel.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsnb import paths, probe
from hsnb.cluster.connect import Remote, meeting_place
from hsnb.errors import HsnbError, ParamsError, ServerError
from hsnb.extract.faults import restart
from hsnb.params import Deployment
from hsnb.run import run_notebook
from hsnb.server import Server
from hsnb.server.command import Part
from hsnb.server.link import Link
from hsnb.server.part import ServerPart
from hsnb.trainers.place import file_digest

RESTARTS = 3  # of a lost server, in a row: a shard that is whole starts the count again


def enter(root: str) -> None:
    """Work in the project at `root` (HSNB_ROOT of the node, if set). Raises ParamsError when there is none."""
    os.environ.setdefault("HSNB_ROOT", root)
    here = Path(os.environ["HSNB_ROOT"])
    if not (here / "notebooks").is_dir() or not (here / "params").is_dir():
        raise ParamsError(
            got=f"no project at {here} on {socket.gethostname()}",
            expected="notebooks/ and params/, as on the machine that started the run",
            likely="a file system that is not mounted there, or a clone at another path",
            next="mount it, or set HSNB_ROOT before ray start on that node",
        )
    os.chdir(here)


class PartActor:
    """Own one further node's part of a server. It takes what a ServerActor takes, and needs of it the project and the run's name."""

    def __init__(self, root: str, params: str, run: str, overrides: dict[str, Any]):
        self.root, self.run_name = root, run
        self.part: ServerPart | None = None

    def start(self, deployment: dict[str, Any], node_rank: int, address: str) -> dict[str, Any]:
        """Start the launcher with the first node's own settings; return what ServerPart.about says. Raises HsnbError."""
        enter(self.root)
        own = Deployment.parse(deployment, origin="the first node")
        self.part = ServerPart(own, Part(node_rank, address), paths.run_dir(self.run_name))
        return self.part.about()

    def news(self, heard: int) -> dict[str, Any]:
        """Return what is new (ServerPart.news)."""
        return self.part.news(heard)

    def stop(self) -> None:
        """Stop the part, when it was started."""
        if self.part is not None:
            self.part.stop()


class ServerActor:
    """Own a server of `params`, with `overrides` of its server part, in the project at `root`."""

    def __init__(self, root: str, params: str, run: str, overrides: dict[str, Any]):
        self.root, self.params, self.run_name, self.overrides = root, params, run, overrides
        self.server, self.restarts = None, 0

    def start(self, parts: Sequence[tuple[str, Any]] = ()) -> dict[str, Any]:
        """Start the server and prove it; return its URL, host and the seconds. Raises HsnbError.

        `parts`: (address, PartActor) of the other nodes that it spans.
        """
        enter(self.root)
        self.deployment = Deployment.load(self.params, **({"server": self.overrides} if self.overrides else {}))
        link = Link(meeting_place(), [(address, Remote(actor)) for address, actor in parts]) if parts else None
        self.server = Server.start(self.deployment, log_dir=paths.run_dir(self.run_name), link=link)
        try:
            probe.ensure(self.server)
        except HsnbError:
            if link:
                self.stop()  # on every node, before the driver hears of it and starts another
            raise
        return {"url": self.server.url, "host": socket.gethostname(), "seconds": self.server.startup_seconds, "python": sys.executable}

    def prepare(self, max_length: int, too_long: str) -> int:
        """Write the run's data set when it is not there yet, so that no two nodes make it at once; return its rows."""
        from hsnb.data import prepare

        return prepare(self.deployment, paths.run_dir(self.run_name) / "data", max_length=max_length, too_long=too_long).rows

    def run(self, notebook: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Run the notebook for one shard against this server; return its RunResult as a dict, and `lost`: the server is gone.

        A lost server is started again here, before the next shard. Raises HsnbError when it does not come back, and for a server
        over several nodes at once: where the next one has its nodes is the driver's to say.
        """
        given = {**parameters, "server_url": self.server.url, "spool": str(self.server.spool)}
        source = paths.project_root() / "notebooks" / f"{notebook}.ipynb"
        result = run_notebook(source, given, cwd=paths.project_root()).as_dict()
        lost = not result["ok"] and (not self.server.running() or result["error"].startswith(ServerError.__name__))  # gone, or it hangs
        if lost and self.server.link is not None:
            why = self.server.link.lost or result["error"]
            self.stop()
            raise ServerError(
                got=f"the server over {self.deployment.server.nnodes} nodes is lost: {why}",
                expected="answers until the shard is done",
                likely="a node that went away, a launcher that ended, or ranks that wait for each other",
                next="the shard is dealt again",
            )
        if lost:
            self._revive()
        elif result["ok"]:
            self.restarts = 0
        files = [result["notebook"], result["html"], str(paths.run_dir(self.run_name) / f"shard-{parameters['shard']:04d}.json")]
        return {**result, "lost": lost, "files": {f: file_digest(Path(f)) for f in files if f and Path(f).is_file()}}

    def _revive(self) -> None:
        while True:
            self.restarts += 1
            try:
                restart(self.server)
                return
            except HsnbError:
                if self.restarts >= RESTARTS:
                    raise

    def read(self, file: str) -> bytes:
        """Return a file of this node, for a driver that does not share its disk."""
        return Path(file).read_bytes()

    def stop(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()
