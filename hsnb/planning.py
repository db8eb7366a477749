"""Make a plan from params and data, and refuse params that no start would accept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hsnb.boundaries import check_boundaries
from hsnb.data import Prepared, load_prepared, survey
from hsnb.errors import DataError, ExtractError, HsnbError, ServerError
from hsnb.limits import Limits, limits_of
from hsnb.measure import Measured
from hsnb.params import Deployment
from hsnb.paths import SPOOL_ROOT
from hsnb.plan import ITEMSIZE, Plan, Room
from hsnb.server.flags import check_flags, check_nodes
from hsnb.sizes import OUTPUT_FLOOR, SPOOL_FLOOR, both, bytes_per_token, floor
from hsnb.table import ABOUT

ROW_BYTES = 4096  # a file's header, and the rest of its last block
ID_BYTES = 8  # token_ids beside the states, int64


def plan(
    deployment: Deployment,
    out: Path,
    *,
    tokens: int = 0,
    data: Prepared | None = None,
    num_shards: int = 16,
    max_length: int = 512,
    too_long: str = "error",
    hours: float | None = None,
    limits: Limits | None = None,
    measured: Measured | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Plan the extraction into `out` (outputs/RUN/data); nothing is started and nothing written.

    Counted are `tokens`, or `data`, or what was prepared at `out`, or the source of the params, in this order. `limits`: a
    running server's own (else what the params say). The model's weights are never needed, and its folder only for conversations,
    when the params have a `shape`. Raises ParamsError or BoundaryError for params that cannot run, and DataError for a sample that
    cannot be extracted; what else forbids the run is in the plan's `refusals`.
    """
    check_runnable(deployment)
    shape, limits = deployment.model_shape(), limits or limits_of(deployment)
    if data is None and not tokens and (out / ABOUT).is_file():
        data = load_prepared(out)
    counted = (
        _of_number(tokens, num_shards, max_length, limits)
        if tokens
        else _of_data(data, num_shards, limits)
        if data is not None
        else _of_source(deployment, num_shards, max_length, too_long, progress)
    )
    refusals: list[HsnbError] = counted.pop("refusals")
    columns, rows = len(deployment.capture.boundaries) + 1, counted["samples"] or 0
    token_bytes = bytes_per_token(columns, shape.hidden_size, ITEMSIZE)
    need = counted["tokens"] * (token_bytes + ID_BYTES) + rows * ROW_BYTES
    written = 0 if tokens else _written(out)  # what lies there is of the data, not of a number
    own = deployment.extract
    if own.store:  # what is uploaded is freed: one sample must fit, and the flow waits for the others
        need, written = counted["longest"] * (token_bytes + ID_BYTES) + ROW_BYTES, 0
    output = _room(out, max(0, need - written), own.output_floor, OUTPUT_FLOOR)
    spool_folder = Path(deployment.server.spool) if deployment.server.spool else SPOOL_ROOT
    engine_bytes = bytes_per_token(columns, shape.hidden_size, 4 if deployment.server.dtype == "float32" else 2)
    spool = _room(spool_folder, counted["longest"] * (engine_bytes + ID_BYTES), own.spool_floor, SPOOL_FLOOR)
    refusals += [*_too_small(output, counted, token_bytes), *_spool_too_small(spool, counted["longest"])]
    return Plan(
        name=deployment.name, boundaries=tuple(sorted(deployment.capture.boundaries)), final=deployment.capture.final,
        hidden_size=shape.hidden_size, limits=limits, output=output, spool=spool, written=written, refusals=tuple(refusals),
        hours=hours, measured=measured, **counted,
    )  # fmt: skip


def check_runnable(deployment: Deployment, layout: str = "speculators") -> None:
    """Refuse params that no start would accept, by the start's own checks of them: flags, boundaries, shape, what the layout can hold.

    What depends on the machine (port, GPUs, disk) is not looked at: the data may be prepared on another one.
    """
    check_flags(deployment.server.flags, deployment.server.env)
    check_nodes(deployment.server, node_rank=0)  # where it will run is not known here
    if deployment.has_model():
        from hsnb import extract

        extract.check_first(deployment, layout)
    else:
        check_boundaries(deployment.capture.boundaries, deployment.model_shape().num_layers)


