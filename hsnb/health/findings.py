"""What is wrong with a data set, or worth a look, said in a sentence each; the bars are here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsnb.health.measure import Sums

INNER = 5.0  # a column between two others: a residual stream grows, it does not jump up and back
END = 10.0  # the first and the last column have one neighbour, and real models grow by much there
SAMPLE = 10.0  # a sample's median norm against the data set's
SHOWN = 5  # places that are named


@dataclass(frozen=True)
class Finding:
    """One thing found. `level`: "FAIL" for what no forward pass or trainer wants, "look" for what may be meant."""

    kind: str
    level: str
    count: int
    what: str
    where: tuple[str, ...] = ()


def of_rows(sums: Sums, columns: Sequence[str]) -> list[Finding]:
    """Return NaN, zero, constant and repeated rows, and samples with the same states."""
    said = {"nan": "with a NaN or an infinity", "zero": "of nothing but zeros", "constant": "with the same number in every place"}
    found = []
    for kind, places in sums.bad.items():
        if n := sums.bad_rows[kind]:
            where = tuple(f"{name}, row {row} of {columns[c]}" for name, row, c in places[:SHOWN])
            found.append(Finding(f"{kind} row", "FAIL", n, f"{n:,} {_rows(n)} {said[kind]}", where))
    if n := len(sums.repeated):
        where = tuple(f"{name}, row {row} is row {first}" for name, row, first in sums.repeated[:SHOWN])
        found.append(
            Finding("repeated row", "FAIL", n, f"{n:,} {_rows(n)} equal to an earlier one of the same sample in every column", where)
        )
    for same, level, words in (
        (False, "FAIL", "under other token ids: one of each two is another sample's"),
        (True, "look", "and token ids"),
    ):
        pairs = [pair for pair in sums.twins if pair[2] == same]
        if pairs:
            where = tuple(f"{b} is {a}" for a, b, _ in pairs[:SHOWN])
            found.append(Finding("same states", level, len(pairs), f"{len(pairs):,} samples with the states of another one {words}", where))
    return found


def of_norms(sums: Sums, columns: Sequence[str], medians: Sequence[float], last_is_normed: bool) -> list[Finding]:
    """Return columns whose median norm is far from both neighbours', and samples far from the data set's."""
    comparable = list(range(len(columns) - last_is_normed))  # a norm changes the scale: that column says nothing of the others
    beside = {k: [j for j in (k - 1, k + 1) if j in comparable] for k in comparable}
    far = [k for k in comparable if len(beside[k]) == 2 and _apart(medians, k, beside[k], INNER)]
    # An end's only neighbour may be the odd one of the two.
    far += [k for k in comparable if len(beside[k]) == 1 and beside[k][0] not in far and _apart(medians, k, beside[k], END)]
    found = []
    for k in far:
        sizes = ", ".join(f"{columns[j]} {medians[j]:.4g}" for j in beside[k])
        what = f"{columns[k]} has a median norm of {medians[k]:.4g}, its neighbours {sizes}"
        found.append(Finding("norm of a layer", "FAIL" if len(beside[k]) == 2 else "look", 1, what))
    each = np.array(sums.medians)  # [n, C]
    if len(each) >= 4:
        with np.errstate(all="ignore"):
            ratio = each / np.nanmedian(each, axis=0)
        places = [(int(n), int(c)) for n, c in np.argwhere((ratio >= SAMPLE) | (ratio <= 1 / SAMPLE))]
        if places:
            where = tuple(f"{sums.names[n]}: {columns[c]} at {ratio[n, c]:.3g} times the data set's median" for n, c in places[:SHOWN])
            n = len({n for n, _ in places})
            found.append(
                Finding("norm of a sample", "FAIL", n, f"{n:,} samples with a norm ten times the data set's, or a tenth of it", where)
            )
    return found


def _apart(medians: Sequence[float], k: int, beside: list[int], bar: float) -> bool:
    """Say whether column k is at least `bar` times all its neighbours, or at most 1 / `bar` of them."""
    ratios = [medians[k] / medians[j] for j in beside]
    return min(ratios) >= bar or max(ratios) <= 1 / bar


def of_masks(names: Sequence[str], lengths: np.ndarray, trained: np.ndarray) -> list[Finding]:
    """Return samples whose mask is all ones, or all zeros."""
    found = []
    for kind, at, words in (
        ("mask of ones", (trained == lengths) & (lengths > 0), "whose mask is all ones: the prompt is trained too"),
        ("mask of zeros", trained == 0, "whose mask is all zeros: they train nothing"),
    ):
        if n := int(at.sum()):
            found.append(Finding(kind, "look", n, f"{n:,} samples {words}", tuple(names[k] for k in np.nonzero(at)[0][:SHOWN])))
    return found


def of_files(unreadable: dict[str, str]) -> list[Finding]:
    """Return samples that cannot be read as what their folder says."""
    where = tuple(f"{name}: {why}" for name, why in list(unreadable.items())[:SHOWN])
    n = len(unreadable)
    return [Finding("unreadable", "FAIL", n, f"{n:,} samples that cannot be read", where)] if n else []


def _rows(n: int) -> str:
    return "row" if n == 1 else "rows"
