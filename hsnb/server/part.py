"""One further node's part of a server over several: its launcher, and what its ranks have to say to the first node.

The launcher has the same supervisor as a whole server's: it ends with this process, however that ends, and leaves nothing.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from hsnb.params import Deployment
from hsnb.paths import resolve
from hsnb.server import causes
from hsnb.server.command import Part
from hsnb.server.launch import end, launch
from hsnb.server.ready import read_exit
from hsnb.server.state import STOP_LIMIT_S
from hsnb.server.supervisor import is_alive

ARMED = re.compile(r"armed-\d+\.json")
DIGEST = re.compile(r"[0-9a-f]{32}\.rank-\d+\.json")  # of a probe's request (hsnb.patch.digest)
LOOK_S = 0.02


class ServerPart:
    """A launcher of `node_rank` >= 1. Its ranks write no states: rank 0 does, and that is the first node's."""

    def __init__(self, deployment: Deployment, part: Part, log_dir: Path, extra_env: dict[str, str] | None = None):
        """Start the launcher; it waits for the others by itself. Raises as hsnb.server.launch does."""
        # Nobody asks its port, and its spool holds a few hundred bytes: neither is the first node's to choose.
        own = deployment.model_copy(update={"server": deployment.server.model_copy(update={"port": 0, "spool": ""})})
        size = own.server.tp_size // own.server.nnodes
        self.ranks = list(range(part.node_rank * size, (part.node_rank + 1) * size))
        self.model = resolve(own.model_path())
        self.made = launch(own, log_dir, extra_env=extra_env, part=part)
        self._said: dict[str, Any] = {"number": 0, "files": {}, "gone": ""}
        self._armed: dict[str, tuple[int, dict]] = {}  # by file name: when it was last written, and what it said

    def about(self) -> dict[str, Any]:
        """Return this part's ranks and port, and what its weights are known by, for the first node to compare."""
        from hsnb.weights import weights_hash  # it imports torch

        return {"ranks": self.ranks, "port": self.made.port, "weights": weights_hash(self.model)}

    def news(self, heard: int = 0, wait_s: float = 0.5) -> dict[str, Any]:
        """Return `files`, those that are new for the first node's spool (name: content), and `gone`: why this part has ended, or "".

        Waits up to `wait_s` for either. A digest is handed over once and removed here, an armed file whenever it changed. Answers
        with files have a `number`; whoever has `heard` less than the last one gets it again, because it was lost on its way.
        """
        if heard < self._said["number"]:
            return self._said
        until = time.monotonic() + wait_s
        while True:
            files, gone = self._fresh(), self._gone()
            if files:
                self._said = {"number": heard + 1, "files": files, "gone": gone}
                return self._said
            if gone or time.monotonic() >= until:
                return {"number": heard, "files": {}, "gone": gone}
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """End this part and everything it left; calling it again does nothing."""
        if self.made.supervisor.poll() is None:
            end(self.made.supervisor, STOP_LIMIT_S)

    def _fresh(self) -> dict[str, bytes]:
        files = {}
        for path in sorted(self.made.spool.glob("*.json")):
            try:
                if DIGEST.fullmatch(path.name):
                    files[path.name] = path.read_bytes()
                    path.unlink()
                elif ARMED.fullmatch(path.name) and self._armed.get(path.name, (0, {}))[0] != (when := path.stat().st_mtime_ns):
                    tree = json.loads(path.read_bytes())
                    self._armed[path.name] = when, tree
                    if tree["rank"] not in self.ranks:  # a plug-in that failed to load does not know its rank, and says 0
                        tree["rank"] = self.ranks[0]
                    files[f"armed-{tree['rank']}.json"] = json.dumps(tree).encode()
            except (OSError, ValueError):
                continue  # gone, or caught in the middle of a rewrite: the next look has it
        return files

    def _gone(self) -> str:
        if self.made.supervisor.poll() is not None:
            code = read_exit(Path(self.made.job.exit_record)).get("code")
            cause = causes.find_cause(causes.read_lines(self.made.log), code=code)
            return f"its launcher has ended: {cause.words}{f' ({cause.line})' if cause.line else ''}; its log there: {self.made.log}"
        for _, tree in self._armed.values():
            if tree["state"] == "armed" and not is_alive(tree["pid"], tree["pid_created"]):
                return f"rank {tree['rank']} (process {tree['pid']}) has ended; its log there: {self.made.log}"
        return ""
