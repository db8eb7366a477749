"""Export a folder of training files into another trainer's layout: row by row, verified, and gone on with where it was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hsnb.boundaries import check_boundaries
from hsnb.demo import exclusive
from hsnb.errors import BoundaryError, DataError, DumpError, ParamsError
from hsnb.paths import write_json
from hsnb.progress import Progress
from hsnb.trainers import Layout, TrainingFolder, TrainingSample, open_folder
from hsnb.trainers.export_log import ExportLog
from hsnb.trainers.folder import ABOUT
from hsnb.trainers.layout import Row
from hsnb.trainers.source import about_source, count_tokens, written_layout
from hsnb.trainers.table import draft_vocabulary


@dataclass(frozen=True)
class Exported:
    """What lies in `path` now. `command` trains on it; `damaged` rows were done before, found gone or changed, and written again."""

    path: str
    layout: str
    samples: int
    tokens: int
    bytes: int
    boundaries: tuple[int, ...]
    final: str
    done_before: int
    damaged: int
    verified: bool  # every checksum was read again
    command: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    source: str | Path,
    target: str | Path,
    layout: str,
    *,
    boundaries: Sequence[int] | None = None,
    model: str | Path | None = None,
    vocab: int = 0,
    stated: tuple[Sequence[int] | None, str | None] = (None, None),
    verify: bool = False,
) -> Exported:
    """Write every sample of `source` into `target` in `layout`; a second call does what is left to do.

    `boundaries`: some of the captured ones (default: all). `model`: the checkpoint's folder, where `source` does not name it.
    `vocab`: also a draft vocabulary of so many tokens. `stated`: boundaries and final of columns that the folder itself does not
    say. `verify`: read what was done before and compare checksums. A file is read back before it gets its name, always.
    Raises BoundaryError for boundaries or a norm that are not known, ExtractError for a target of another export, DumpError for a
    source that cannot be read, and ParamsError.
    """
    source, target = Path(source).expanduser().resolve(), Path(target).expanduser().resolve()
    writing = written_layout(layout)
    folder = open_folder(source)
    if target == source or source in target.parents or target in source.parents:
        raise ParamsError(
            got=f"{source} into {target}", expected="a folder apart", likely="the same path twice", next="name a folder beside it"
        )
    about = about_source(folder, model, stated)
    have, before = about["boundaries"], about["final"]
    wanted = check_boundaries(have if boundaries is None else boundaries, about["num_layers"])
    if missing := [b for b in wanted if b not in have]:
        raise BoundaryError(
            got=f"boundaries {missing}",
            expected=f"some of those captured: {list(have)}",
            likely="ids in another tool's numbering",
            next="see hsnb.boundaries.to_boundaries",
        )
    writing.check_settings(wanted, before)
    about |= {"boundaries": list(wanted), "final": writing.final, "layout": layout, "exported_from": str(source)}
    writing.layer_ids(about)  # refused now, not after the last row
    settings = {"layout": layout, "source": str(source), "samples": len(folder), "model": about["model"]}
    settings |= {"boundaries": list(wanted), "captured": list(have), "captured final": before}
    with exclusive(target), closing(ExportLog(target, settings)) as log:
        damaged = log.damaged(read=verify)
        log.forget(damaged)
        changed = [row for row, (_, stamp) in log.done.items() if stamp != _stamp(folder, row)]
        log.forget(changed, in_order=writing.appends)
        done_before = len(log.done)
        _rows(folder, target, writing, log, about, (have, before))
        return _finish(folder, target, writing, log, about, vocab, done_before, len(damaged), verify)


def _rows(folder: TrainingFolder, target: Path, writing: Layout, log: ExportLog, about: dict, captured: tuple) -> None:
    have, before = captured
    picks = [have.index(b) for b in about["boundaries"]]
    owed = [row for row in range(len(folder)) if row not in log.done]
    writing.begin(target, owed)
    meta = {k: str(about[k]) for k in ("model",)}
    with closing(writing.writer(target, log.written())) as writer, Progress(len(owed), unit="samples", desc="export") as progress:
        for row in owed:
            stamp = _stamp(folder, row)
            sample = _sample(folder, row, len(have), about["hidden_size"], writing)
            states = torch.stack([sample.columns[k] for k in [*picks, -1]], dim=1)
            made = Row(row, sample.token_ids, sample.loss_mask, states, tuple(about["boundaries"]), before, about["model"], meta)
            log.add(writer.write(made), stamp)
            progress.advance(note=sample.name)


def _finish(folder, target: Path, writing: Layout, log: ExportLog, about: dict, vocab: int, before: int, damaged: int, verify: bool):
    done = log.written()
    about |= {"samples": len(done), "tokens": sum(one.tokens for one in done)}
    writing.finish(target, (folder.labels(row) for row in range(len(folder))), about, done)
    if vocab:
        counts = count_tokens(folder)
        writing.save_vocabulary(target, *draft_vocabulary(counts, vocab, about["vocab_size"]))
        about["draft_vocab_size"] = vocab
    write_json(target / ABOUT, {"hsnb_format": 1, **about})
    training = writing.training(target, about, vocab)
    size = sum(one.bytes for one in done)
    return Exported(
        str(target), writing.name, len(done), about["tokens"], size, tuple(about["boundaries"]), about["final"], before, damaged, verify,
        training.command, training.notes,
    )  # fmt: skip


def _sample(folder: TrainingFolder, row: int, aux: int, width: int, writing: Layout) -> TrainingSample:
    """Read one sample; it has ids, the columns that the folder is said to have, and a mask where the layout needs it."""
    sample = folder.sample(row)
    if (len(sample.columns), sample.hidden_size) != (aux + 1, width):
        raise DumpError(
            got=f"{folder.path / sample.name}: {len(sample.columns)} columns of width {sample.hidden_size}",
            expected=f"{aux + 1} ({aux} boundaries and the final) of width {width}, the model's",
            likely="another model, or files of two extractions in one folder",
            next="name the model with --model, or move the other files away",
        )
    for name, column in zip([*map(str, range(aux)), "final"], sample.columns, strict=True):
        if bad := int((~torch.isfinite(column).all(-1)).sum()):
            raise DumpError(
                got=f"{folder.path / sample.name}: {bad} of {len(column)} rows of column {name} are NaN or infinite",
                expected="finite states",
                likely="a float16 file whose bfloat16 values did not fit, or a broken forward pass of the tool that wrote it",
                next="make these states again, or leave the sample out",
            )
    lacking = "token ids" if sample.token_ids is None else "loss mask" if sample.loss_mask is None and writing.mask != "optional" else ""
    if lacking:
        raise DataError(
            got=f"{folder.path / sample.name}: no {lacking}",
            expected=f"ids and a mask: the {writing.name} layout has both",
            likely="dumps of a server, which knows no mask",
            next="extract with notebook 03, which takes the mask from the data",
        )
    return sample


def _stamp(folder: TrainingFolder, row: int) -> str:
    """Return a print of a source file that changes when it is written again: its length and time."""
    info = folder.file(row).stat()
    return f"{info.st_size}:{info.st_mtime_ns}"
