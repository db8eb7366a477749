"""What an EAGLE-3 drafter's config.json says, and which boundaries an engine would feed a drafter that has it.

The same drafter is fed other states by other engines: SGLang reads ids only from `eagle_config` and puts them through the target
model's setter, vLLM reads the top level first and takes ids for boundaries, and both fall back to a default in silence. Read in
SGLang 0.5.17, 0.5.20 and 0.5.23 (spec_aux_hidden_state.py, each model's set_eagle3_layers_to_capture) and vLLM 0.32.0
(gpu_model_runner.py `_get_eagle3_aux_layers_from_config`, transformers_utils/configs/speculators), and speculators 0.3 to 0.9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hsnb.boundaries import check_boundaries, default_boundaries, model_family, to_boundaries
from hsnb.errors import BoundaryError, ModelError, ParamsError
from hsnb.params import num_layers
from hsnb.patch.settings import version_tuple

IDS = "eagle_aux_hidden_state_layer_ids"
ENGINES = {"sglang": "0.5.23", "vllm": "0.32.0"}  # the version meant when none is given
_SETTER_RULE_SINCE = (0, 5, 13)  # before it DeepSeek's setter was another one, and not read
_KEEPS_LIST_WITH_L = "GptOssForCausalLM"  # SGLang 0.5.17-0.5.23: a list that names layer L is taken as it is
_SHIFTS_DEFAULT = "MiniMaxM3SparseForConditionalGeneration"  # SGLang 0.5.23: the default goes through the +1, too


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's config.json. `kind`: "speculators" (the Llama part nested) or "sglang" (flat; SpecForge's export is this, too)."""

    raw: dict = field(repr=False)
    kind: str
    version: str = ""  # of speculators, as the file says
    path: Path | None = None

    @property
    def layer(self) -> dict:
        """Return the Llama part: hidden_size, num_attention_heads, rope_theta, ..."""
        return self.raw["transformer_layer_config"] if self.kind == "speculators" else self.raw

    @property
    def top_ids(self) -> Any:
        """Return the ids at the top level, as written; None when there are none."""
        return self.raw.get(IDS)


@dataclass(frozen=True)
class Fed:
    """Which boundaries a drafter gets, ascending: `()` when it gets no aux states at all.

    `ids`: as the config writes them, None when it has none. `where`: the key they were read from, "" for the default. `why`: the
    rule, in words. `loads`: whether the engine loads this folder as it is.
    """

    boundaries: tuple[int, ...]
    ids: Any
    where: str
    why: str
    engine: str = ""
    version: str = ""
    loads: bool = True

    def as_dict(self) -> dict:
        """Return plain values, for --json."""
        return {**asdict(self), "boundaries": list(self.boundaries)}


def read_drafter(source: str | Path | Mapping) -> DrafterConfig:
    """Read a drafter's folder, its config.json, or that file's content.

    Raises ModelError when there is no such file, it is no JSON object, or it is no EAGLE-3 drafter's.
    """
    path = None if isinstance(source, Mapping) else Path(source)
    if path is None:
        raw = dict(source)
    else:
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text())
            if not isinstance(raw, dict) or not isinstance(raw.get("architectures") or [], list):
                raise ValueError("no object with a list of architectures")
        except (OSError, ValueError) as error:
            raise _not_a_drafter(path, str(error), "a wrong path, or a trainer's checkpoint that was not saved as a model") from error
    names = " ".join(map(str, raw.get("architectures") or []))
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        if not isinstance(raw.get("transformer_layer_config"), dict) or raw.get("speculators_model_type", "eagle3") != "eagle3":
            raise _not_a_drafter(path, f"speculators_model_type {raw.get('speculators_model_type')!r}", "another kind of speculator")
        return DrafterConfig(raw, "speculators", str(raw.get("speculators_version", "")), path)
    if "eagle3" not in names.lower() and "eagle_config" not in raw and IDS not in raw:
        raise _not_a_drafter(path, f"architectures {raw.get('architectures')}", "the target model's config, or a drafter of another kind")
    return DrafterConfig(raw, "sglang", "", path)


def fed(config, engine: str = "sglang", version: str = "", *, target_config: Mapping) -> Fed:
    """Say which boundaries `engine` feeds to a drafter with this config beside the model of `target_config` (its config.json).

    `config`: what `read_drafter` takes, or gave. What it does not prove: that a running server was started with this folder;
    `hsnb.drafter.served` asks that one. Raises BoundaryError for ids that the engine would die of or ignore piecewise,
    ParamsError for an engine or version whose rule was not read.
    """
    config = config if isinstance(config, DrafterConfig) else read_drafter(config)
    version = version or ENGINES.get(engine, "")
    if engine == "sglang":
        return _fed_by_sglang(config, version, dict(target_config))
    if engine == "vllm":
        return _fed_by_vllm(config, version, dict(target_config))
    raise ParamsError(
        got=f"engine {engine!r}", expected=f"one of: {', '.join(ENGINES)}", likely="a typo", next="name the engine that will serve"
    )


