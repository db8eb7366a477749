"""Go through samples once: check each, cut or skip what is too long, and keep a line on every row (the index), not the row itself."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from hsnb.boundaries import text_config
from hsnb.chat import data_error
from hsnb.errors import DataError, ParamsError
from hsnb.limits import Limits

TOO_LONG = ("error", "skip", "truncate")
HASH_BYTES = 16
# Ids that stand for something that is not text: media_placeholder_token_id (Kimi-K2.5), image_token_index (LLaVA), vision_start_token_id ...
_PLACEHOLDER = re.compile(r"(media|image|img|video|audio|vision)\w*_token(_id|_index)?")


class Row(NamedTuple):
    """One checked sample: ids and mask int64 [S], and "ok" or why its states are not to be extracted."""

    ids: np.ndarray
    mask: np.ndarray
    status: str


@dataclass(frozen=True)
class Rule:
    """What a sample must be. `vocab_size` None: ids are only checked to be 0 or more (the model is not on this machine)."""

    max_length: int
    too_long: str
    limits: Limits
    vocab_size: int | None
    placeholders: dict[int, str] = field(default_factory=dict)  # id: its name in config.json

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG or self.max_length < 1:
            raise ParamsError(
                got=f"too_long {self.too_long!r}" if self.too_long not in TOO_LONG else f"max_length {self.max_length}",
                expected="too_long error | skip | truncate, max_length >= 1",
                likely="a typo",
                next="mend it",
            )

    @property
    def most(self) -> int:
        """Return the most tokens of a sample: what is asked for, and what the server takes."""
        return min(self.max_length, self.limits.longest or self.max_length)

    def why(self) -> str:
        """Say which of the two it is."""
        return f"max_length {self.max_length}" if self.most == self.max_length else f"the server takes {self.most}: {self.limits.words()}"


def placeholders(config: dict) -> dict[int, str]:
    """Return {id: name} of a config.json's ids that stand for an image, a video or a sound."""
    parts = {**text_config(config), **config}
    return {int(v): k for k, v in parts.items() if _PLACEHOLDER.fullmatch(k) and isinstance(v, int) and not isinstance(v, bool)}


class Scan:
    """One pass over samples: iterate `rows` to the end, then call `finish`. Memory: some 70 bytes a row, whatever its length.

    `skipped`, `truncated`: by length. `unmasked`, `all_masked`: rows (of status "ok") with nothing, or everything, under the mask.
    """

    def __init__(self, rule: Rule):
        self.rule = rule
        self.lengths, self.masked, self.ok = array("q"), array("q"), bytearray()
        self.ids_hashes, self._row_hashes = bytearray(), bytearray()
        self.skipped = self.truncated = self.unmasked = self.all_masked = 0
        self.freq = np.zeros(rule.vocab_size or 0, np.int64)  # how often each token is under the mask
        self._too_long = 0
        self._first = (0, 0)  # sample and tokens

    def rows(self, samples: Iterable[tuple[Any, Any]]) -> Iterator[Row]:
        """Yield every sample as a Row, in order. Raises DataError, naming the sample, for what cannot be extracted as it is."""
        most, choice = self.rule.most, self.rule.too_long
        for sample, pair in enumerate(samples):
            ids, mask = check(sample, *pair, self.rule.vocab_size, self.rule.placeholders)
            status = "ok"
            if len(ids) > most:
                self._first = self._first if self._too_long else (sample, len(ids))
                self._too_long += 1
                if choice == "truncate":
                    ids, mask = ids[:most], mask[:most]
                    self.truncated += 1
                else:
                    status = f"skipped: {len(ids)} tokens, {self.rule.why()}"
                    self.skipped += 1
            self._enter(ids, mask, status)
            yield Row(ids, mask, status)

    def _enter(self, ids: np.ndarray, mask: np.ndarray, status: str) -> None:
        masked = int(mask.sum())
        self.lengths.append(len(ids))
        self.masked.append(masked)
        self.ok.append(status == "ok")
        ids_hash = xxhash.xxh3_128_digest(ids.tobytes())
        self.ids_hashes += ids_hash
        self._row_hashes += xxhash.xxh3_128_digest(ids_hash + xxhash.xxh3_128_digest(mask.tobytes()) + status.encode())
        if status == "ok":
            self.unmasked += not masked
            self.all_masked += masked == len(ids)
            if len(self.freq):
                np.add.at(self.freq, ids[mask == 1], 1)

    @property
    def too_long(self) -> int:
        """Return how many samples are longer than may be, whatever is done with them."""
        return self._too_long

    def problems(self) -> list[DataError]:
        """Return what forbids to go on with these samples as a whole."""
        found, rows = [], len(self.lengths)
        if not rows:
            found.append(data_error("no samples", "at least one", "an empty file", "name another data.source"))
        if self._too_long and self.rule.too_long == "error":
            own = self.rule.most == self.rule.max_length
            found.append(
                data_error(
                    f"{self._too_long} of {rows} samples are too long, the first is sample {self._first[0]} with {self._first[1]} tokens",
                    f"at most {self.rule.most} tokens ({'max_length' if own else self.rule.why()})",
                    "conversations of another context length",
                    "too_long skip (they keep their rows, without states) or too_long truncate (the first tokens are kept), or a larger "
                    + ("max_length" if own else "server.context_length and server.max_total_tokens"),
                )
            )
        elif rows and not any(self.ok):
            found.append(
                data_error(f"all {rows} samples are too long", f"some of at most {self.rule.most} tokens", self.rule.why(), "raise it")
            )
        elif rows and not any(m for m, ok in zip(self.masked, self.ok, strict=True) if ok):
            found.append(
                data_error(
                    f"no trained token in {rows} samples: every loss_mask is 0",
                    "1 on the tokens that a drafter is trained on",
                    "a mask that means the opposite, or a template whose answers were not found",
                    "mend loss_mask, or bring conversations",
                )
            )
        return found

    def counts(self) -> dict[str, int]:
        """Return rows, tokens, masked_tokens (both of status "ok"), skipped, truncated, unmasked, all_masked."""
        ok = np.frombuffer(self.ok, np.uint8).astype(bool)
        tokens, masked = (int(np.frombuffer(each, np.int64)[ok].sum()) if len(ok) else 0 for each in (self.lengths, self.masked))
        return {
            "rows": len(ok), "tokens": tokens, "masked_tokens": masked, "skipped": self.skipped, "truncated": self.truncated,
            "unmasked": self.unmasked, "all_masked": self.all_masked,
        }  # fmt: skip

    def fingerprint(self, order: np.ndarray) -> str:
        """Return the xxh3-128, hex, over every row's ids, mask and status in `order`."""
        prints = np.frombuffer(self._row_hashes, np.uint8).reshape(-1, HASH_BYTES)
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(prints[order]).tobytes())


