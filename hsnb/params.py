"""What a deployment is: the pydantic models behind params/*.yaml. Unknown names are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from hsnb import boundaries as bd
from hsnb.errors import HsnbError, ModelError, ParamsError
from hsnb.paths import project_root, resolve
from hsnb.show import pairs_html

Flag = str | int | float | bool | list[str | int]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ShapeParams(_Strict):
    """The sizes of a model whose folder is not on this machine: enough to plan with. Checked against config.json where there is one."""

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int | None = Field(None, ge=1)
    context_length: int | None = Field(None, ge=2, description="max_position_embeddings of config.json")


class ServerParams(_Strict):
    """How SGLang is started."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535, description="0: a free one")
    tp_size: int = Field(1, ge=1)
    nnodes: int = Field(1, ge=1, description="machines that one server's tp_size is spread over; more than 1: hsnb run --ray only")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    context_length: int | None = Field(None, ge=2)
    chunked_prefill_size: int | None = Field(None, ge=1)
    max_total_tokens: int | None = Field(None, ge=1)
    ready_timeout_s: float = Field(300, gt=0)
    flags: dict[str, Flag] = Field(default_factory=dict, description="any other flag of sglang.launch_server; true: a bare flag")
    env: dict[str, str] = Field(default_factory=dict, description="NCCL, CUDA and SGLANG variables of the server")
    spool: str = Field("", description="empty: /dev/shm/hsnb/{port}")


class CaptureParams(_Strict):
    """What is taken out of the forward pass."""

    boundaries: list[int] = Field(min_length=1)
    final: Literal["pre", "post"] = "pre"
    format: Literal["safetensors", "pt"] = "safetensors"


class DataParams(_Strict):
    """What is run through the model: `demo` (the standard library's documentation), a path, or several that are merged in order."""

    source: str | list[str] = "demo"
    samples: int = Field(2048, ge=1, description="demo only")
    shuffle: bool = Field(False, description="mix the rows of all sources; the order is written down with the data")
    seed: int = Field(0, ge=0, lt=1 << 64, description="of the shuffle")

    @field_validator("source", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name for name in names):  # before pydantic names both members of the union
            raise PydanticCustomError("source", "demo, a path, or a list of paths")
        return value

    @property
    def sources(self) -> tuple[str, ...]:
        """Return what `source` names, one or several."""
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)


class ExtractParams(_Strict):
    """How an extraction bounds itself, and when it gives up. Bytes are of free space, times in seconds."""

    attempts: int = Field(3, ge=1, description="a sample is asked for so often before it is owed")
    restarts: int = Field(3, ge=0, description="of a server that hsnb started, in a row: a published sample starts the count again")
    hang_s: float = Field(300, gt=0, description="no forward for so long while requests wait: the server hangs")
    canary_every: int = Field(500, ge=0, description="samples of one server between two canaries; 0: only at its start")
    patience_s: float = Field(900, ge=0, description="a full spool or disk is waited for so long, then the run stops")
    spool_floor: int | None = Field(None, ge=0, description="bytes that stay free in the spool; none: 5 % of it, at most 1 GiB")
    output_floor: int | None = Field(None, ge=0, description="bytes that stay free at the output; none: 5 % of it, at most 10 GiB")
    status_s: float = Field(60, gt=0, description="between two writes of the status file")
    store: str = Field("", description="an fsspec URL: finished files go to {store}/{run}/, are read back and compared, then freed here")
    on_stop: str = Field("", description="a shell command that is run at the end; HSNB_STATE and HSNB_STATUS say how it ended")


