"""The data set that is run through the model: token ids and loss masks, written once, before any shard, as speculators 0.9 reads them.

A row's index is its name everywhere after: shards are strided over the rows, and a row's states are `hs_{row}.safetensors`.
So nothing is dropped here: a sample that is not to be extracted keeps its row, with the reason in `status`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hsnb.boundaries import text_config
from hsnb.chat import data_error, load_tokenizer
from hsnb.demo import exclusive
from hsnb.errors import ParamsError
from hsnb.params import Deployment
from hsnb.samples import BATCH, check, find_source, read

DATA_FORMAT = 1
ABOUT = "hsnb-data.json"
TOO_LONG = ("error", "skip", "truncate")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "tokenization_*.py")


@dataclass(frozen=True)
class Prepared:
    """A prepared data set. `tokens`, `masked_tokens` and `unmasked` (rows without a 1 in the mask) count rows of status "ok" only."""

    path: Path
    rows: int
    tokens: int
    masked_tokens: int
    skipped: int
    truncated: int
    unmasked: int
    fingerprint: str  # xxh3-128, hex, over every row's ids, mask and status
    settings: dict[str, Any]  # what it was prepared from; another value is refused at the same place
    reused: bool = False

    def dataset(self) -> Any:
        """Return the datasets.Dataset (torch format): input_ids, loss_mask, seq_len, status."""
        from datasets import load_from_disk

        return load_from_disk(str(self.path))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, skipped ones too: int64 [rows]; `lengths[ok]` sums to `tokens`."""
        return self.dataset().data.column("seq_len").to_numpy()

    @cached_property
    def ok(self) -> np.ndarray:
        """Rows whose states are to be extracted: bool [rows]."""
        return self.dataset().data.column("status").to_numpy() == "ok"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {**asdict(self), "path": str(self.path)}

    def frame(self) -> Any:
        """Return the summary as a pandas DataFrame, one quantity a row."""
        import pandas as pd

        lengths = self.lengths[self.ok] if self.ok.any() else np.zeros(1, np.int64)
        values = {
            "rows": self.rows,
            "tokens": self.tokens,
            "tokens under the mask": self.masked_tokens,
            "tokens a row, mean": round(float(lengths.mean()), 1),
            "tokens a row, least": int(lengths.min()),
            "tokens a row, most": int(lengths.max()),
            "rows skipped": self.skipped,
            "rows cut": self.truncated,
            "rows with nothing under the mask": self.unmasked,
            **{name.replace("_", " "): value for name, value in self.settings.items()},
        }
        return pd.DataFrame({"value": pd.Series(values, dtype=object)})

    def _repr_html_(self) -> str:
        return self.frame().to_html(header=False)


