"""The ranks of a server over several nodes that do not run here, and who watches them.

The first node's spool holds what every rank armed: its own ranks write theirs, the others' are handed over (hsnb.server.link).
`.nodes.json` beside them says which came from where, so that a client that attaches checks all ranks, and does not look for
another machine's processes on its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hsnb.server.leftovers import FAR
from hsnb.server.supervisor import is_alive, write_json


@dataclass(frozen=True)
class FarRanks:
    """`ranks`: {rank: (node's address, its launcher's port)}; `watcher`: (pid, create time) of the process here that asks for them.

    The watcher ends the server when one of their nodes is lost: while it lives, and the server does, they live too.
    """

    ranks: dict[int, tuple[str, int]] = field(default_factory=dict)
    watcher: tuple[int, float] = (0, 0.0)

    def watched(self) -> bool:
        """Say whether the watcher still runs."""
        return is_alive(*self.watcher)


def write_far(spool: Path, ranks: dict[int, tuple[str, int]]) -> None:
    """Say in `spool` whose these ranks are; this process watches them."""
    me = psutil.Process()
    write_json(spool / FAR, {"watcher": [me.pid, me.create_time()], "ranks": {str(r): list(where) for r, where in ranks.items()}})


def read_far(spool: Path) -> FarRanks:
    """Return the far ranks of the server of `spool`; none for a server on one node. Raises ValueError for a file that is damaged."""
    try:
        tree = json.loads((spool / FAR).read_text())
    except FileNotFoundError:
        return FarRanks()
    pid, created = tree["watcher"]
    return FarRanks({int(r): (str(address), int(port)) for r, (address, port) in tree["ranks"].items()}, (int(pid), float(created)))
