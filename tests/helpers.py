"""Ask a real server for one prompt's dump."""

from __future__ import annotations

import uuid

import torch

from hsnb.collect import collect
from hsnb.dumps import open_dump


def prompt_ids(n: int, vocab: int, seed: int = 0) -> list[int]:
    """Return n token ids that no special token is among."""
    return torch.randint(20, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def take(server, token_ids: list[int], client=None):
    """Send one prompt and return its opened dump; it stays in the spool."""
    rid = f"hsnb-test-{uuid.uuid4().hex}"
    if client is not None:
        client.generate(token_ids, rid=rid)
    else:
        with server.client() as own:
            own.generate(token_ids, rid=rid)
    return open_dump(collect(server.spool, rid, server.armed[0].format))
