"""What every rank says of a probe's request: a digest of each column, so that the client can see whether the ranks agree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import xxhash

from hsnb.patch.spool import file_stem

PROBE_PREFIX = "hsnb-probe-"


class Digests:
    """Hash the rows of probe requests, chunk by chunk, on this rank; write {hash}.rank-{r}.json when the prompt is whole."""

    def __init__(self, spool: Path, rank: int, names: list[str]):
        self.spool, self.rank, self.names = spool, rank, names
        self.open: dict[str, tuple[int, list]] = {}

    def add(self, request_id: str, start: int, states: torch.Tensor, num_tokens: int) -> None:
        """Hash [n, K + 1, H] rows that begin at row `start` of `num_tokens`."""
        if start == 0:
            self.open[request_id] = (0, [xxhash.xxh3_128() for _ in self.names])
        done, hashes = self.open.get(request_id, (0, []))
        for k, column in enumerate(hashes):
            column.update(states[:, k].contiguous().view(torch.uint8).numpy())
        done += len(states)
        self.open[request_id] = (done, hashes)
        if done >= num_tokens:
            del self.open[request_id]
            tree = {"rank": self.rank, "rows": done, "columns": {n: h.hexdigest() for n, h in zip(self.names, hashes, strict=False)}}
            path = self.spool / f"{file_stem(request_id)}.rank-{self.rank}.json"
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(tree))
            os.replace(temporary, path)
        while len(self.open) > 64:  # clients that went away
            del self.open[next(iter(self.open))]
