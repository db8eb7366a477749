"""Where a data set's samples come from: files or the demo, as token ids or as conversations, read a batch at a time.

Nothing is padded, cut or dropped here, and no more than a batch of samples is in memory.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hsnb.chat import data_error, tokenise
from hsnb.demo import stdlib_docs
from hsnb.params import DataParams
from hsnb.paths import resolve

BATCH = 512  # samples read, rendered and tokenised at once
_TALKS = ("conversations", "messages")
_COLUMNS = ("input_ids", "loss_mask", *_TALKS)
_NEEDED = "input_ids and loss_mask, or conversations or messages"

Batch = dict[str, Sequence[Any]]


@dataclass(frozen=True)
class Source:
    """What one name of `data.source` stands for: kind is demo, arrow (datasets.save_to_disk), parquet or jsonl."""

    kind: str
    path: Path
    files: tuple[Path, ...]
    samples: int = 0  # demo only

    def stat(self) -> str:
        """Return a cheap print of the files (path, size, time of change); "" for the demo, which has none."""
        seen = [f"{file}:{(info := file.stat()).st_size}:{info.st_mtime_ns}" for file in self.files]
        return xxhash.xxh3_128_hexdigest("\n".join(seen).encode()) if seen else ""

    def describe(self) -> str:
        """Return a line that changes with the name and the content, not with the folder it lies in. Reads every file."""
        if self.kind == "demo":
            return f"demo: {self.samples} samples of the documentation of Python {platform.python_version()}, text version {stdlib_docs.VERSION}"
        digest, size = xxhash.xxh3_128(), 0
        for file in self.files:
            digest.update(file.name.encode())
            with file.open("rb") as opened:
                while block := opened.read(1 << 22):
                    digest.update(block)
                    size += len(block)
        return f"{self.path.name}: {len(self.files)} {self.kind} file(s), {size} bytes, xxh3 {digest.hexdigest()}"


@dataclass(frozen=True)
class Sources:
    """All that `data.source` names, merged in the order given."""

    each: tuple[Source, ...]

    def stat(self) -> str:
        """Return a cheap print of all files; "" when there are none."""
        return "\n".join(filter(None, (source.stat() for source in self.each)))

    def describe(self) -> str:
        """Return a line that changes with the content of any of them, and with their order. Reads every file."""
        return "; ".join(source.describe() for source in self.each)

    def read(self, limit: int, tokenizer: Callable[[], Any]) -> tuple[int, Iterator[tuple[Any, Any]]]:
        """Return how many samples there are (0: not known before the end) and an iterator over their (input_ids, loss_mask).

        `limit` is the most samples to take (0: all). `tokenizer` is called only when there are conversations to render.
        """
        opened = [_READERS[source.kind](source) for source in self.each]
        total = sum(count for count, _ in opened) if all(count for count, _ in opened) else 0
        batches = (batch for _, own in opened for batch in own)
        return min(total, limit) if limit else total, _pairs(batches, limit, tokenizer)


def find_sources(data: DataParams) -> Sources:
    """Return what `data.source` names. Raises DataError when one is not there, not one kind of file, or named twice."""
    each = tuple(_find(name, data.samples) for name in data.sources)
    seen: set[Path] = set()
    for file in (file for source in each for file in source.files or (source.path,)):
        if file in seen:
            raise data_error(f"data.source has {file} twice", "each file once", "a folder and a file in it", "take one of the two out")
        seen.add(file)
    return Sources(each)


def _find(name: str, demo_samples: int) -> Source:
    if name == "demo":
        return Source("demo", Path("demo"), (), demo_samples)
    path = resolve(name)
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise data_error(
            f"{path} with the splits {', '.join(splits)}", "one split", "a DatasetDict was saved", f"set data.source to {path / splits[0]}"
        )
    if (path / "state.json").is_file():
        named = [entry["filename"] for entry in json.loads((path / "state.json").read_text())["_data_files"]]
        return Source("arrow", path, (path / "state.json", *(path / name for name in named)))
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    kinds = {kind: tuple(file for file in files if file.suffix == f".{kind}") for kind in ("parquet", "jsonl")}
    found = {kind: own for kind, own in kinds.items() if own}
    if len(found) != 1:
        raise data_error(
            f"data.source {path}: "
            + ("both parquet and jsonl files" if found else "no such data" if not files else "no parquet or jsonl file"),
            "demo, a folder of datasets.save_to_disk, a .parquet or .jsonl file, or a folder with files of one of these kinds",
            "a wrong path" if not found else "two data sets in one folder",
            "mend data.source in the params file" if not found else "name the files: data.source may be a list",
        )
    ((kind, own),) = found.items()
    return Source(kind, path, own)


def _pairs(batches: Iterator[Batch], limit: int, tokenizer: Callable[[], Any]) -> Iterator[tuple[Any, Any]]:
    start, loaded = 0, None
    for columns in batches:
        length = len(next(iter(columns.values()), ()))
        take = min(length, limit - start) if limit else length
        batch = {name: values[:take] for name, values in columns.items()}
        talks = next((batch[name] for name in _TALKS if name in batch), None)
        if "input_ids" in batch and "loss_mask" in batch:
            yield from zip(batch["input_ids"], batch["loss_mask"], strict=True)
        elif "input_ids" not in batch and talks is not None:
            loaded = loaded or tokenizer()
            yield from tokenise(loaded, talks, start)
        else:
            raise data_error(
                f"sample {start} with {sorted(batch) or 'none of the columns'}", _NEEDED, "other names for them", "rename the columns"
            )
        start += take
        if limit and start >= limit:
            return


def _read_demo(source: Source) -> tuple[int, Iterator[Batch]]:
    talks = stdlib_docs.conversations(source.samples)
    return len(talks), ({"messages": talks[at : at + BATCH]} for at in range(0, len(talks), BATCH))


def _read_arrow(source: Source) -> tuple[int, Iterator[Batch]]:
    from datasets import load_from_disk

    data = load_from_disk(str(source.path)).with_format("arrow")  # its iterator heeds a selection or shuffle, its table does not
    return len(data), (_from_arrow(table) for table in data.iter(BATCH))


def _read_parquet(source: Source) -> tuple[int, Iterator[Batch]]:
    import pyarrow.parquet as pq

    opened = [pq.ParquetFile(file, memory_map=True) for file in source.files]  # else a row group is read whole
    wanted = [[name for name in file.schema_arrow.names if name in _COLUMNS] for file in opened]
    tables = (table for file, names in zip(opened, wanted, strict=True) for table in file.iter_batches(BATCH, columns=names))
    return sum(file.metadata.num_rows for file in opened), (_from_arrow(table) for table in tables)


def _read_jsonl(source: Source) -> tuple[int, Iterator[Batch]]:
    def objects() -> Iterator[dict]:
        for file in source.files:
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        value = json.loads(line) if line.strip() else None
                    except ValueError as error:
                        raise data_error(
                            f"{file.name} line {number}: {error}", "one JSON object a line", "a cut file", "mend the line"
                        ) from error
                    if value is not None and not isinstance(value, dict):
                        raise data_error(
                            f"{file.name} line {number}: {line[:40].strip()}", "one JSON object a line", "a list of ids", _NEEDED
                        )
                    if value is not None:
                        yield value

    def batches() -> Iterator[Batch]:
        rows = objects()
        while batch := list(islice(rows, BATCH)):
            yield {name: [row.get(name) for row in batch] for name in _COLUMNS if any(name in row for row in batch)}

    return 0, batches()


_READERS = {"demo": _read_demo, "arrow": _read_arrow, "parquet": _read_parquet, "jsonl": _read_jsonl}


def _from_arrow(table: Any) -> Batch:
    """Return the known columns of an Arrow table or batch: lists of whole numbers as numpy views, everything else as Python has it."""
    import pyarrow as pa

    columns: Batch = {}
    for name in table.schema.names:
        if name in _COLUMNS:
            column = table.column(name)
            column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            flat = (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) and pa.types.is_integer(column.type.value_type)
            if flat and not column.null_count and not column.values.null_count:
                columns[name] = np.split(column.values.to_numpy(), column.offsets.to_numpy())[1:-1]
            else:
                columns[name] = column.to_pylist()
    return columns