def shuffled(rows: int, seed: int | None) -> np.ndarray:
    """Return the order of `rows` rows, int64 [rows]: their own for None, else sorted by the xxh3-64 of their number under `seed`.

    A hash and not a random generator: it gives the same order with every version of numpy.
    """
    if seed is None:
        return np.arange(rows)
    keys = np.fromiter((xxhash.xxh3_64_intdigest(row.to_bytes(8, "little"), seed) for row in range(rows)), np.uint64, rows)
    return np.argsort(keys, kind="stable")


def check(
    sample: int, ids: Any, mask: Any, vocab_size: int | None, placeholders: dict[int, str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask as int64 arrays [S], S >= 1. Raises DataError, naming the sample, for anything else."""
    got, likely = None, "another model's tokenizer, or a slip in how the data was made"
    tokens, marks = _array(ids), _array(mask)
    top = vocab_size or np.iinfo(np.int64).max
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        got, expected = f"input_ids is {str(ids)[:40]}", "a list of whole numbers"
    elif not tokens.size:
        got, expected = "no tokens", "at least one token"
    elif (outside := (tokens < 0) | (tokens >= top)).any():
        at = int(outside.argmax())
        got, expected = f"id {tokens[at]} at position {at}", f"0..{top - 1} (vocab_size {vocab_size})" if vocab_size else "0 or more"
    elif marks.shape != tokens.shape:
        got, expected = f"loss_mask of {marks.size if marks.ndim else mask} for {tokens.size} tokens", "one mark a token"
    elif marks.dtype.kind not in "iub" or ((marks != 0) & (marks != 1)).any():
        got, expected = f"loss_mask with {next(m for m in marks.tolist() if m not in (0, 1) or isinstance(m, float))}", "0 or 1"
    elif placeholders and (image := np.isin(tokens, list(placeholders))).any():
        at = int(image.argmax())
        got, expected = f"id {tokens[at]} at position {at} ({placeholders[int(tokens[at])]} of config.json)", "text only"
        likely = "a sample with an image: without it the server has nothing to put in the placeholder's stead"
    if got is not None:
        raise data_error(f"sample {sample}: {got}", expected, likely, "mend the sample, or take it out of the source")
    return tokens.astype(np.int64, copy=False), marks.astype(np.int64, copy=False)


def _array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return np.asarray(value, dtype=object)
