"""The Arrow table beside speculators' states, for rows whose states come from another folder; and draft vocabularies."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from hsnb.errors import ParamsError

BATCH = 4096  # rows in one Arrow batch


def write_table(folder: Path, labels: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write input_ids, loss_mask (int64 lists) and seq_len as a data set in `folder`, and token_freq.pt; state.json comes last."""
    import datasets
    import pyarrow as pa

    tables, batch, counts = [], [], Counter()
    for ids, mask in labels:
        batch.append((ids.numpy(), mask.numpy()))
        counts.update(ids[mask == 1].tolist())
        if len(batch) == BATCH:
            tables.append(_arrow(batch))
            batch = []
    tables.append(_arrow(batch))
    partial = folder / ".table.partial"
    shutil.rmtree(partial, ignore_errors=True)
    quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset(pa.concat_tables(tables)).with_format("torch").save_to_disk(str(partial))
        torch.save(dict(sorted(counts.items())), partial / "token_freq.pt")
        for path in sorted(partial.iterdir(), key=lambda p: p.name == "state.json"):  # the reader begins with state.json
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not quiet:
            datasets.enable_progress_bars()


def _arrow(rows: list[tuple[np.ndarray, np.ndarray]]):
    import pyarrow as pa

    lengths = np.array([len(ids) for ids, _ in rows], np.int64)
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    flat = [np.concatenate([row[part] for row in rows]) if rows else np.zeros(0, np.int64) for part in (0, 1)]
    lists = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in flat]
    return pa.table([*lists, pa.array(lengths)], names=["input_ids", "loss_mask", "seq_len"])


def draft_vocabulary(counts: dict[int, int], draft: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return d2t int64 [draft] (token = index + d2t[index]) and t2d bool [target]: the most frequent tokens, the lowest ids of equal ones.

    Filled up with the lowest ids that are not among them; so does speculators 0.9, to the last entry. Raises ParamsError for a
    size out of range.
    """
    if not 1 <= draft <= target:
        raise ParamsError(
            got=f"a draft vocabulary of {draft}",
            expected=f"1..{target}, the model's vocabulary",
            likely="another model's size",
            next="--vocab 32000",
        )
    chosen = sorted(counts, key=lambda t: (-counts[t], t))[:draft]
    have = set(chosen)
    chosen += [t for t in range(draft + len(have)) if t not in have and t < target][: draft - len(chosen)]
    tokens = torch.tensor(sorted(chosen), dtype=torch.int64)
    t2d = torch.zeros(target, dtype=torch.bool)
    t2d[tokens] = True
    return tokens - torch.arange(draft), t2d
