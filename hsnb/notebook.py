"""The parameters of each notebook: their names, types, defaults and ranges, checked before a kernel starts."""

from __future__ import annotations

import ast
import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hsnb.errors import ParamsError
from hsnb.paths import run_dir

PARAMETERS_TAG = "parameters"  # papermill's: the cell after which the given values are injected
TOO_LONG = Literal["error", "skip", "truncate"]
LAYOUT = Literal["speculators", "specforge"]  # those of hsnb.trainers
TRAINER = Literal["speculators", "specforge"]
DTYPE = Literal["float32", "bfloat16", "float16"]


class Parameters(BaseModel):
    """What every notebook takes. A field's description is what an error says it expects."""

    # strict: papermill's -p has already turned digits and True/False into numbers and bools; what is still text is not one.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    params: str = Field("params/demo.yaml", description="the name of a YAML file")
    run: str = Field("demo", description="a plain folder name below outputs/")
    server_url: str = Field("", pattern="^(https?://.+)?$", description="http://HOST:PORT, or empty for a server of its own")
    spool: str = Field("", description="a folder, or empty for /dev/shm/hsnb/{port}")


class ServerNotebook(Parameters):
    """00_server."""

    keep: bool = Field(False, description="True or False")


class ProbeNotebook(Parameters):
    """01_probe."""

    prompts: list[str | list[int]] = Field([], description="a list of texts (besides the two fixed ones)")
    repeat: int = Field(1, ge=1, description="a whole number from 1")


class DivergenceNotebook(Parameters):
    """02_divergence."""

    a: str = Field("sglang", min_length=1, description="an engine (sglang, vllm, transformers), a URL or a folder")
    b: str = Field("vllm", min_length=1, description="an engine (sglang, vllm, transformers), a URL or a folder")
    ids: list[int] = Field([], description="a list of whole numbers")
    dtype: DTYPE = Field("float32", description="float32, bfloat16 or float16")


class ExtractNotebook(Parameters):
    """03_extract."""

    shard: int = Field(0, ge=0, description="a whole number from 0")  # below num_shards: _check_shard
    num_shards: int = Field(16, ge=1, description="a whole number from 1")
    max_length: int = Field(512, ge=1, description="a whole number of tokens from 1")
    too_long: TOO_LONG = Field("error", description="error, skip or truncate")
    layout: LAYOUT = Field("speculators", description="speculators or specforge")
    in_flight_tokens: int = Field(0, ge=0, description="a whole number of tokens, 0 to have it chosen")
    limit: int = Field(0, ge=0, description="a whole number of samples, 0 for all")


class HandoffNotebook(Parameters):
    """04_handoff."""

    data: str = Field("", description="a folder of extracted shards, or empty for the run's own")
    trainer: TRAINER = Field("speculators", description="speculators or specforge")
    minutes: float = Field(3, gt=0, description="a number of minutes above 0")
    seeds: int = Field(1, ge=1, description="a whole number from 1")


TABLE: dict[str, type[Parameters]] = {
    "00_server": ServerNotebook,
    "01_probe": ProbeNotebook,
    "02_divergence": DivergenceNotebook,
    "03_extract": ExtractNotebook,
    "04_handoff": HandoffNotebook,
}


def stem(notebook: str | Path) -> str:
    """Return the table's name of `notebook` ("03_extract", "03_extract.ipynb" or a path). Raises ParamsError when it has none."""
    name = Path(notebook).name.removesuffix(".ipynb")
    if name in TABLE:
        return name
    near = difflib.get_close_matches(name, TABLE, n=1)
    raise ParamsError(
        got=f"unknown notebook {name!r}",
        expected=f"one of: {', '.join(TABLE)}",
        likely=f"a typo for {near[0]!r}" if near else "a notebook that is not hsnb's",
        next=f"name {near[0]}.ipynb" if near else "run a notebook of your own with papermill's engine nbclient",
    )


def declared(notebook: str | Path) -> dict[str, Any]:
    """Return the parameters of `notebook` and their defaults."""
    return {name: field.get_default() for name, field in TABLE[stem(notebook)].model_fields.items()}