def prepare(
    deployment: Deployment,
    out: Path,
    *,
    max_length: int = 512,
    too_long: str = "error",
    limit: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Tokenise and check `deployment.data`, and write it whole to `out`; with the same inputs a second call does no work.

    The source gives input_ids and loss_mask, or conversations (messages), which the model's own chat template renders; the mask
    is then 1 on the assistants' answers with their end-of-turn tokens. `limit` takes the first rows only (0: all). Samples over
    `max_length` tokens are an error, or skipped, or cut (`too_long`). Written: the Arrow data set (input_ids and loss_mask int64
    lists, seq_len, status), token_freq.pt ({token: count under the mask} of the rows not skipped) and hsnb-data.json.
    `progress(rows done, rows in all, or 0 while that is not known)` is called now and then.
    Raises ParamsError for an option out of range, and DataError, naming the sample, for what cannot be extracted as it is.
    """
    if too_long not in TOO_LONG or max_length < 1 or limit < 0:
        bad = f"too_long {too_long!r}" if too_long not in TOO_LONG else f"max_length {max_length}" if max_length < 1 else f"limit {limit}"
        raise ParamsError(
            got=bad, expected="too_long error | skip | truncate, max_length >= 1, limit >= 0", likely="a typo", next="mend it"
        )
    out, source = Path(out), find_source(deployment.data)
    with exclusive(out):  # several shards started at once: one prepares, the others wait and read
        about, stat = _read_about(out), source.stat()
        same = about is not None and stat and about["stat"] == stat  # else the files are read whole, for their checksum
        settings = {
            "source": about["settings"]["source"] if about is not None and same else source.describe(),
            "max_length": max_length,
            "too_long": too_long,
            "limit": limit,
            "vocab_size": int(text_config(deployment.model_config_json())["vocab_size"]),
            **_tokenizer_prints(deployment.model_path()),
        }
        if about is not None:
            _refuse_others(out, settings, about["settings"])
            return _whole(load_prepared(out, reused=True))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            likely = "a folder of something else, or a data set that hsnb did not prepare"
            raise data_error(f"{out} without {ABOUT}", "no such path, or an empty folder", likely, "name another run, or remove it")
        total, samples = read(source, limit, lambda: load_tokenizer(deployment))
        tables, counts, freq = _collect(samples, settings, lambda done: progress(done, total) if progress else None)
        _write(out, tables, freq, {"format": DATA_FORMAT, **counts, "settings": settings, "stat": stat})
    return load_prepared(out)


def load_prepared(path: Path, *, reused: bool = False) -> Prepared:
    """Read what `prepare` wrote at `path`. Raises DataError when there is no hsnb-data.json of this format."""
    path = Path(path)
    about = _read_about(path)
    if about is None:
        raise data_error(f"{path} without {ABOUT}", "a data set that hsnb prepared", "a wrong path, or another run", "hsnb prepare")
    known = {field.name for field in fields(Prepared)}
    return Prepared(path=path, reused=reused, **{name: value for name, value in about.items() if name in known})


def _whole(data: Prepared) -> Prepared:
    """Return `data` when its table can be read and has all its rows. Raises DataError for one that was damaged since."""
    try:
        rows = len(data.dataset())
        readable = len(data.lengths) == len(data.ok) == data.rows
    except Exception as error:  # datasets and pyarrow raise a dozen kinds for a file that is gone or cut
        rows, readable = f"{type(error).__name__}", False
    if not readable:
        raise data_error(
            f"{data.path}: a table of {rows} rows", f"{data.rows} rows, as it was prepared", "a file removed or cut since",
            "use another run (-p run NAME): the states in this folder belong to the rows that were",
        )  # fmt: skip
    return data


def shard_rows(num_rows: int, shard: int, num_shards: int) -> range:
    """Return the rows of one shard: shard, shard + num_shards, ...; strided, so that every shard sees the whole data set."""
    if num_shards < 1 or not 0 <= shard < num_shards:
        raise ParamsError(
            got=f"shard {shard}" if num_shards >= 1 else f"num_shards {num_shards}",
            expected=f"0..{num_shards - 1} ({num_shards} shards)" if num_shards >= 1 else "at least 1",
            likely="shards are counted from 0",
            next=f"--p shard {num_shards - 1} is the last" if num_shards >= 1 else "--p num_shards 16",
        )
    return range(shard, num_rows, num_shards)


def _collect(samples: Iterable[tuple[Any, Any]], settings: dict, done: Callable[[int], None]) -> tuple[list, dict, np.ndarray]:
    """Return the Arrow batches, the counts that Prepared has, and how often each token of the vocabulary is under the mask."""
    most, choice = settings["max_length"], settings["too_long"]
    tables: list = []
    over: list[tuple[int, int]] = []
    rows: list[tuple[np.ndarray, np.ndarray, str]] = []
    counts = dict.fromkeys(("rows", "tokens", "masked_tokens", "skipped", "truncated", "unmasked"), 0)
    freq = np.zeros(settings["vocab_size"], np.int64)
    digest = xxhash.xxh3_128()
    for sample, pair in enumerate(samples):
        ids, mask = check(sample, *pair, settings["vocab_size"])
        status = "ok"
        if len(ids) > most:
            over.append((sample, len(ids)))
            if choice == "truncate":
                ids, mask = ids[:most], mask[:most]
                counts["truncated"] += 1
            else:
                status = f"skipped: {len(ids)} tokens, max_length {most}"
                counts["skipped"] += 1
        counts["rows"] += 1
        if status == "ok":
            under = ids[mask == 1]
            np.add.at(freq, under, 1)
            counts["tokens"] += len(ids)
            counts["masked_tokens"] += len(under)
            counts["unmasked"] += not len(under)
        for part in (np.int64(len(ids)).tobytes(), ids.tobytes(), mask.tobytes(), status.encode()):
            digest.update(part)
        rows.append((ids, mask, status))
        if len(rows) == BATCH:
            tables.append(_arrow(rows))
            rows = []
            done(counts["rows"])
    if rows or not tables:
        tables.append(_arrow(rows))
    done(counts["rows"])
    if not counts["rows"]:
        raise data_error("no samples", "at least one", "an empty file", "name another data.source")
    if over and choice == "error":
        raise data_error(
            f"{len(over)} of {counts['rows']} samples are too long, the first is sample {over[0][0]} with {over[0][1]} tokens",
            f"at most {most} tokens (max_length)",
            "conversations of another context length",
            "too_long skip (they keep their rows, without states) or too_long truncate (the first tokens are kept), or a larger max_length",
        )
    return tables, counts | {"fingerprint": digest.hexdigest()}, freq


def _arrow(rows: list[tuple[np.ndarray, np.ndarray, str]]) -> Any:
    """Return rows as one Arrow table: input_ids and loss_mask lists of int64, seq_len int64, status string."""
    import pyarrow as pa

    lengths = np.array([len(ids) for ids, _, _ in rows], np.int64)
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    flat = [np.concatenate([row[part] for row in rows]) if rows else np.zeros(0, np.int64) for part in (0, 1)]
    columns = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in flat]
    status = pa.array([status for _, _, status in rows], pa.string())
    return pa.table([*columns, pa.array(lengths), status], names=["input_ids", "loss_mask", "seq_len", "status"])


def _write(out: Path, tables: list, freq: np.ndarray, about: dict) -> None:
    """Write the three parts beside `out` and rename them into place when they are whole."""
    import datasets
    import pyarrow as pa
    import torch

    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed call left; nobody else writes there under the lock
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset(pa.concat_tables(tables)).with_format("torch").save_to_disk(str(partial))
        # As speculators 0.9 saves it (save_token_frequency_distribution), but for skipped rows, which are never trained on.
        torch.save({int(token): int(freq[token]) for token in freq.nonzero()[0]}, partial / "token_freq.pt")
        (partial / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        partial.rename(out)  # over an empty folder too
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not bars:
            datasets.enable_progress_bars()


def _read_about(path: Path) -> dict | None:
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


def _refuse_others(out: Path, now: dict, before: dict) -> None:
    """Raise DataError for the first setting that is not what the data at `out` was prepared with."""
    for name in {**before, **now}:
        if now.get(name) != before.get(name):
            raise data_error(
                f"{name} is now {now.get(name)!r}",
                f"{before.get(name)!r}, with which {out} was prepared",
                f"another {name.replace('_', ' ')} for a run that was begun",
                "name another run, or go back to the value before",
            )


def _tokenizer_prints(model: Path) -> dict[str, str]:
    """Return the xxh3-128 of the tokenizer's files and of the chat template, without loading either."""
    digest = xxhash.xxh3_128()
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in model.glob(pattern)}):
        digest.update(file.name.encode() + file.read_bytes())
    template = next((file.read_bytes() for name in ("jinja", "json") if (file := model / f"chat_template.{name}").is_file()), b"")
    if not template and (config := model / "tokenizer_config.json").is_file():
        template = json.dumps(json.loads(config.read_text()).get("chat_template", "")).encode()
    return {"tokenizer": digest.hexdigest(), "chat_template": xxhash.xxh3_128_hexdigest(template)}
