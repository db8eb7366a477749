"""What a run will be, before anything starts: samples, tokens, bytes, room, and every reason not to begin."""

from __future__ import annotations

import html
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
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
from hsnb.server.flags import check_flags
from hsnb.sizes import both, bytes_per_token, decimal
from hsnb.table import ABOUT

ITEMSIZE = 2  # the layouts hold bfloat16
ROW_BYTES = 4096  # a file's header, and the rest of its last block
ID_BYTES = 8  # token_ids beside the states, int64


@dataclass(frozen=True)
class Room:
    """A folder's file system: bytes free, bytes needed there (still to be written), and what is to stay free of them."""

    path: Path
    free: int
    need: int
    floor: int = 0

    @property
    def enough(self) -> bool:
        return self.need <= self.free - self.floor


@dataclass(frozen=True)
class Plan:
    """A run's size and room. `samples` None: only a number of tokens was given. Displays itself; `require` raises the first refusal."""

    name: str
    source: str  # what the tokens were counted from
    tokens: int
    samples: int | None
    shard_tokens: tuple[int, ...]  # of every shard
    boundaries: tuple[int, ...]
    final: str
    hidden_size: int
    longest: int  # tokens of the longest sample to be extracted
    limits: Limits
    max_length: int
    output: Room
    spool: Room  # its need: the longest sample, in the engine's own dtype
    written: int  # bytes of this run that are there already
    too_long: int = 0
    skipped: int = 0
    truncated: int = 0
    unmasked: int = 0
    all_masked: int = 0
    masked_tokens: int | None = None
    refusals: tuple[HsnbError, ...] = ()
    hours: float | None = None
    measured: Measured | None = None
    lengths: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def columns(self) -> int:
        """Return the vectors a token: the boundaries and the final state."""
        return len(self.boundaries) + 1

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.columns, self.hidden_size, ITEMSIZE)

    @property
    def bytes(self) -> int:
        """Return the bytes of all states; files add their ids and headers (`output.need`)."""
        return self.tokens * self.bytes_per_token

    @property
    def ok(self) -> bool:
        return not self.refusals

    def require(self) -> Plan:
        """Raise the first refusal; return self when there is none."""
        for refusal in self.refusals:
            raise refusal
        return self

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (quantity, value, note) of everything that is known."""
        takes = self.limits.longest
        rows = [("counted from", self.source, "")]
        if self.samples is not None:
            rows += [
                ("samples", f"{self.samples:,}", f"{self.skipped:,} more are skipped" if self.skipped else ""),
                ("too long", f"{self.too_long:,}", self._handled()),
                ("tokens trained", f"{self.masked_tokens:,}", f"{self.masked_tokens / max(1, self.tokens):.0%} of the tokens"),
                ("mask of nothing but 0", f"{self.unmasked:,} samples", "CHECK: they train nothing" if self.unmasked else ""),
                ("mask of nothing but 1", f"{self.all_masked:,} samples", "CHECK: the prompt is trained too" if self.all_masked else ""),
                ("longest sample", f"{self.longest:,} tokens", f"{both(self.longest * self.bytes_per_token)} of states"),
            ]
        rows += [
            ("tokens", f"{self.tokens:,}", ""),
            ("the server takes", f"{takes:,} tokens a prompt" if takes else "not known yet", self.limits.words()),
            ("bytes a token", f"{self.bytes_per_token:,}", f"{self.columns} vectors x {self.hidden_size} x {ITEMSIZE} bytes"),
            ("states in all", both(self.bytes), f"B_{', B_'.join(map(str, self.boundaries))} and the final state, bfloat16"),
            ("the largest shard", both(max(self.shard_tokens) * self.bytes_per_token), f"of {len(self.shard_tokens)}"),
            (
                "output",
                f"{both(self.output.free)} free",
                f"{self.output.path}: {both(self.output.need)} to write, {both(self.output.floor)} stay free",
            ),
            ("written already", both(self.written), ""),
            ("spool", f"{both(self.spool.free)} free", f"{self.spool.path}: the longest sample takes {both(self.spool.need)}"),
            ("writing speed", f"{self.bytes_per_token * 1e4 / 1e9:.2f} GB/s", "for each 10,000 prefill tokens/s"),
        ]
        if self.hours:
            rate = self.tokens / self.hours / 3600
            rows.append((f"for {self.hours:g} h", f"{rate:,.0f} tokens/s", f"{decimal(rate * self.bytes_per_token)}/s to write"))
        return rows + (self.measured.rows(self.tokens, self.bytes) if self.measured else [])

    def _handled(self) -> str:
        what = [f"{n:,} {word}" for n, word in ((self.skipped, "skipped"), (self.truncated, "cut")) if n]
        return " and ".join(what) or (
            "refused" if self.too_long else f"none over {min(self.max_length, self.limits.longest or self.max_length):,}"
        )

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows(), columns=["quantity", "value", "note"])

    def plot(self, ax: Any = None) -> Any:
        """Draw the length histogram. Raises DataError when only a number of tokens was given."""
        from hsnb import figures

        if self.lengths is None:
            raise DataError(
                got="a plan of a number of tokens", expected="samples", likely="--tokens was given", next="plan the data set itself"
            )
        return figures.lengths(self.lengths, max_length=self.max_length, server_takes=self.limits.longest, ax=ax)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for --json."""
        names = (
            "name", "source", "samples", "tokens", "masked_tokens", "too_long", "skipped", "truncated", "unmasked", "all_masked", "longest",
            "boundaries", "final", "hidden_size", "columns", "bytes_per_token", "bytes", "written", "max_length",
        )  # fmt: skip
        return {
            "ok": self.ok,
            **{name: getattr(self, name) for name in names},
            "size": both(self.bytes),
            "shards": [{"tokens": tokens, "bytes": tokens * self.bytes_per_token} for tokens in self.shard_tokens],
            "server_takes": self.limits.longest,
            **{
                name: {"path": str(r.path), "free": r.free, "need": r.need, "floor": r.floor, "enough": r.enough}
                for name, r in (("output", self.output), ("spool", self.spool))
            },
            "tokens_per_s_needed": self.tokens / self.hours / 3600 if self.hours else None,
            "measured": self.measured.as_dict(self.tokens) if self.measured else None,
            "refusals": [{"type": type(e).__name__, **e.as_dict()} for e in self.refusals],
        }

    def text(self) -> str:
        """Return the rows for a terminal, and the refusals after them."""
        rows = self.rows()
        width = [max(len(row[at]) for row in rows) for at in (0, 1)]
        lines = [f"{what:{width[0]}}  {value:{width[1]}}  {note}".rstrip() for what, value, note in rows]
        return "\n".join([*lines, *map(str, self.refusals)])

    def _repr_html_(self) -> str:
        refused = "".join(f"<p><b>{html.escape(str(error))}</b></p>" for error in self.refusals)
        return (
            f"<p>Plan of {html.escape(self.name)}: {html.escape(both(self.bytes))}</p>"
            + self.frame().to_html(index=False, border=0)
            + refused
        )


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
    written = _written(out)
    output = Room(out, _free(out), max(0, need - written), deployment.storage.floor_bytes)
    spool_folder = Path(deployment.server.spool) if deployment.server.spool else SPOOL_ROOT
    engine_bytes = bytes_per_token(columns, shape.hidden_size, 4 if deployment.server.dtype == "float32" else 2)
    spool = Room(spool_folder, _free(spool_folder), counted["longest"] * engine_bytes)
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
    most, asked = limits.longest, data.settings["longest_taken"]
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
        "source": f"prepared: {data.path}", "too_long": data.skipped + data.truncated, "max_length": min(asked, data.settings["max_length"]),
        "refusals": refusals,
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
            next="link outputs/ to a larger disk, capture fewer boundaries, or lower storage.floor_gib",
        )
    ]


def _spool_too_small(spool: Room, longest: int) -> list[HsnbError]:
    if spool.enough:
        return []
    return [
        ServerError(
            got=f"{both(spool.free)} free at {spool.path} (the spool)",
            expected=f"room for one sample of {longest:,} tokens: {both(spool.need)}",
            likely="a container's small /dev/shm, or what killed servers left there",
            next="docker run --shm-size=64g, or name a folder on a disk with server.spool",
        )
    ]


def _written(out: Path) -> int:
    """Return the bytes of a run's states that are there already: all below `out` but the table itself."""
    return sum(entry.stat().st_size for folder, _, files in os.walk(out) for entry in (Path(folder, f) for f in files)
               if folder != str(out))  # fmt: skip


def _free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