def trained_on(config, *, target_config: Mapping) -> Fed | None:
    """Return the boundaries that the trainer says it trained on, None where its config does not say.

    speculators 0.5-0.9 write boundaries. 0.3 and 0.4 never write what they trained on (ids in their files were typed in for
    `speculators convert`). SGLang-style configs (SpecForge's export) are read through the setter that both share; a run-level
    override is not in SpecForge's export, which then names what it was not trained on.
    """
    config = config if isinstance(config, DrafterConfig) else read_drafter(config)
    layers, family = num_layers(dict(target_config)), model_family(dict(target_config))
    if config.kind == "speculators":
        if config.top_ids is None or (config.version and version_tuple(config.version) < (0, 5)):
            return None
        boundaries = to_boundaries(_listed(config.top_ids, IDS, layers), "speculators", num_layers=layers, family=family)
        return Fed(boundaries, config.top_ids, IDS, f"speculators {config.version or '0.5 and newer'} writes boundaries")
    if (ids := (config.raw.get("eagle_config") or {}).get(IDS)) is None:
        return None
    boundaries = to_boundaries(_listed(ids, f"eagle_config.{IDS}", layers), "specforge", num_layers=layers, family=family)
    return Fed(boundaries, ids, f"eagle_config.{IDS}", f"ids of SGLang's {family} setter; an override of the run would not be here")


def _fed_by_sglang(config: DrafterConfig, version: str, target: dict) -> Fed:
    layers, family, names = num_layers(target), model_family(target), target.get("architectures") or []
    if version_tuple(version) < _SETTER_RULE_SINCE:
        raise ParamsError(
            got=f"SGLang {version}",
            expected="0.5.13 or newer",
            likely="an old server: DeepSeek's setter had another rule there, which was not read",
            next="ask the running server with hsnb drafter check --server, or serve with a newer one",
        )
    loads = config.kind == "sglang" and "model_type" in config.raw
    about = {"engine": "sglang", "version": version, "loads": loads}
    folder = "" if loads else "; SGLang does not load this folder as it is (no model_type): hsnb drafter convert"
    eagle = config.raw.get("eagle_config")
    where, ids, reason = f"eagle_config.{IDS}", None, "no eagle_config"
    if isinstance(eagle, Mapping):
        if not eagle.get("use_aux_hidden_state", True):
            return Fed((), eagle.get(IDS), where, f"use_aux_hidden_state is false: no aux states are captured{folder}", **about)
        ids = eagle.get(IDS)
        reason = f"eagle_config has no {IDS}" if IDS not in eagle else f"{where} is null"
    elif eagle is not None:
        reason = f"eagle_config is a {type(eagle).__name__}, which SGLang passes over without a word"
    if ids is None:
        if config.top_ids is not None:
            reason += f"; the top level's {config.top_ids} is not read"
        boundaries = default_boundaries(layers)
        if _SHIFTS_DEFAULT in names:
            boundaries = to_boundaries(boundaries, "sglang-eagle3", num_layers=layers, family=family)
        return Fed(boundaries, None, "", f"{reason}: SGLang's default{folder}", **about)
    ids = _listed(ids, where, layers)
    if _KEEPS_LIST_WITH_L in names and max(ids) == layers:
        return Fed(
            check_boundaries(ids, layers), ids, where, f"SGLang's gpt-oss setter takes a list with layer L as it is{folder}", **about
        )
    boundaries = to_boundaries(ids, "sglang-eagle3", num_layers=layers, family=family)
    if layers in boundaries:
        raise BoundaryError(
            got=f"{where} {ids}: boundary {layers} in SGLang {version}",
            expected=f"boundaries below {layers}",
            likely="SGLang takes aux states before a layer, and there is no layer after the last: one state fewer would come",
            next="train on a boundary below L",
        )
    rule = "adds one" if family == "llama" else "adds one only where the first id is 1"
    return Fed(boundaries, ids, where, f"SGLang's {family} setter {rule}{folder}", **about)


def _fed_by_vllm(config: DrafterConfig, version: str, target: dict) -> Fed:
    layers, family = num_layers(target), model_family(target)
    about = {"engine": "vllm", "version": version, "loads": True}
    eagle = config.layer.get("eagle_config")
    if isinstance(eagle, Mapping) and not eagle.get("use_aux_hidden_state", True):
        return Fed((), config.top_ids, IDS, "use_aux_hidden_state is false: no aux states are captured", **about)
    ids, where = config.top_ids, IDS
    if not ids and isinstance(eagle, Mapping):
        ids, where = eagle.get(IDS), f"eagle_config.{IDS}"
    if not ids or not isinstance(ids, list | tuple):
        reason = "no ids" if not ids else f"{where} is a {type(ids).__name__}, which vLLM passes over"
        return Fed(default_boundaries(layers), None, "", f"{reason}: vLLM's default", **about)
    boundaries = to_boundaries(_listed(ids, where, layers), "vllm", num_layers=layers, family=family)
    why = "vLLM takes the ids for boundaries"
    if where != IDS:
        why += "; read in 0.32.0, where SGLang's own key comes second: ids meant for SGLang's Llama setter come one early here"
    return Fed(boundaries, list(ids), where, why, **about)


def _listed(ids: Any, where: str, layers: int) -> list[int]:
    if isinstance(ids, list | tuple) and ids and all(type(i) is int for i in ids):
        return list(ids)
    raise BoundaryError(
        got=f"{where} is {ids!r}",
        expected=f"a list of whole numbers (a model of {layers} layers)",
        likely="a config edited by hand: the engine dies of it, or captures nothing",
        next="convert the drafter again with hsnb drafter convert",
    )


def _not_a_drafter(path: Path | None, got: str, likely: str) -> ModelError:
    return ModelError(
        got=f"{path or 'config'}: {got}",
        expected="an EAGLE-3 drafter's config.json (speculators, SpecForge or SGLang style)",
        likely=likely,
        next="name the drafter's folder",
    )