class Deployment(_Strict):
    """One params/*.yaml: a model, how it is served, what is captured, what is run through it."""

    name: str
    model: str = Field(description="a folder, or demo:NAME for one that hsnb makes (smollm2-fp32, smollm2-bf16, tiny-deepseek, kimi-shape)")
    shape: ShapeParams | None = None
    server: ServerParams = ServerParams()
    capture: CaptureParams
    data: DataParams = DataParams()
    extract: ExtractParams = ExtractParams()

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> Deployment:
        """Read a YAML file; `overrides` replace top-level parts (a dict replaces keys within a part).

        Raises ParamsError for a missing file, bad YAML, an unknown name or a value out of range.
        """
        file = resolve(path)
        if not file.is_file() and path and Path(path).parent == Path():  # by name: demo, demo.yaml
            file = project_root() / "params" / f"{str(path).removesuffix('.yaml')}.yaml"
        if not file.is_file():
            found = ", ".join(sorted(f"params/{p.name}" for p in (project_root() / "params").glob("*.yaml"))) or "none"
            raise _bad(path, f"no such file as {file}", "a params/*.yaml", "a typo in the name", f"choose one of: {found}")
        try:
            tree = yaml.safe_load(file.read_text())
        except yaml.YAMLError as error:
            raise _bad(path, " ".join(str(error).split()), "YAML", "a slip of the indentation", "mend the line named") from error
        if not isinstance(tree, dict):
            raise _bad(
                path,
                f"a {type(tree).__name__}",
                "a mapping of name, model, server, capture, data",
                "an empty file",
                "see params/demo.yaml",
            )
        for key, value in overrides.items():
            tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
        return cls.parse(tree, origin=str(path))

    @classmethod
    def parse(cls, tree: dict, *, origin: str) -> Deployment:
        """Validate a mapping; `origin` is named in the error."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            part: Any = cls
            for step in first["loc"][:-1]:
                part = part.model_fields[step].annotation if isinstance(part, type) and issubclass(part, BaseModel) else part
            names = ", ".join(part.model_fields) if isinstance(part, type) and issubclass(part, BaseModel) else ""
            unknown = first["type"] == "extra_forbidden"
            raise _bad(
                origin,
                f"unknown name {where}" if unknown else f"{where} is {first['input']!r}",
                f"one of: {names}" if unknown else first["msg"][0].lower() + first["msg"][1:],
                "a typo, or a name from another version" if unknown else "a value of the wrong kind",
                f"mend {where} in {origin}",
            ) from error

    def _repr_html_(self) -> str:
        parts = [(k, v) for k, v in self.model_dump().items() if v is not None]
        rows = [(f"{k}.{name}", value) for k, v in parts if isinstance(v, dict) for name, value in v.items()]
        return pairs_html([(k, v) for k, v in parts if not isinstance(v, dict)] + rows)

    def model_path(self) -> Path:
        """Return the model's folder; `demo:` models are made in the cache when they are not there yet."""
        from hsnb.demo import model_at

        return model_at(self.model)

    def model_config_json(self) -> dict:
        """Return the model's config.json. Raises ModelError when the folder has none."""
        return read_config(self.model_path())

    def check_against_model(self) -> tuple[int, ...]:
        """Check the boundaries, and `shape` where it is given, against config.json before anything is loaded; return them ascending."""
        config = self.model_config_json()
        if self.shape is not None:
            self._check_shape(shape_of(config))
        return bd.check_boundaries(self.capture.boundaries, num_layers(config))

    def has_model(self) -> bool:
        """Say whether config.json is on this machine; a `demo:` model always is, or is made when it is asked for."""
        return self.model.startswith("demo:") or (resolve(self.model) / "config.json").is_file()

    def model_shape(self) -> ShapeParams:
        """Return the model's sizes: from config.json, or from `shape` when the model's folder is not on this machine.

        Raises ModelError when there is neither, ParamsError when they differ.
        """
        if self.shape is not None and not self.has_model():
            return self.shape
        found = shape_of(self.model_config_json())
        if self.shape is not None:
            self._check_shape(found)
        return found

    def _check_shape(self, found: ShapeParams) -> None:
        for name, given in self.shape or ():
            if given is not None and given != getattr(found, name):
                raise ParamsError(
                    got=f"shape.{name} is {given}",
                    expected=f"{getattr(found, name)}, as in {self.model}/config.json",
                    likely="params of another model, or a wrong folder",
                    next=f"mend shape.{name} or model, or leave shape out where the folder is there",
                )


def read_config(folder: Path) -> dict:
    """Return `folder`/config.json as a dict. Raises ModelError when it is not there, not JSON, or no object with its layers in it."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict) or not str(bd.text_config(config).get("num_hidden_layers", "")).isdigit():
            raise ValueError("no object with num_hidden_layers")
        return config
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            got=f"{folder}/config.json: {error}",
            expected="a model folder with a config.json",
            likely="a wrong path, or a download that is not whole",
            next="name the folder that holds config.json and the safetensors files",
        ) from error


def num_layers(config: dict) -> int:
    """Return L, the number of decoder layers."""
    return int(bd.text_config(config)["num_hidden_layers"])


def shape_of(config: dict) -> ShapeParams:
    """Return the sizes in a config.json. SGLang's own rule for the context (0.5.23): max_position_embeddings, times a plain rope factor."""
    text = bd.text_config(config)
    rope = text.get("rope_scaling") or {}
    plain = "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3"
    longest = text.get("max_position_embeddings")
    return ShapeParams(
        num_layers=num_layers(config),
        hidden_size=int(text["hidden_size"]),
        vocab_size=int(text["vocab_size"]),
        context_length=int(longest * (rope.get("factor", 1) if plain else 1)) if longest else None,
    )


def _bad(origin: str | Path, got: str, expected: str, likely: str, next: str) -> HsnbError:
    return ParamsError(got=f"{origin}: {got}", expected=expected, likely=likely, next=next)
