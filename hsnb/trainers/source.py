"""What has to be known of a folder before anything is made of it: boundaries, norm, model; and how to train on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsnb.boundaries import FINAL_STATES, check_boundaries, model_family, text_config, to_boundaries
from hsnb.demo import model_at
from hsnb.dumps import UNKNOWN
from hsnb.errors import BoundaryError, ParamsError
from hsnb.params import num_layers, read_config
from hsnb.trainers import WRITTEN, Layout, TrainingFolder, open_folder
from hsnb.trainers.layout import Training
from hsnb.trainers.table import draft_vocabulary


def about_source(folder: TrainingFolder, model: str | Path | None, stated: tuple) -> dict[str, Any]:
    """Return boundaries, final, model, num_layers, hidden_size of a source. Raises BoundaryError for what it does not say."""
    claims = folder.claims
    model = model or claims.get("model")
    model = model_at(model) if model else None
    if not model or not model.is_dir():
        raise ParamsError(
            got=f"model {str(model)!r}" if model else "no model",
            expected="the folder of the checkpoint that the states are of",
            likely="the states were made on another machine, or the folder does not name it",
            next="--model DIR",
        )
    config = read_config(model)
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


def count_tokens(folder: TrainingFolder) -> dict[int, int]:
    """Return how often each token is under the mask."""
    counts: dict[int, int] = {}
    for row in range(len(folder)):
        ids, mask = folder.labels(row)
        for token in (ids if mask is None else ids[mask == 1]).tolist():
            counts[token] = counts.get(token, 0) + 1
    return counts


def written_layout(name: str) -> Layout:
    if name not in WRITTEN:
        raise ParamsError(got=f"layout is {name!r}", expected=f"one of {', '.join(WRITTEN)}", likely="a typo", next="--layout speculators")
    return WRITTEN[name]


def training(path: str | Path, *, model: str | Path | None = None, vocab: int = 0) -> tuple[Training, dict[str, Any], list[Path]]:
    """Return how to train on a folder, what is known of it, and the files of a draft vocabulary of `vocab` tokens, written now.

    Layer ids are in the trainer's own numbering. Raises BoundaryError for a folder whose boundaries or norm are not known, and
    ParamsError for one that no trainer reads.
    """
    path = Path(path).expanduser().resolve()
    folder = open_folder(path)
    layout = written_layout(folder.layout)
    about = about_source(folder, model, (None, None))
    if about["final"] != layout.final:
        raise ParamsError(
            got=f"{path} with the final {about['final']} the norm",
            expected=f"{layout.final}",
            likely=layout.why,
            next="hsnb export it into another folder",
        )
    files = layout.save_vocabulary(path, *draft_vocabulary(count_tokens(folder), vocab, about["vocab_size"])) if vocab else []
    return layout.training(path, about, vocab), about, files
