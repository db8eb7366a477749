"""The one vocabulary of hsnb, *boundary k*, and the only place where other tools' layer ids are turned into it.

Boundary k (B_k) is the residual stream after k decoder layers: B_0 the embeddings, B_L the last layer's output before the
final norm. Elsewhere "layer id k" means B_k or B_{k+1}, by tool, version and model family; each rule below names where it
was read or run. Nothing outside this module adds or subtracts one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hsnb.errors import BoundaryError

FINAL_STATES = ("pre", "post")  # B_L, or norm(B_L)


def check_boundaries(boundaries: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return `boundaries` as an ascending tuple of ints in 0..num_layers.

    Raises BoundaryError for an empty list, an id outside 0..L, or a duplicate. Order is not taken from the caller: every
    engine hands the columns back ascending, so a list in another order would mislabel them.
    """
    given = list(boundaries)
    whole = [b for b in given if isinstance(b, int) and not isinstance(b, bool) and 0 <= b <= num_layers]
    if not given or len(whole) != len(given):
        raise BoundaryError(
            got=f"boundaries {given}",
            expected=f"at least one, each in 0..{num_layers} (a model of {num_layers} layers; {num_layers} is its last layer's output)",
            likely="ids of another model, or of a tool that counts from another layer",
            next="see hsnb.boundaries.to_boundaries for ids in another tool's convention",
        )
    if len(set(given)) != len(given):
        raise BoundaryError(
            got=f"boundaries {given}",
            expected="each boundary once",
            likely="two tools' ids for the same boundary were merged",
            next=f"use {sorted(set(given))}",
        )
    return tuple(sorted(given))


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return B_2, B_{L//2}, B_{L-3}: EAGLE-3's triple, and the default of SGLang, vLLM and speculators."""
    return check_boundaries([2, num_layers // 2, num_layers - 3], num_layers)


def late(boundaries: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the boundaries one later each: what is captured when an id is counted from the other side of its layer."""
    return check_boundaries([b + 1 for b in check_boundaries(boundaries, num_layers)], num_layers)


def telling_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return B_1, B_5 and B_{L-1}: a triple at which one boundary late is plain to see, because B_{L-1} and B_L differ most."""
    return check_boundaries([1, min(5, num_layers - 2), num_layers - 1], num_layers)


@dataclass(frozen=True)
class Convention:
    """How one tool numbers the states it names: `to(ids, family)` and `back(boundaries, family)`; `source` says who says so."""

    name: str
    source: str
    to: Callable[[list[int], str], list[int]]
    back: Callable[[list[int], str], list[int]]


def _same(ids: list[int], family: str) -> list[int]:
    return list(ids)


def _plus(ids: list[int], family: str) -> list[int]:
    return [i + 1 for i in ids]


def _minus(boundaries: list[int], family: str) -> list[int]:
    return [b - 1 for b in boundaries]


def _setter(ids: list[int], family: str) -> list[int]:
    # DeepSeek and Kimi since 0.5.13 shift only lists that begin with 1; Llama shifts every list.
    return _same(ids, family) if family == "deepseek" and ids and ids[0] != 1 else _plus(ids, family)


def _setter_back(boundaries: list[int], family: str) -> list[int]:
    if family != "deepseek":
        return _minus(boundaries, family)
    if boundaries and boundaries[0] == 1:
        raise BoundaryError(
            got=f"boundaries {boundaries}",
            expected="a first boundary other than 1",
            likely="SGLang's DeepSeek setter shifts every list that begins with 1, so B_1 cannot be asked for first",
            next="capture it with hsnb (which does not use the setter), or begin with another boundary",
        )
    return _same(boundaries, family)


CONVENTIONS = {
    c.name: c
    for c in (
        Convention("boundary", "hsnb", _same, _same),
        Convention("hf", "transformers 5 hidden_states[k], run; entry L is norm(B_L) and no boundary", _same, _same),
        Convention("sglang-layers-to-capture", "SGLang 0.5.17-0.5.23 model.layers_to_capture, run", _same, _same),
        Convention("sglang-eagle3", "SGLang 0.5.13+ set_eagle3_layers_to_capture and its options, run on 0.5.23", _setter, _setter_back),
        Convention("vllm", "vLLM 0.32 eagle_aux_hidden_state_layer_ids, run", _same, _same),
        Convention("speculators", "speculators 0.5-0.9 --target-layer-ids, run with 0.9", _same, _same),
        Convention("speculators-0.3", "speculators 0.3 and 0.4, read", _plus, _minus),
        Convention("specforge", "SpecForge 0.2, read: it goes through SGLang's setter", _setter, _setter_back),
        Convention("model-optimizer-hf", "Model-Optimizer's transformers dump, read", _plus, _minus),
        Convention("model-optimizer-vllm", "Model-Optimizer's vLLM dump, read: the same ids, one layer early", _same, _same),
        Convention("deepspec", "DeepSpec, AngelSlim and TorchSpec configs, read; -1 is the embeddings", _plus, _minus),
    )
}


def _convention(name: str | None) -> Convention:
    if name not in CONVENTIONS:
        raise BoundaryError(
            got=f"layer ids with convention {name!r}",
            expected=f"one of {', '.join(CONVENTIONS)}",
            likely="a bare list of ids: the same number names different tensors in different tools",
            next="say which tool's ids these are",
        )
    return CONVENTIONS[name]


def to_boundaries(ids: Sequence[int], convention: str | None, *, num_layers: int, family: str) -> tuple[int, ...]:
    """Turn another tool's layer ids into boundaries, ascending.

    `family` is "llama" or "deepseek" (`model_family`); only SGLang's setter looks at it. Raises BoundaryError for an unknown
    convention, for ids that are no boundary of this model, and for transformers' last entry (norm(B_L)).
    """
    rule = _convention(convention)
    if convention == "hf" and num_layers in ids:
        raise BoundaryError(
            got=f"transformers index {num_layers}",
            expected=f"an index below {num_layers}",
            likely="transformers' last entry is taken after the final norm: it is norm(B_L), not B_L",
            next="ask for boundary L, or for final: post",
        )
    return check_boundaries(rule.to(list(ids), family), num_layers)


def from_boundaries(boundaries: Sequence[int], convention: str | None, *, num_layers: int, family: str) -> list[int]:
    """Turn boundaries into the ids that `convention` uses for them, so that to_boundaries gives the same boundaries back."""
    rule = _convention(convention)
    wanted = check_boundaries(boundaries, num_layers)
    ids = rule.back(list(wanted), family)
    if to_boundaries(ids, convention, num_layers=num_layers, family=family) != wanted:
        raise BoundaryError(
            got=f"boundaries {list(wanted)}",
            expected=f"boundaries that {rule.name} has ids for",
            likely=rule.source,
            next="leave out the boundary that it cannot name",
        )
    return ids


def model_family(config: dict) -> str:
    """Return which of SGLang's two setter rules a model's config.json falls under: "deepseek" (also Kimi) or "llama".

    GLM-4 MoE Lite, GLM's DSA models and Mistral Large 3 take DeepSeek's setter, or a copy of it (read in 0.5.17, 0.5.20, 0.5.23).
    """
    names = (" ".join(config.get("architectures") or []) + str(config.get("model_type", ""))).lower()
    return "deepseek" if any(name in names for name in ("deepseek", "kimi", "glm4moelite", "glmmoedsa", "mistrallarge3")) else "llama"


def text_config(config: dict) -> dict:
    """Return the language model's part of a config.json (Kimi-K2.5 and other wrappers nest it as text_config)."""
    return config.get("text_config") or config
