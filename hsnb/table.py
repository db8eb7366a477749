"""The files of a prepared data set: the Arrow table that trainers read, an index with a line a row, token frequencies, hsnb-data.json.

Rows go to disk as they come and are then copied once, in their final order, through datasets' own writer: neither step holds
more than a batch of rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hsnb.chat import data_error
from hsnb.samples import BATCH
from hsnb.scan import HASH_BYTES, Row, Scan

DATA_FORMAT = 2  # 2: the index, and a fingerprint that is made from it
ABOUT = "hsnb-data.json"
INDEX = "hsnb-index.parquet"


def write(out: Path, rows: Iterable[Row], scan: Scan, order: Callable[[], np.ndarray], about: Callable[[], dict], done) -> None:
    """Write a whole data set to `out`: all of it, or nothing.

    `rows` are `scan`'s, `order` and `about` are asked once they are all through; `done(rows so far)` is called a batch.
    """
    partial, scratch = (out.with_name(f".{out.name}.{kind}") for kind in ("partial", "rows"))
    for folder in (partial, scratch):
        shutil.rmtree(folder, ignore_errors=True)  # what a killed call left; nobody else writes there under the lock
    try:
        scratch.mkdir(parents=True)
        _stream(scratch / "rows.arrows", rows, done)
        tree = about()
        _save(scratch / "rows.arrows", order(), partial)
        write_index(partial / INDEX, scan, order())
        _save_freq(partial / "token_freq.pt", scan.freq)
        (partial / ABOUT).write_text(json.dumps({"format": DATA_FORMAT, **tree}, indent=2) + "\n")
        partial.rename(out)  # over an empty folder too
    finally:
        for folder in (partial, scratch):
            shutil.rmtree(folder, ignore_errors=True)


def _stream(path: Path, rows: Iterable[Row], done: Callable[[int], None]) -> None:
    """Write rows in the order they come as one Arrow stream: input_ids and loss_mask lists of int64, seq_len int64, status string."""
    import pyarrow as pa

    count = 0
    with pa.ipc.new_stream(path, to_arrow([]).schema) as out:
        rows = iter(rows)
        while batch := list(islice(rows, BATCH)):
            out.write_table(to_arrow(batch))
            count += len(batch)
            done(count)
    done(count)


def to_arrow(rows: Iterable[Row]) -> Any:
    """Return rows as one Arrow table."""
    import pyarrow as pa

    rows = list(rows)
    lengths = np.array([len(row.ids) for row in rows], np.int64)
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    flat = [np.concatenate([row[part] for row in rows]) if rows else np.zeros(0, np.int64) for part in (0, 1)]
    columns = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in flat]
    status = pa.array([row.status for row in rows], pa.string())
    return pa.table([*columns, pa.array(lengths), status], names=["input_ids", "loss_mask", "seq_len", "status"])


def _save(stream: Path, order: np.ndarray, folder: Path) -> None:
    """Copy the stream's rows in `order` into a data set as `datasets` saves it (torch format set, as speculators 0.9 expects)."""
    import datasets

    with _quiet():
        table = datasets.Dataset.from_file(str(stream))  # memory-mapped
        if (order != np.arange(len(order))).any():
            table = table.select(order)
        table.with_format("torch").save_to_disk(str(folder))


def write_index(path: Path, scan: Scan, order: np.ndarray) -> None:
    """Write a line a row: sample (its number in the source), length and masked (tokens), ok, and the xxh3-128 of its ids (int64, little-endian)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    hashes = np.ascontiguousarray(np.frombuffer(scan.ids_hashes, np.uint8).reshape(-1, HASH_BYTES)[order])
    columns = {
        "sample": pa.array(order.astype(np.int64)),
        "length": pa.array(np.frombuffer(scan.lengths, np.int64)[order]),
        "masked": pa.array(np.frombuffer(scan.masked, np.int64)[order]),
        "ok": pa.array(np.frombuffer(scan.ok, np.uint8)[order].astype(bool)),
        "ids_xxh3": pa.FixedSizeBinaryArray.from_buffers(pa.binary(HASH_BYTES), len(order), [None, pa.py_buffer(hashes)]),
    }
    pq.write_table(pa.table(columns), path)


def read_index(path: Path) -> dict[str, np.ndarray]:
    """Return the index's columns as arrays [rows]; ids_xxh3 as bytes objects."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def _save_freq(path: Path, freq: np.ndarray) -> None:
    """Save {token: count under the mask} of the rows not skipped, as speculators 0.9 does (save_token_frequency_distribution)."""
    import torch

    torch.save({int(token): int(freq[token]) for token in freq.nonzero()[0]}, path)


def read_about(path: Path) -> dict | None:
    """Return hsnb-data.json, None where there is none. Raises DataError for another format, or a file that is not whole."""
    file = path / ABOUT
    if not file.is_file():
        return None
    try:
        about = json.loads(file.read_text())
        version = about["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise data_error(f"{file}: {error!r}", "what hsnb wrote", "it was edited or cut", "remove the folder and prepare again") from error
    if version != DATA_FORMAT:
        raise data_error(f"{file} of format {version}", f"format {DATA_FORMAT}", "another version of hsnb wrote it", "name another run")
    return about


@contextmanager
def _quiet():
    """Switch off datasets' own progress bars: hsnb shows one of its own."""
    import datasets

    were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()
