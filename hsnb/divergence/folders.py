"""Folders of training files as a party: their own samples are the prompts, cut to a prefix (the models are causal)."""

from __future__ import annotations

from pathlib import Path

import torch

from hsnb.divergence.states import States
from hsnb.dumps.dump import UNKNOWN
from hsnb.errors import DumpError
from hsnb.trainers import TrainingFolder, open_folder

LONGEST = 64  # tokens of a sample that are looked at
SHORTEST = 8
SAMPLES = 4
LOOKED_AT = 2000  # samples of a second folder that are searched for the first one's ids


def shared_prompts(folders: list[Path]) -> dict[str, list[int]]:
    """Return {sample's name: its first ids} of up to four samples that all `folders` (one or two) have.

    Raises DumpError when there is none: states of other tokens cannot be compared.
    """
    first, *others = [open_folder(f) for f in folders]
    chosen: dict[str, list[int]] = {}
    known = [{tuple(s.token_ids[:LONGEST].tolist()) for s in _some(other, LOOKED_AT)} for other in others]
    for sample in _some(first, LOOKED_AT if others else SAMPLES):
        ids = sample.token_ids[:LONGEST].tolist()
        if len(ids) >= SHORTEST and all(tuple(ids) in k for k in known):
            chosen[sample.name] = ids
        if len(chosen) == SAMPLES:
            break
    if not chosen:
        raise DumpError(
            got=" and ".join(map(str, folders)) + ": no sample to compare",
            expected=f"samples of {SHORTEST} tokens or more with their token ids" + (", the same in both" if others else ""),
            likely="folders of other data" if others else "files without token ids",
            next="compare folders that were made from the same samples",
        )
    return chosen


def _some(folder: TrainingFolder, most: int):
    """Yield up to `most` samples with ids, spread over the folder."""
    every = max(1, len(folder) // most)
    for i in range(0, len(folder), every):
        sample = folder.sample(i)
        if sample.token_ids is not None:
            yield sample


def folder_states(path: Path, prompts: dict[str, list[int]], num_layers: int) -> States:
    """Return the columns of the samples in `path` that begin with the prompts' ids, numbered by what the folder says of itself."""
    folder = open_folder(path)
    wanted = {tuple(ids): n for n, ids in enumerate(prompts.values())}
    found: dict[int, torch.Tensor] = {}
    names: tuple[str, ...] = ()
    for sample in _some(folder, LOOKED_AT):
        ids = tuple(sample.token_ids[:LONGEST].tolist())
        if ids in wanted and wanted[ids] not in found:
            found[wanted[ids]] = torch.stack([c[: len(ids)] for c in sample.columns], dim=1)
            names = sample.column_names
        if len(found) == len(wanted):
            break
    missing = [name for n, name in enumerate(prompts) if n not in found]
    if missing:
        raise DumpError(
            got=f"{path}: no sample with the ids of {', '.join(missing)}",
            expected="the samples that are compared",
            likely="a folder of other data",
            next="compare folders that were made from the same samples",
        )
    tensors = tuple(found[n] for n in range(len(wanted)))
    return States(
        name=f"{path.name} ({folder.layout})",
        token_ids=tuple(torch.tensor(ids) for ids in prompts.values()),
        tensors=tensors,
        columns=names,
        said=numbers(folder, names, num_layers),
        final="final" if "final" in names else "",
        dtype=str(tensors[0].dtype).removeprefix("torch."),
    )


def numbers(folder: TrainingFolder, names: tuple[str, ...], num_layers: int) -> tuple[int | None, ...]:
    """Return the boundary that the folder says each column is; None where it says nothing, and for a final after the norm."""
    claims = folder.claims
    known = claims["boundaries"]
    last = num_layers if claims["final"] == "pre" else None
    if known == UNKNOWN or len(known) != len(names) - 1:
        return tuple(last if name == "final" else None for name in names)
    return (*known, last)