def check(notebook: str | Path, given: Mapping[str, Any]) -> Parameters:
    """Check the `given` parameters of `notebook`, fill in the defaults and make outputs/{run}.

    Raises ParamsError for an unknown name, a wrong type, a value out of range, a run that is no plain folder name, and a
    params file that is missing or has unknown names in it. Nothing is written before all of that has passed.
    """
    from hsnb.params import Deployment

    name = stem(notebook)
    model = TABLE[name]
    for key in given:
        if key not in model.model_fields:
            raise _unknown(name, key, given)
    try:
        parameters = model.model_validate({key: _listed(model, key, value) for key, value in given.items()})
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise _wrong(model, key, given) from None
    if isinstance(parameters, ExtractNotebook):
        _check_shard(parameters)
    Deployment.load(parameters.params)
    run_dir(parameters.run)
    return parameters


def _listed(model: type[Parameters], key: str, value: Any) -> Any:
    """Read a list that a shell's -p gave as text: '["a text", [1, 2, 3]]'. Anything else stays what it is."""
    if isinstance(value, str) and value.lstrip().startswith("[") and isinstance(model.model_fields[key].get_default(), list):
        try:
            return ast.literal_eval(value)
        except (SyntaxError, ValueError):
            return value
    return value


def validate(notebook: str | Path, scope: Mapping[str, Any]) -> Parameters:
    """Check the parameters found in `scope` (a notebook's globals()): `p = notebook.validate("03_extract", globals())`.

    Names of `scope` that are no parameters are left alone, so this cannot see an unknown name that papermill injected; the
    papermill engine does (`check`). Raises ParamsError.
    """
    import pandas as pd

    logging.getLogger("stamina").setLevel(logging.ERROR)  # "retry_scheduled", in red; what was retried in vain is told by its error
    pd.set_option("display.max_colwidth", None, "display.precision", 4)  # tables are read whole, and four digits are enough
    return check(notebook, {key: scope[key] for key in declared(notebook) if key in scope})


def output_name(notebook: str | Path, given: Mapping[str, Any]) -> str:
    """Return the executed notebook's file name: 03_extract-shard-0004.ipynb, and {stem}.ipynb for the others."""
    name = stem(notebook)
    if "shard" not in TABLE[name].model_fields:
        return f"{name}.ipynb"
    shard = given.get("shard", declared(name)["shard"])
    return f"{name}-shard-{shard:04d}.ipynb"


