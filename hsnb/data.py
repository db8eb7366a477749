"""The data set that is run through the model: token ids and loss masks, written once, before any shard, as speculators 0.9 reads them.

A row's index is its name everywhere after: shards are strided over the rows, and a row's states are `hs_{row}.safetensors`.
So nothing is dropped here: a sample that is not to be extracted keeps its row, with the reason in `status`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hsnb.chat import data_error, load_tokenizer
from hsnb.demo import exclusive
from hsnb.errors import ParamsError
from hsnb.limits import limits_of
from hsnb.order import send_batches, send_order
from hsnb.params import Deployment
from hsnb.samples import find_sources
from hsnb.scan import Rule, Scan, placeholders, shuffled
from hsnb.table import ABOUT, INDEX, read_about, read_index, write

__all__ = ["Prepared", "load_prepared", "prepare", "send_batches", "send_order", "shard_rows", "survey"]

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "tokenization_*.py")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prepared:
    """A prepared data set.

    `tokens`, `masked_tokens`, `unmasked` (rows without a 1 in the mask) and `all_masked` (rows of nothing but 1) count rows of
    status "ok" only.
    """

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
    all_masked: int = 0

    def dataset(self) -> Any:
        """Return the datasets.Dataset (torch format): input_ids, loss_mask, seq_len, status. Memory-mapped: rows are read when asked for."""
        from datasets import load_from_disk

        return load_from_disk(str(self.path))

    @cached_property
    def index(self) -> dict[str, np.ndarray]:
        """Return a line a row, for whoever must not read the rows: sample (its number in the source), length, masked, ok, ids_xxh3."""
        return read_index(self.path / INDEX)

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
            "rows with everything under the mask": self.all_masked,
            **{name.replace("_", " "): value for name, value in self.settings.items()},
        }
        return pd.DataFrame({"value": pd.Series(values, dtype=object)})

    def _repr_html_(self) -> str:
        return self.frame().map(lambda v: f"{v:,}" if isinstance(v, int) else v).to_html(header=False)


def prepare(
    deployment: Deployment,
    out: Path,
    *,
    max_length: int = 512,
    too_long: str = "error",
    limit: int = 0,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenise and check `deployment.data`, and write it whole to `out`; with the same inputs a second call does no work.

    The source gives input_ids and loss_mask, or conversations (messages), which the model's own chat template renders; the mask
    is then 1 on the assistants' answers with their end-of-turn tokens. `limit` takes the first rows only (0: all). Samples over
    `max_length` tokens, or longer than the server takes (hsnb.limits), are an error, or skipped, or cut (`too_long`). Written:
    the Arrow data set (input_ids and loss_mask int64 lists, seq_len, status), in the order of the sources or shuffled by
    `data.seed`; token_freq.pt ({token: count under the mask} of the rows not skipped), hsnb-index.parquet and hsnb-data.json.
    Memory stays flat however large the data are. `progress(rows done, rows in all, or 0 while that is not known)` is called now
    and then. Raises ParamsError for an option out of range, and DataError, naming the sample, for what cannot be extracted as it is.
    """
    if limit < 0:
        raise ParamsError(got=f"limit {limit}", expected="limit >= 0 (0: all)", likely="a typo", next="mend it")
    config = deployment.model_config_json()
    rule = Rule(max_length, too_long, limits_of(deployment), deployment.model_shape().vocab_size, placeholders(config))
    out, sources = Path(out), find_sources(deployment.data)
    seed = deployment.data.seed if deployment.data.shuffle else None
    with exclusive(out):  # several shards started at once: one prepares, the others wait and read
        about, stat = read_about(out), sources.stat()
        same = about is not None and stat and about["stat"] == stat  # else the files are read whole, for their checksum
        settings = {
            "source": about["settings"]["source"] if about is not None and same else sources.describe(),
            "shuffle": "no" if seed is None else f"seed {seed}",
            "max_length": max_length,
            "longest_taken": rule.most,
            "too_long": too_long,
            "limit": limit,
            "vocab_size": rule.vocab_size,
            **_tokenizer_prints(deployment.model_path()),
        }
        if about is not None:
            _refuse_others(out, settings, about["settings"])
            return _whole(load_prepared(out, reused=True))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            likely = "a folder of something else, or a data set that hsnb did not prepare"
            raise data_error(f"{out} without {ABOUT}", "no such path, or an empty folder", likely, "name another run, or remove it")
        total, samples = sources.read(limit, lambda: load_tokenizer(deployment))
        scan = Scan(rule)

        def order() -> np.ndarray:
            return shuffled(len(scan.lengths), seed)

        def account() -> dict:
            for problem in scan.problems():
                raise problem
            return {**scan.counts(), "fingerprint": scan.fingerprint(order()), "settings": settings, "stat": stat}

        write(out, scan.rows(samples), scan, order, account, lambda done: progress(done, total) if progress else None)
    return load_prepared(out)


def survey(deployment: Deployment, *, max_length: int = 512, too_long: str = "error", progress: Progress | None = None) -> Scan:
    """Go through `deployment.data` as `prepare` does and write nothing; too-long samples are counted, not raised (Scan.problems).

    Works without the model's folder where the samples are token ids and the params have a `shape`.
    Raises DataError for a sample that cannot be extracted as it is.
    """
    shape = deployment.model_shape()
    config = deployment.model_config_json() if deployment.has_model() else {}
    total, samples = find_sources(deployment.data).read(0, lambda: load_tokenizer(deployment))
    scan = Scan(Rule(max_length, too_long, limits_of(deployment), shape.vocab_size, placeholders(config)))
    for done, _ in enumerate(scan.rows(samples), 1):
        if progress and done % 512 == 0:
            progress(done, total)
    return scan


def load_prepared(path: Path, *, reused: bool = False) -> Prepared:
    """Read what `prepare` wrote at `path`. Raises DataError when there is no hsnb-data.json of this format."""
    path = Path(path)
    about = read_about(path)
    if about is None:
        raise data_error(f"{path} without {ABOUT}", "a data set that hsnb prepared", "a wrong path, or another run", "hsnb prepare")
    known = {field.name for field in fields(Prepared)}
    return Prepared(path=path, reused=reused, **{name: value for name, value in about.items() if name in known})


def _whole(data: Prepared) -> Prepared:
    """Return `data` when its table and index can be read and have all rows. Raises DataError for one that was damaged since."""
    try:
        rows = len(data.dataset())
        readable = rows == data.rows and (data.index["length"] == data.lengths).all() and (data.index["ok"] == data.ok).all()
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
