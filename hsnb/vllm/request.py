"""What is asked of vLLM, checked before it is started: its own checks come minutes later, or as a crash, or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hsnb.boundaries import model_family, text_config, to_boundaries
from hsnb.errors import BoundaryError, DataError, ModelError, ParamsError
from hsnb.params import num_layers, read_config

WAYS = ("connector", "worker")
DTYPES = ("float32", "bfloat16", "float16")
CPU_CACHE_BYTES = 1 << 30  # vLLM rounds pages up; 256 tokens of 31 boundaries of SmolLM2 take a small part of it
KV_LORA_RANK, ROPE_HEAD_DIM = 512, 64  # the only latent that vLLM 0.32's MLA kernel for the CPU has


@dataclass(frozen=True)
class Request:
    """One engine start: what `inside/driver.py` reads. `ids` as given, `labels` go into the metadata of every file."""

    model: str
    dtype: str
    prompts: list[list[int]]
    ids: list[int]
    way: str
    out: str
    max_new_tokens: int
    max_model_len: int
    tensor_parallel_size: int
    labels: dict[str, str]
    keep_raw: bool = False
    cpu_cache_bytes: int = CPU_CACHE_BYTES


def check_ids(ids: Sequence[int], config: dict, way: str) -> tuple[int, ...]:
    """Return the boundaries that vLLM gives for `ids`, ascending. Raises BoundaryError for what it would not survive, or not say.

    A duplicate crashes it (the cache has a column more than the model gives), an id past L is silently left out, and DeepSeek's
    id 0 adds a residual that is None (read and run in 0.32.0).
    """
    family, layers = model_family(config), num_layers(config)
    boundaries = to_boundaries(ids, "vllm", num_layers=layers, family=family)
    if way == "connector" and family == "deepseek" and 0 in ids:
        raise BoundaryError(
            got=f"id 0 in {list(ids)} for a DeepSeek",
            expected=f"ids in 1..{layers}",
            likely="vLLM adds the residual at layer 0, where DeepSeek has none yet, and the engine crashes",
            next='leave out 0 (it is the embeddings), or use way="worker"',
        )
    return boundaries


def build(
    model: Path, prompts: Sequence[Sequence[int]], ids: Sequence[int], *, dtype: str, out: Path, way: str, max_new_tokens: int, tp: int,
    keep_raw: bool = False, cpu_cache_bytes: int = CPU_CACHE_BYTES,
) -> Request:  # fmt: skip
    """Return the checked request. Raises ParamsError, ModelError, BoundaryError or DataError; nothing is started."""
    for name, value, allowed in (("way", way, WAYS), ("dtype", dtype, DTYPES)):
        if value not in allowed:
            raise ParamsError(
                got=f"{name} is {value!r}", expected=f"one of {', '.join(allowed)}", likely="a typo", next=f"{name}={allowed[0]!r}"
            )
    if max_new_tokens < 0:
        raise ParamsError(
            got=f"max_new_tokens is {max_new_tokens}", expected="0 (no answer) or more", likely="a typo", next="max_new_tokens=0"
        )
    config = read_config(model)
    boundaries = check_ids(ids, config, way)
    text, layers = text_config(config), num_layers(config)
    lists = [[int(t) for t in prompt] for prompt in prompts]
    longest = _check_prompts(lists, text, max_new_tokens)
    final = layers in boundaries
    labels = {
        "engine": "vllm",
        "ids": json.dumps([int(i) for i in ids]),
        "way": way,
        "boundaries": json.dumps([b for b in boundaries if b != layers]),
        "final": "pre" if final else "none",
        "num_layers": str(layers),
        "model": str(model),
    }
    return Request(
        str(model), dtype, lists, [int(i) for i in ids], way, str(out), max_new_tokens, longest, tp, labels, keep_raw, cpu_cache_bytes
    )


def _check_prompts(prompts: list[list[int]], text: dict, max_new_tokens: int) -> int:
    """Return the tokens that the longest prompt and its answer need. Raises DataError naming the prompt."""
    limit, vocab = int(text.get("max_position_embeddings") or 1 << 30), int(text.get("vocab_size") or 1 << 30)
    if not prompts:
        raise DataError(got="no prompts", expected="at least one list of token ids", likely="an empty selection", next="give a prompt")
    for n, prompt in enumerate(prompts):
        bad = [t for t in prompt if not 0 <= t < vocab]
        if not prompt or bad:
            raise DataError(
                got=f"prompt {n} has token id {bad[0]}" if bad else f"prompt {n} is empty",
                expected=f"one or more token ids below {vocab}",
                likely="ids of another tokenizer",
                next="tokenise with this model's own tokenizer",
            )
        if len(prompt) + max(max_new_tokens, 1) > limit:
            raise DataError(
                got=f"prompt {n} has {len(prompt)} tokens and {max(max_new_tokens, 1)} to come",
                expected=f"at most {limit}, the model's max_position_embeddings",
                likely="a longer prompt than the model was made for",
                next="cut it, or leave it out",
            )
    return max(map(len, prompts)) + max(max_new_tokens, 1)


def check_cpu(model: Path) -> None:
    """Raise ModelError for an MLA that vLLM cannot run on a CPU."""
    text = text_config(read_config(model))
    latent = text.get("kv_lora_rank"), text.get("qk_rope_head_dim")
    if latent[0] and latent != (KV_LORA_RANK, ROPE_HEAD_DIM):
        raise ModelError(
            got=f"{model}: MLA with kv_lora_rank {latent[0]} and qk_rope_head_dim {latent[1]}",
            expected=f"{KV_LORA_RANK} and {ROPE_HEAD_DIM} on a CPU",
            likely="vLLM's CPU kernel for MLA has one size only, that of the real DeepSeek-V3",
            next="use demo:tiny-deepseek, or a CUDA machine",
        )
