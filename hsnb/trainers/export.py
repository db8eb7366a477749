"""Export a folder of training files into another trainer's layout: row by row, verified, and gone on with where it was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hsnb.boundaries import FINAL_STATES, check_boundaries, model_family, text_config, to_boundaries
from hsnb.demo import exclusive
from hsnb.dumps import UNKNOWN
from hsnb.errors import BoundaryError, DataError, DumpError, ParamsError
from hsnb.params import num_layers, read_config
from hsnb.paths import write_json
from hsnb.progress import Progress
from hsnb.trainers import WRITTEN, Layout, TrainingFolder, TrainingSample, open_folder
from hsnb.trainers.export_log import ExportLog
from hsnb.trainers.folder import ABOUT
from hsnb.trainers.layout import Row
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
    writing = _layout(layout)
    folder = open_folder(source)
    if target == source or source in target.parents or target in source.parents:
        raise ParamsError(
            got=f"{source} into {target}", expected="a folder apart", likely="the same path twice", next="name a folder beside it"
        )
    about = _about(folder, model, stated)
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
            sample = _sample(folder, row, len(have), writing)
            states = torch.stack([sample.columns[k] for k in [*picks, -1]], dim=1)
            made = Row(row, sample.token_ids, sample.loss_mask, states, tuple(about["boundaries"]), before, about["model"], meta)
            log.add(writer.write(made), stamp)
            progress.advance(note=sample.name)


def _finish(folder, target: Path, writing: Layout, log: ExportLog, about: dict, vocab: int, before: int, damaged: int, verify: bool):
    done = log.written()
    about |= {"samples": len(done), "tokens": sum(one.tokens for one in done)}
    writing.finish(target, (folder.labels(row) for row in range(len(folder))), about, done)
    if vocab:
        counts = _count(folder)
        writing.save_vocabulary(target, *draft_vocabulary(counts, vocab, about["vocab_size"]))
        about["draft_vocab_size"] = vocab
    write_json(target / ABOUT, {"hsnb_format": 1, **about})
    training = writing.training(target, about, vocab)
    size = sum(one.bytes for one in done)
    return Exported(
        str(target), writing.name, len(done), about["tokens"], size, tuple(about["boundaries"]), about["final"], before, damaged, verify,
        training.command, training.notes,
    )  # fmt: skip


def _about(folder: TrainingFolder, model: str | Path | None, stated: tuple) -> dict[str, Any]:
    """Return boundaries, final, model, num_layers, hidden_size of a source. Raises BoundaryError for what it does not say."""
    claims = folder.claims
    model = model or claims.get("model")
    if not model or not Path(model).is_dir():
        raise ParamsError(
            got=f"model {str(model)!r}" if model else "no model",
            expected="the folder of the checkpoint that the states are of",
            likely="the states were made on another machine, or the folder does not name it",
            next="--model DIR",
        )
    config = read_config(Path(model))
    layers, family = num_layers(config), model_family(config)
    said, final = claims["boundaries"], claims["final"]
    if said == UNKNOWN and "ids" in claims:
        said = to_boundaries(claims["ids"], claims["convention"], num_layers=layers, family=family)
    for what, own, given in (("boundaries", said, tuple(stated[0]) if stated[0] else None), ("final", final, stated[1])):
        if own != UNKNOWN and given is not None and given != own:
            raise BoundaryError(
                got=f"{what} {given} stated for {folder.path}",
                expected=f"{own}, as it says itself",
                likely="the statement is about another folder",
                next="leave it out",
            )
    said = tuple(stated[0]) if said == UNKNOWN and stated[0] else said
    final = stated[1] or final
    if UNKNOWN in (said, final) or final not in FINAL_STATES:
        raise BoundaryError(
            got=f"{folder.path} ({folder.layout}): boundaries {said if said == UNKNOWN else list(said)}, final {final}",
            expected="both known: which boundary each column is, and whether the final is before or after the norm",
            likely="a tool that does not write them down; the same shapes hold other layers, and a wrong norm trains without a sign",
            next=f"hsnb identify {folder.path} --model {model}, and state what it finds: --from-boundaries 2 15 27 --from-final pre",
        )
    check_boundaries(said, layers)
    text = text_config(config)
    return {
        "boundaries": tuple(said), "final": final, "model": str(model), "num_layers": layers,
        "hidden_size": int(text["hidden_size"]), "vocab_size": int(text["vocab_size"]),
        "stated": [what for what, given in zip(("boundaries", "final"), stated, strict=True) if given],
    }  # fmt: skip


def _sample(folder: TrainingFolder, row: int, aux: int, writing: Layout) -> TrainingSample:
    """Read one sample; it has ids, the columns that the folder is said to have, and a mask where the layout needs it."""
    sample = folder.sample(row)
    if len(sample.columns) != aux + 1:
        raise DumpError(
            got=f"{folder.path / sample.name}: {len(sample.columns)} columns",
            expected=f"{aux + 1}: {aux} boundaries and the final",
            likely="files of two extractions in one folder",
            next="move the others away",
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


def _count(folder: TrainingFolder) -> dict[int, int]:
    """Return how often each token is under the mask."""
    counts: dict[int, int] = {}
    for row in range(len(folder)):
        ids, mask = folder.labels(row)
        for token in (ids if mask is None else ids[mask == 1]).tolist():
            counts[token] = counts.get(token, 0) + 1
    return counts


def _stamp(folder: TrainingFolder, row: int) -> str:
    """Return a print of a source file that changes when it is written again: its length and time."""
    info = folder.file(row).stat()
    return f"{info.st_size}:{info.st_mtime_ns}"


def _layout(name: str) -> Layout:
    if name not in WRITTEN:
        raise ParamsError(got=f"layout is {name!r}", expected=f"one of {', '.join(WRITTEN)}", likely="a typo", next="--layout speculators")
    return WRITTEN[name]