def _of_number(tokens: int, num_shards: int, max_length: int, limits: Limits) -> dict[str, Any]:
    shards = tuple(tokens // num_shards + (shard < tokens % num_shards) for shard in range(num_shards))
    longest = min(tokens, max_length, limits.longest or max_length)
    return {
        "source": f"{tokens:,} tokens", "tokens": tokens, "samples": None, "shard_tokens": shards, "longest": longest,
        "max_length": max_length, "refusals": [],
    }  # fmt: skip


def _of_data(data: Prepared, num_shards: int, limits: Limits) -> dict[str, Any]:
    most, given = limits.longest, data.settings
    refused = np.flatnonzero(data.ok & (data.lengths > most)) if most else ()
    refusals = [
        DataError(
            got=f"{len(refused)} rows of {data.path} are longer than the server takes, the first is row {refused[0]} "
            f"with {data.lengths[refused[0]]} tokens",
            expected=f"at most {most} ({limits.words()})",
            likely="the server has another context length, or less room, than when the data were prepared",
            next="raise server.context_length and server.max_total_tokens, or prepare another run with a smaller max_length",
        )
    ] if len(refused) else []  # fmt: skip
    counts = {name: getattr(data, name) for name in ("tokens", "masked_tokens", "skipped", "truncated", "unmasked", "all_masked")}
    return _of_lengths(data.lengths, data.ok, num_shards) | counts | {
        "source": f"prepared: {data.path} (max_length {given['max_length']}, too_long {given['too_long']})",
        "too_long": data.skipped + data.truncated, "max_length": min(given["max_length"], given["longest_taken"]), "refusals": refusals,
    }  # fmt: skip


def _of_source(deployment: Deployment, num_shards: int, max_length: int, too_long: str, progress: Any) -> dict[str, Any]:
    scan = survey(deployment, max_length=max_length, too_long=too_long, progress=progress)
    counts = scan.counts()
    del counts["rows"]
    lengths, ok = np.array(scan.lengths), np.frombuffer(scan.ok, np.uint8).astype(bool)
    return _of_lengths(lengths, ok, num_shards) | counts | {
        "source": f"read through: {', '.join(deployment.data.sources)}", "too_long": scan.too_long, "max_length": max_length,
        "refusals": scan.problems(),
    }  # fmt: skip


def _of_lengths(lengths: np.ndarray, ok: np.ndarray, num_shards: int) -> dict[str, Any]:
    taken = np.where(ok, lengths, 0)
    shards = tuple(int(taken[shard::num_shards].sum()) for shard in range(num_shards))
    return {"samples": int(ok.sum()), "shard_tokens": shards, "longest": int(taken.max(initial=0)), "lengths": lengths}


def _too_small(output: Room, counted: dict, token_bytes: int) -> list[HsnbError]:
    if output.enough:
        return []
    shard = max(counted["shard_tokens"]) * token_bytes
    return [
        ExtractError(
            got=f"{both(output.free)} free at {output.path}, of which {both(output.floor)} are to stay free",
            expected=f"room for {both(output.need)}, the states of {counted['tokens']:,} tokens that are not there yet",
            likely=f"a disk for some of the {len(counted['shard_tokens'])} shards ({both(shard)} each), not for all",
            next="link outputs/ to a larger disk, capture fewer boundaries, or lower extract.output_floor",
        )
    ]


def _spool_too_small(spool: Room, longest: int) -> list[HsnbError]:
    if spool.enough:
        return []
    return [
        ServerError(
            got=f"{both(spool.free)} free at {spool.path} (the spool), of which {both(spool.floor)} are to stay free",
            expected=f"room for one sample of {longest:,} tokens: {both(spool.need)}",
            likely="a container's small /dev/shm, or what killed servers left there",
            next="docker run --shm-size=64g, or name a folder on a disk with server.spool",
        )
    ]


def _written(out: Path) -> int:
    """Return the bytes of a run's states that are there already: all below `out` but the table itself."""
    return sum(entry.stat().st_size for folder, _, files in os.walk(out) for entry in (Path(folder, f) for f in files)
               if folder != str(out))  # fmt: skip


def _room(path: Path, need: int, floor_given: int | None, floor_most: int) -> Room:
    folder = path
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return Room(path, usage.free, need, floor(floor_given, floor_most, usage.total))
