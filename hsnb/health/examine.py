"""Look at a folder of training files: masks and lengths of all samples, states of all or of some spread evenly over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hsnb.errors import DumpError, ParamsError
from hsnb.health.findings import Finding, of_files, of_masks, of_norms, of_rows
from hsnb.health.measure import PEAKS, Sums, measure
from hsnb.health.result import Health, Norms
from hsnb.health.text import Decode, decoder, text_of
from hsnb.table import INDEX, read_index
from hsnb.trainers import TrainingFolder, open_folder

TEXTS = 4  # samples that are shown as text


def examine(
    path: str | Path,
    *,
    samples: int = 256,
    decode: Decode | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Health:
    """Return the health of the folder at `path`, of any layout that hsnb reads.

    States are read of `samples` samples spread evenly (0: all); masks and lengths are of every sample where hsnb prepared the
    data (its index), else of those. `decode` turns token ids into text (default: the tokenizer.json of the model that the
    folder names). `progress(done, all)` after each sample. Raises DumpError for a folder of no known layout.

    It does not prove that the states are the right boundaries: the probe and `hsnb identify` do.
    """
    if samples < 0:
        raise ParamsError(got=f"samples {samples}", expected="0 (all) or more", likely="a typo", next="samples=0 reads all")
    folder = open_folder(path)
    picks = spread(len(folder), samples)
    note = ""
    if decode is None:
        decode, note = decoder(folder.claims.get("model"))
    sums: Sums | None = None
    columns: tuple[str, ...] = ()
    unreadable: dict[str, str] = {}
    texts, labels = [], []
    for n, k in enumerate(picks, 1):
        try:
            sample = folder.sample(k)
            if sums is not None and len(sample.columns) != sums.columns:
                raise ValueError(f"{len(sample.columns)} columns beside {sums.columns}")
        except (DumpError, ValueError) as error:
            unreadable[folder.name(k)] = error.got if isinstance(error, DumpError) else str(error)
            continue
        if sums is None:
            sums, columns = Sums(len(sample.columns)), column_names(folder, sample.column_names)
        sums.add(sample, measure(sample))
        if sample.token_ids is not None and sample.loss_mask is not None:
            labels.append((sample.name, sample.num_tokens, int((sample.loss_mask != 0).sum())))
            if len(texts) < TEXTS:
                texts.append(text_of(sample.name, sample.token_ids.tolist(), sample.loss_mask.tolist(), decode))
        if progress:
            progress(n, len(picks))
    sums = sums or Sums(0)
    names, lengths, trained = _masks(folder, labels)
    medians = tuple(sums.quantiles(c, slice(1, None), (0.5,))[0] for c in range(sums.columns))
    normed = folder.claims["final"] == "post" and sums.columns > 1
    findings: list[Finding] = [
        *of_files(unreadable),
        *of_rows(sums, columns),
        *of_norms(sums, columns, medians, normed),
        *of_masks(names, lengths, trained),
    ]
    findings.sort(key=lambda f: f.level != "FAIL")
    return Health(
        folder.path, folder.layout, len(folder), sums.looked, columns, tuple(findings), Norms.of(sums, columns), _massive(sums, columns, decode),
        lengths, trained, tuple(texts), note,
    )  # fmt: skip


def spread(count: int, wanted: int) -> list[int]:
    """Return `wanted` indices spread evenly over 0..count - 1, the first and the last among them; all of them for 0."""
    if not wanted or wanted >= count:
        return list(range(count))
    return sorted({round(k * (count - 1) / max(1, wanted - 1)) for k in range(wanted)})


def column_names(folder: TrainingFolder, places: tuple[str, ...]) -> tuple[str, ...]:
    """Return what each column is called: B_k where the folder says so, its place in the file where it does not."""
    boundaries, final = folder.claims["boundaries"], folder.claims["final"]
    aux = places[:-1]
    said = [f"B_{b}" for b in boundaries] if not isinstance(boundaries, str) and len(boundaries) == len(aux) else list(aux)
    return (*said, f"final ({final})")


def _masks(folder: TrainingFolder, labels: list[tuple[str, int, int]]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return (names, lengths, trained tokens) of every sample from hsnb's own index, else of those whose labels were read."""
    if (folder.path / INDEX).is_file():
        index = read_index(folder.path / INDEX)
        rows = np.nonzero(index["ok"])[0]
        return [f"row {row}" for row in rows], index["length"][rows], index["masked"][rows]
    return [n for n, _, _ in labels], np.array([s for _, s, _ in labels], np.int64), np.array([t for _, _, t in labels], np.int64)


def _massive(sums: Sums, columns: tuple[str, ...], decode: Decode) -> tuple[dict[str, Any], ...]:
    """Return the places of the largest single values, a row a state, dimension and token, the largest first."""
    largest = sorted(sums.peaks.items(), key=lambda item: item[1][0], reverse=True)[:PEAKS]
    return tuple(
        {
            "state": columns[c], "dimension": dimension, "token": decode([token]) if token >= 0 else "unknown", "largest value": value,
            "position": position, "sample": name, "samples with their largest here": sums.peak_counts[c, dimension, token],
            "rows of this token over ten times the median norm": sum(n for (col, tok, _), n in sums.massive.items() if (col, tok) == (c, token)),
        }
        for (c, dimension, token), (_, value, name, position) in largest
    )  # fmt: skip
