"""Folders of training files as a party: their own samples are the prompts, cut to a prefix (the models are causal)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hsnb.boundaries import to_boundaries
from hsnb.divergence.states import States
from hsnb.dumps.dump import UNKNOWN
from hsnb.errors import BoundaryError, DumpError
from hsnb.trainers import TrainingFolder, open_folder

LONGEST = (64, 256, 1024)  # tokens of a sample that are looked at: more where the samples begin alike (a system prompt)
SHORTEST = 8
SAMPLES = 4
LOOKED_AT = 5000  # samples of a second folder that are searched for the first one's ids, after the same name and the same place


@dataclass(frozen=True)
class Chosen:
    """A sample that all folders have: its name and first ids, and where it is in each folder."""

    name: str
    ids: tuple[int, ...]
    at: tuple[int, ...]


def shared_samples(folders: list[Path]) -> list[Chosen]:
    """Return up to four samples that all `folders` (one or two) have, spread over the first one, no two with the same ids.

    Raises DumpError when there is none: states of other tokens cannot be compared.
    """
    first, *others = [open_folder(f) for f in folders]
    chosen: list[Chosen] = []
    for longest in LONGEST:
        chosen = _choose(first, others, longest)
        if len(chosen) > 1 or len(first) == 1:
            break
    if not chosen:
        raise DumpError(
            got=" and ".join(map(str, folders)) + ": no sample to compare",
            expected=f"samples of {SHORTEST} tokens or more with their token ids" + (", the same in both" if others else ""),
            likely="folders of other data" if others else "files without token ids",
            next="compare folders that were made from the same samples",
        )
    return chosen


def _choose(first: TrainingFolder, others: list[TrainingFolder], longest: int) -> list[Chosen]:
    chosen: dict[tuple[int, ...], Chosen] = {}
    tries = SAMPLES * (8 if others else 2)
    for i in dict.fromkeys(round(n * (len(first) - 1) / max(1, tries - 1)) for n in range(tries)):
        ids = _ids(first, i, longest)
        if ids is None or len(ids) < SHORTEST or ids in chosen:
            continue
        places = [_find(other, first.name(i), i, ids, longest) for other in others]
        if None not in places:
            chosen[ids] = Chosen(first.name(i), ids, (i, *places))
        if len(chosen) == SAMPLES:
            break
    return list(chosen.values())


def _ids(folder: TrainingFolder, index: int, longest: int) -> tuple[int, ...] | None:
    found = folder.sample(index).token_ids
    return None if found is None else tuple(found[:longest].tolist())


def _find(folder: TrainingFolder, name: str, index: int, ids: tuple[int, ...], longest: int) -> int | None:
    """Return where `folder` has the sample that begins with `ids`: at the same place, under the same name, else by a search."""
    if index < len(folder) and _ids(folder, index, longest) == ids:
        return index
    for i in range(min(len(folder), LOOKED_AT)):
        if folder.name(i) == name and _ids(folder, i, longest) == ids:
            return i
    return next((i for i in range(min(len(folder), LOOKED_AT)) if _ids(folder, i, longest) == ids), None)


def folder_states(path: Path, samples: Sequence[Chosen], which: int, num_layers: int, family: str) -> States:
    """Return the columns of the chosen samples in `path` (the `which`-th folder), numbered by what the folder says of itself.

    Raises DumpError for samples with other columns than the first one's, and for rows that are not finite.
    """
    folder, tensors, names = open_folder(path), [], ()
    for chosen in samples:
        sample = folder.sample(chosen.at[which])
        names = names or sample.column_names
        if sample.column_names != names:
            raise _unlike(
                path, f"{sample.name} has the columns {', '.join(sample.column_names)}, others {', '.join(names)}", "one kind of file"
            )
        states = torch.stack([c[: len(chosen.ids)] for c in sample.columns], dim=1)
        if bad := int((~torch.isfinite(states.float())).any(-1).sum()):
            raise _unlike(path, f"{sample.name}: {bad} of {states.shape[0] * states.shape[1]} rows are not finite", "finite states")
        tensors.append(states)
    return States(
        name=f"{path.name} ({folder.layout})",
        token_ids=tuple(torch.tensor(c.ids) for c in samples),
        tensors=tuple(tensors),
        columns=names,
        said=numbers(folder, names, num_layers, family),
        final="final" if "final" in names else "",
        dtype=str(tensors[0].dtype).removeprefix("torch."),
    )


def numbers(folder: TrainingFolder, names: tuple[str, ...], num_layers: int, family: str) -> tuple[int | None, ...]:
    """Return the boundary that the folder says each column is, converted from its tool's ids where it gives those.

    None where it says nothing, and for a final that is not said to be before the norm.
    """
    claims = folder.claims
    known = claims["boundaries"]
    if known == UNKNOWN and "ids" in claims:
        try:
            known = to_boundaries(claims["ids"], claims["convention"], num_layers=num_layers, family=family)
        except BoundaryError:  # ids that this model has not say nothing of it; identify tells
            known = UNKNOWN
    last = num_layers if claims["final"] == "pre" else None
    aux = len(names) - ("final" in names)
    if known == UNKNOWN or len(known) not in (aux, aux + 1):
        return tuple(last if name == "final" else None for name in names)
    return (*known[:aux], last) if "final" in names else tuple(known)


def _unlike(path: Path, got: str, expected: str) -> DumpError:
    return DumpError(
        got=f"{path}: {got}",
        expected=expected,
        likely="a damaged file, or two tools' files in one folder",
        next="take it out of the folder",
    )
