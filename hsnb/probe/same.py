"""The same states whatever is around them: alone, in a batch, in chunks, on every rank; and answers that the capture leaves alone."""

from __future__ import annotations

import itertools
import json
import math

from hsnb.checks import Check
from hsnb.dumps import Dump, open_dump
from hsnb.probe.bars import compare, middle, relative_l2
from hsnb.probe.identity import labelled
from hsnb.probe.witness import Evidence

_BLIND = "an error that is the same in every batch"


def noise_of(dumps: list[Dump]) -> dict[str, float]:
    """Return this server's own noise for each column: relative L2 (median) of one prompt under different company.

    `dumps`: the prompt alone, in a batch, and at the beginning of a longer one. Of the pairs the closest counts, so that one
    damaged dump is not taken for noise.
    """
    columns, rows = [labelled(d) for d in dumps], min(d.num_tokens for d in dumps)
    pairs = list(itertools.combinations(columns, 2))
    return {name: min(middle(relative_l2(a[name][1][:rows], b[name][1][:rows])) for a, b in pairs) for name in columns[0]}


def batch_check(alone: Dump, batched: Dump, noise: dict[str, float], distance: dict[str, float], dtype: str) -> Check:
    """Compare every column of a prompt alone with the same prompt among seven others."""
    other = labelled(batched)
    errors = {n: middle(relative_l2(other[n][1], c)) for n, (_, c, _) in labelled(alone).items()}
    return _worst("alone = in a batch of eight", errors, noise, distance, dtype)


def _worst(name: str, errors: dict[str, float], noise: dict[str, float], distance: dict[str, float], dtype: str, says: str = "") -> Check:
    """Return the judgement of the column that comes off worst: one that failed, else not proved, else the largest error."""
    judged = [
        (compare(name, e, distance.get(n, math.inf), noise[n], dtype, says=f" ({n}){says}", blind_to=_BLIND), e) for n, e in errors.items()
    ]
    return min(judged, key=lambda pair: (pair[0].ok, pair[0].not_proved, -pair[1]))[0]


def chunk_check(evidence: Evidence, alone: Dump, noise: dict[str, float], distance: dict[str, float], dtype: str) -> Check:
    """Compare the sentence's rows at the beginning of a prompt of several chunks with the sentence alone (the model is causal)."""
    name = "alone = at the beginning of a prompt in chunks"
    chunk = evidence.armed[0].server_args.get("chunked_prefill_size")
    if evidence.long is None:
        return Check(
            name, f"not seen: a chunk has {chunk} tokens", "a chunk short enough to send more than one", True, "anything about chunks"
        )
    long = open_dump(evidence.long.dump)
    chunks = long.metadata.get("chunks")
    chunks = json.loads(chunks) if isinstance(chunks, str) else chunks
    seen = f"{long.num_tokens} tokens in {len(chunks)} chunks"
    if len(chunks) < 2 or chunks[0][0] != 0 or chunks[-1][1] != long.num_tokens:
        return Check(name, seen, "two chunks or more, all of the prompt", False)
    rows = labelled(long)
    errors = {n: middle(relative_l2(rows[n][1][: alone.num_tokens], c)) for n, (_, c, _) in labelled(alone).items()}
    return _worst(name, errors, noise, distance, dtype, says=f", {seen}")


def rank_check(evidence: Evidence) -> Check:
    """Compare the digests of every column over the ranks: a rank's partial sum in place of the sum differs."""
    said = {}
    for path in evidence.sentence.ranks:
        tree = json.loads(path.read_text())
        said[tree["rank"]] = tree["columns"]
    size = evidence.armed[0].tp_size
    first = next(iter(said.values()), {})
    differing = sorted({name for columns in said.values() for name in first if columns.get(name) != first[name]})
    value = f"{len(said)} of {size} ranks" + (f", differing: {', '.join(differing)}" if differing else ", equal")
    return Check(
        "every rank has the same states",
        value,
        f"{size} of {size} ranks, bit for bit",
        len(said) == size and not differing,
        "one rank proves nothing",
    )


def unchanged_check(evidence: Evidence) -> Check:
    """Compare text, ids and logprobs of a captured request with those of one that is not, to the last bit."""
    once, twice = evidence.plain
    if once != twice:
        return Check(
            "answers unchanged by the capture", "the server differs from itself", "the same to the last bit", False, "", "", not_proved=True
        )
    same = evidence.sentence.answer() == once
    value = "identical" if same else "different"
    blind = "what the plug-in would change in every request alike: compare with a server without it (hsnb's own suite does)"
    return Check("answers unchanged by the capture", value, "the same to the last bit", same, blind)
