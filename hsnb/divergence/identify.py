"""Which boundary is each column of a folder of training files, before or after the norm? Recomputed with a reference, not believed."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path

from hsnb import boundaries as bd
from hsnb import reference as hf
from hsnb.divergence import noise, offsets
from hsnb.divergence.capture import through_hsnb, through_transformers
from hsnb.divergence.folders import folder_states, shared_samples
from hsnb.divergence.measure import distances, steps
from hsnb.divergence.offsets import Offset
from hsnb.divergence.states import States
from hsnb.dumps.dump import UNKNOWN
from hsnb.errors import BoundaryError, ModelError
from hsnb.params import num_layers, read_config
from hsnb.server import attach
from hsnb.trainers import TrainingFolder, open_folder

TOLD = ("right", "shifted", "found")  # verdicts that name a boundary


@dataclass(frozen=True)
class Identified:
    """What `identify` found. `columns`: the fit of each column in file order; `said`: sentences; `mixed`: samples that differ in it."""

    path: str
    layout: str
    model: str
    reference: str
    columns: tuple[Offset, ...]
    claims: dict
    said: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    tokens: int = 0
    trainer_final: str = UNKNOWN
    wrong: bool = False  # what was found is not what the folder says, or not what its trainer takes it for
    ids: dict[str, list[int]] = field(default_factory=dict)  # {convention: the ids that name these boundaries in it}

    @property
    def verdict(self) -> str:
        """Return identified, mixed, undecided or unknown."""
        verdicts = {c.verdict for c in self.columns}
        if self.mixed:
            return "mixed"
        return next((v for v in ("unknown", "undecided") if v in verdicts), "identified")

    @property
    def ok(self) -> bool:
        return self.verdict == "identified" and not self.wrong

    @property
    def boundaries(self) -> tuple[int | None, ...]:
        """Return the boundary of each aux column in file order; None where it cannot be told."""
        return tuple(c.fits_number if c.verdict in TOLD else None for c in self.columns if c.column != "final")

    @property
    def final(self) -> str:
        """Return what the last column is: pre, post, the name of another boundary, or unknown."""
        last = self.columns[-1]
        if last.column != "final" or last.verdict not in TOLD:
            return UNKNOWN
        top = f"B_{max(n for n in self._numbers if n is not None)}"
        return "post" if last.fits.startswith("norm(") else "pre" if last.fits == top else last.fits

    _numbers: tuple[int | None, ...] = field(default=(0,), repr=False)

    def frame(self):
        """Return a row a column."""
        return offsets.frame(self.columns)

    def text(self) -> str:
        rows = [f"  {c.column}: {_what(c)}" for c in self.columns]
        return "\n".join([f"{self.path} ({self.layout}), against {self.reference}: {self.verdict}", *rows, *self.said])

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{html.escape(s)}</p>" for s in self.said)
        return f"<h3>{html.escape(self.path)}: {self.verdict}</h3>{self.frame().to_html(index=False)}{said}"

    def as_dict(self) -> dict:
        """Return everything as plain values, for --json."""
        return {
            "ok": self.ok, "path": self.path, "layout": self.layout, "model": self.model, "reference": self.reference,
            "verdict": self.verdict, "boundaries": list(self.boundaries), "final": self.final, "claims": self.claims,
            "columns": [c.as_dict() for c in self.columns], "mixed": list(self.mixed), "ids": self.ids, "said": list(self.said),
            "tokens": self.tokens,
        }  # fmt: skip


def identify(path: Path, model: Path, *, server_url: str = "", spool: str = "") -> Identified:
    """Recompute a few samples of a folder and say which boundary each of its columns is.

    `server_url`: a running server of hsnb is the reference, for a model that transformers cannot load here; only its armed
    boundaries can then be found. Raises DumpError for a folder of no known layout, ModelError when there is no reference.

    It does not prove that every sample is like the four that were recomputed: `hsnb verify` checks each file of hsnb's own.
    """
    folder, config = open_folder(path), read_config(model)
    layers, width = num_layers(config), int(bd.text_config(config)["hidden_size"])
    family = bd.model_family(config)
    samples = shared_samples([path])
    states = folder_states(path, samples, 0, layers, family)
    if (found := states.tensors[0].shape[-1]) != width:
        raise ModelError(
            got=f"{path}: states of width {found}",
            expected=f"{width}, the model's",
            likely="states of another model",
            next="name the model that they were taken from with --model",
        )
    vocabulary, largest = int(bd.text_config(config).get("vocab_size", 0)), max(max(c.ids) for c in samples)
    if vocabulary and largest >= vocabulary:
        raise ModelError(
            got=f"{path}: token id {largest}",
            expected=f"ids below {vocabulary}, the model's vocabulary",
            likely="states of another model",
            next="name the model that they were taken from with --model",
        )
    reference, seen = _reference(model, [c.ids for c in samples], server_url, spool, states.dtype)
    cost = steps(reference)
    noise_of = noise.combined(reference, seen, noise.floor(states.dtype, reference.dtype))
    columns = offsets.find_offsets(distances(states, reference), states, reference, cost, noise_of)
    mixed = _mixed(states, reference, cost, noise_of, columns, [c.name for c in samples])
    result = Identified(
        str(path), folder.layout, str(model), reference.name, columns, _plain(folder.claims), mixed=mixed,
        tokens=sum(len(c.ids) - 1 for c in samples), trainer_final=folder.trainer_final, _numbers=(*reference.said, layers),
    )  # fmt: skip
    return _with_words(result, folder, layers, family)


def _reference(model: Path, prompts, server_url: str, spool: str, dtype: str) -> tuple[States, list[dict[int, float]]]:
    if server_url:
        states, own = through_hsnb(attach(server_url, spool=spool), prompts)
        return states, [own]
    if not any(model.glob("*.safetensors")):
        raise ModelError(
            got=f"{model}: no *.safetensors",
            expected="a checkpoint that transformers can load here",
            likely="weights in another format, or a download that is not whole",
            next="name another folder, or a running server with --server URL",
        )
    if not hf.fits(model):
        raise ModelError(
            got=f"{model} does not fit into this machine's memory in float32",
            expected="a model that transformers can load here, or a running server",
            likely="a large model",
            next="hsnb serve it with the boundaries in question, and name it with --server URL",
        )
    reference = through_transformers(model, prompts)
    return reference, [noise.by_number(noise.of_dtype(model, prompts, reference, dtype), reference)]


def _mixed(states: States, reference: States, cost, noise_of, pooled: tuple[Offset, ...], names: list[str]) -> tuple[str, ...]:
    """Return the samples whose columns plainly fit others than all samples together do."""
    found = []
    for n, name in enumerate(names):
        one, ref = (States(s.name, s.token_ids[n : n + 1], s.tensors[n : n + 1], s.columns, s.said) for s in (states, reference))
        own = offsets.find_offsets(distances(one, ref), one, ref, cost, noise_of)
        if any(a.fits != b.fits and {a.verdict, b.verdict} <= set(TOLD) for a, b in zip(own, pooled, strict=True)):
            found.append(name)
    return tuple(found)


def _what(column: Offset) -> str:
    if column.verdict == "unknown":
        return f"unknown: the best fit, {column.fits}, is {column.error:.2g} away, and its neighbour is {column.distance:.2g} from it"
    margin = f"{column.error:.2g} away; {column.runner_up} is {column.runner_up_error:.2g}, the noise {column.noise:.2g}"
    return f"{column.fits}{' or a neighbour (undecided)' if column.verdict == 'undecided' else ''}: {margin}"


def _plain(claims: dict) -> dict:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in claims.items()}


def _with_words(found: Identified, folder: TrainingFolder, layers: int, family: str) -> Identified:
    """Add what follows for the trainer: the ids to give it, and what it would take the columns for."""
    said, ids, wrong = [], {}, False
    aux = found.boundaries
    if found.mixed:
        wrong = True
        said.append(f"{', '.join(found.mixed)} hold other boundaries than the rest: do not train on this folder.")
    claims = folder.claims
    if "ids" in claims and all(c.said is None for c in found.columns if c.column != "final"):
        wrong = True
        said.append(f"The folder says the {claims['convention']} ids {list(claims['ids'])}, which a model of {layers} layers has not.")
    if any(c.verdict == "shifted" for c in found.columns):
        wrong = True
        if claims["boundaries"] != UNKNOWN:
            names = f"boundaries {list(claims['boundaries'])}"
        else:
            names = f"the {claims['convention']} ids {list(claims['ids'])}" if "ids" in claims else "nothing of boundaries"
        said.append(f"The folder says {names} and final {claims['final']}; measured it is otherwise.")
    if None not in aux and aux and not found.mixed:
        if len(set(aux)) < len(aux):
            wrong = True
            said.append(f"A boundary is there twice: {list(aux)}.")
        elif list(aux) != sorted(aux):
            wrong = True
            order = " ".join(map(str, aux))
            said.append(
                f"The columns are not ascending: {list(aux)}. Engines feed a drafter ascending ones: hsnb export --from-boundaries {order} puts them in order."
            )
        else:
            if layers in aux:
                said.append(f"B_{layers} is among the aux columns: no engine feeds it to a drafter as one.")
            for convention in folder.conventions:
                try:
                    ids[convention] = bd.from_boundaries(aux, convention, num_layers=layers, family=family)
                except BoundaryError as error:
                    said.append(f"{convention} has no ids for these: {error.likely}.")
            said += [f"In {c}'s numbering these are the layer ids {' '.join(map(str, i))}." for c, i in ids.items()]
    expects, final = found.trainer_final, found.final
    if UNKNOWN not in (expects, final) and final != expects:
        wrong = True
        takes = {"pre": f"B_{layers} and applies the norm", "post": f"norm(B_{layers}) and applies the head alone"}[expects]
        said.append(f"The trainer of {folder.layout} takes the last column for {takes}; it is {_final_words(final, layers)}.")
    claimed = folder.claims["final"]
    if UNKNOWN not in (claimed, final) and claimed != final and not wrong:
        wrong = True
        said.append(f"The folder says its final is {claimed} the norm; it is {_final_words(final, layers)}.")
    return Identified(**{**vars(found), "said": tuple(said), "ids": ids, "wrong": wrong})


def _final_words(final: str, layers: int) -> str:
    return {"pre": f"B_{layers}, before the norm", "post": f"norm(B_{layers}), after the norm"}.get(final, final)
