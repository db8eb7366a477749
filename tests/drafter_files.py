"""A small target model and drafters for it, with random weights, as their tools save them: to test code on files, not quality."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hsnb.drafter.config import IDS

H, INNER, HEADS, KV, VOCAB, DRAFT, LAYERS = 32, 48, 4, 2, 64, 24, 8
LLAMA = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": H // HEADS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def make_target(folder: Path) -> Path:
    """Write a Llama's config, norm and tied embedding: all that a drafter needs of its target."""
    folder.mkdir(parents=True)
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": rand(VOCAB, H, seed=1), "model.norm.weight": torch.ones(H)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def drafter_tensors(num_aux: int = 3, layer: str = "layers.0.") -> dict[str, torch.Tensor]:
    """Return a drafter's tensors in speculators' names."""
    size = H // HEADS
    shapes = {
        "self_attn.q_proj": (HEADS * size, 2 * H), "self_attn.k_proj": (KV * size, 2 * H), "self_attn.v_proj": (KV * size, 2 * H),
        "self_attn.o_proj": (H, HEADS * size), "mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H), "mlp.down_proj": (H, INNER),
    }  # fmt: skip
    out = {f"{layer}{name}.weight": rand(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items(), 10)}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    out |= {f"{layer}{name}.weight": 1 + rand(H, seed=n) for n, name in enumerate(norms, 30)}
    ids = torch.arange(DRAFT) * 2 + 1
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return out | {
        "fc.weight": rand(H, num_aux * H, seed=40),
        "norm.weight": 1 + rand(H, seed=41),
        "lm_head.weight": rand(DRAFT, H, seed=42),
        "d2t": ids - torch.arange(DRAFT),
        "t2d": t2d,
    }


def speculators_config(**changed) -> dict:
    """Return config.json as speculators 0.9 saves it (keys and quirks as read from a real one)."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": DRAFT,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        IDS: [2, 4, 5],
        "transformer_layer_config": {**LLAMA, "num_hidden_layers": 1, "_name_or_path": "somewhere", "dtype": "float32"},
        **changed,
    }


def make_speculators(folder: Path, target: Path | None = None, tensors: dict | None = None, **changed) -> Path:
    """Write a drafter as speculators saves it, its embedding a copy of the target's."""
    from safetensors.torch import load_file

    folder.mkdir(parents=True)
    config = speculators_config(**changed)
    tensors = dict(drafter_tensors(len(config[IDS] or [0] * 3)) if tensors is None else tensors)
    if target is not None:
        tensors["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    if config["norm_before_fc"]:
        tensors["input_norm.weight"] = 1 + rand(len(config[IDS]) * H, seed=50)
    if config["fc_norm"]:
        tensors |= {f"fc_norm.{i}.weight": 1 + rand(H, seed=60 + i) for i in range(len(config[IDS]))}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def make_specforge(folder: Path, **changed) -> Path:
    """Write a drafter as SpecForge 0.2 exports it to SGLang: flat config, midlayer names, no embedding."""
    folder.mkdir(parents=True)
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT, **changed}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(drafter_tensors(layer="midlayer."), folder / "model.safetensors")
    return folder