def parameters_of_cell(nb: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return name -> (annotation, default) of the cell tagged `parameters`.

    Raises ParamsError when there is no such cell, or when it holds anything but `name: type = literal` and comments.
    """
    cells = [cell for cell in nb["cells"] if PARAMETERS_TAG in cell["metadata"].get("tags", [])]
    if len(cells) != 1:
        raise _bad_cell(f"{len(cells)} cells tagged {PARAMETERS_TAG!r}", "exactly one", "the tag was lost, or the cell copied")
    found: dict[str, tuple[str, Any]] = {}
    try:
        for line in ast.parse(cells[0]["source"]).body:
            if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None):
                raise ValueError(ast.unparse(line))
            found[line.target.id] = (ast.unparse(line.annotation), ast.literal_eval(line.value))
    except (SyntaxError, ValueError) as error:
        raise _bad_cell(f"the parameters cell has {error}", "lines of `name: type = literal`", "code for a later cell") from error
    return found


def cell_values(nb: Mapping[str, Any], notebook: str | Path) -> dict[str, Any]:
    """Return the parameters cell's own values of the declared names: a user may have edited a default in the notebook."""
    known = declared(notebook)
    return {name: value for name, (_, value) in parameters_of_cell(nb).items() if name in known}


def check_cell(nb: Mapping[str, Any], notebook: str | Path) -> None:
    """Raise ParamsError unless the parameters cell has exactly the table's names, types and defaults."""
    fields = TABLE[stem(notebook)].model_fields
    table = {name: (_type_name(field.annotation), field.get_default()) for name, field in fields.items()}
    cell = parameters_of_cell(nb)
    wrong = [f"{name}: {kind} = {value!r}" for name, (kind, value) in cell.items() if (kind, value) != table.get(name)]
    missing = [f"no {name}" for name in table if name not in cell]
    if wrong or missing:
        names = [line.split(":")[0] for line in wrong if line.split(":")[0] in table] + [line.removeprefix("no ") for line in missing]
        right = [f"{name}: {table[name][0]} = {table[name][1]!r}" for name in names]
        raise _bad_cell("; ".join(wrong + missing), "; ".join(right) or f"only {', '.join(table)}", "one of the two was edited alone")


def _type_name(annotation: Any) -> str:
    """Return the annotation as a notebook writes it: list for list[int], str for a Literal of texts."""
    if get_origin(annotation) is Literal:
        return "str"
    return (get_origin(annotation) or annotation).__name__


def _check_shard(p: ExtractNotebook) -> None:
    if p.shard >= p.num_shards:
        raise ParamsError(
            got=f"shard is {p.shard}",
            expected=f"0..{p.num_shards - 1} ({p.num_shards} shards)",
            likely="shards are counted from 0" if p.shard == p.num_shards else "a typo, or another num_shards was meant",
            next=f"-p shard {p.num_shards - 1}, or -p num_shards {p.shard + 1} or more",
        )


def _unknown(name: str, key: str, given: Mapping[str, Any]) -> ParamsError:
    from hsnb.params import Deployment

    names = list(TABLE[name].model_fields)
    near = difflib.get_close_matches(str(key), names, n=1)
    others = [other for other, model in TABLE.items() if key in model.model_fields]
    if near:
        likely, next = f"a typo for {near[0]!r}", f"-p {near[0]} {_word(given[key])}"
    elif set(given) >= {"name", "model"} and key in Deployment.model_fields:
        likely, next = "a deployment was given with -f, which takes the notebook's own parameters", "-p params FILE"
    elif others:
        likely, next = f"a parameter of {' and '.join(others)}", f"leave {key} out, or run {others[0]}.ipynb"
    else:
        likely, next = "a name from another version", f"leave {key} out, or see the parameters cell of {name}.ipynb"
    return ParamsError(got=f"unknown parameter {key!r}", expected=f"one of: {', '.join(names)}", likely=likely, next=next)


def _wrong(model: type[Parameters], key: str, given: Mapping[str, Any]) -> ParamsError:
    """Say what is wrong with one value, and how the same thing is written for papermill."""
    field, value = model.model_fields[key], given[key]
    expected = field.description or ""
    if key == "shard" and type(shards := given.get("num_shards", 16)) is int and shards > 0:
        expected = f"a whole number, 0..{shards - 1} ({shards} shards)"
    kind, example = _type_name(field.annotation), field.get_default()
    likely, next = "a value out of range", f"-p {key} {_word(example)}"
    if kind == "str" and not isinstance(value, str):
        likely, next = "-p turns digits, True, False and None into values", f"-r {key} {_word(value)} (taken as it is written)"
    elif kind == "list":
        likely = "-p gives one word, not a list" if isinstance(value, str | int) else "an item of the wrong type"
        item = [value] if isinstance(value, str if key == "prompts" else int) else [1, 2] if key == "ids" else ["some text"]
        next = f"-y '{key}: {json.dumps(item)}'"
    elif kind == "bool":
        likely, next = "-p knows True and False, with a capital", f"-p {key} True"
    elif kind == "str":
        likely = "a typo"
        if near := difflib.get_close_matches(value, getattr(field.annotation, "__args__", ()), n=1):
            likely, next = f"a typo for {near[0]!r}", f"-p {key} {near[0]}"
        elif key == "server_url":
            likely, next = "http:// was left out", f"-p server_url http://{value.split('//')[-1]}"
    elif isinstance(value, str) and value.isdecimal():
        likely, next = "quotes or -r, which keep digits as text", f"-p {key} {value}"
    elif isinstance(value, bool | str | list) or value is None:
        likely = f"a {'word' if isinstance(value, str) else type(value).__name__} where a number belongs"
    elif isinstance(value, float) and kind == "int":
        likely = "a fraction where a whole number belongs"
    return ParamsError(got=f"{key} is {value!r}", expected=expected, likely=likely, next=next)


def _word(value: Any) -> str:
    """Return `value` as one word of a shell line."""
    text = str(value)
    return text if text and not set(text) & set(" \"'$`\\|&;<>()*?[]{}\n") else "'" + text.replace("'", "'\\''") + "'"


def _bad_cell(got: str, expected: str, likely: str) -> ParamsError:
    return ParamsError(got=got, expected=expected, likely=likely, next="make the cell and hsnb/notebook.py's table agree")
