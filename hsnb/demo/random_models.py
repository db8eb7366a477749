"""Tiny random models, one of each family that a drafter is trained for: what a family's capture is proved with on a CPU.

Like the random DeepSeeks they say nothing about text. Every layer changes the residual stream by far more than rounding does,
no norm's weight is all ones and no bias is zero, so that a boundary, norm or bias taken wrongly is seen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hsnb.demo import model_folder, quiet_transformers
from hsnb.demo.random_deepseek import SEED, VOCAB_SIZE, make_tokenizer

CONTEXT = 4096
STD = 0.05
_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False, "max_position_embeddings": CONTEXT,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_MINIMAX: dict[str, Any] = {
    "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid",
}  # fmt: skip

# name: (model class in transformers, what its config has beside _DENSE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-qwen2": ("Qwen2ForCausalLM", {}),
    "tiny-qwen3": ("Qwen3ForCausalLM", {}),
    "tiny-qwen2-moe": ("Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 0}),
    "tiny-qwen3-moe": ("Qwen3MoeForCausalLM", _EXPERTS),
    "tiny-mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "tiny-glm4": ("Glm4ForCausalLM", {"partial_rotary_factor": 0.5}),
    "tiny-glm4-moe": (
        "Glm4MoeForCausalLM",
        {**_GROUPED, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    ),
    "tiny-minimax-m2": ("MiniMaxM2ForCausalLM", _MINIMAX),
    # The last two are there to be refused (hsnb.patch.bodies): aux states without the residual; a class without an aux path.
    "tiny-gemma3": ("Gemma3ForCausalLM", {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "tiny-olmo2": ("Olmo2ForCausalLM", {}),
}


def make(folders: dict[str, Path]) -> None:
    """Save the model and the tokenizer of each name into its folder."""
    for name, folder in folders.items():
        if name == "tiny-kimi-k25":
            wrap_in_kimi(model_folder("tiny-deepseek"), folder)
            continue
        make_tokenizer(CONTEXT).save_pretrained(folder)
        with quiet_transformers():
            make_model(name).save_pretrained(folder)


def make_model(name: str) -> Any:
    """Return the model of family `name` in float32 with seeded random weights."""
    import torch
    import transformers

    kind, own = FAMILIES[name]
    net = getattr(transformers, kind)
    model = net(net.config_class(**{**_DENSE, **own}, dtype=torch.float32)).float().eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for key, weight in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith("e_score_correction_bias"):
                weight.uniform_(-0.02, 0.02, generator=generator)
            elif "inv_freq" in key or "embed_scale" in key:  # computed from the config, not stored
                continue
            elif key.endswith("norm.weight") or "layernorm" in key or "_norm" in key:
                weight.add_(torch.empty_like(weight).uniform_(-0.2, 0.2, generator=generator))  # around 1, or Gemma's 0
            else:
                weight.normal_(0, STD, generator=generator)
    return model


_VISION = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
_KIMI_PROCESSOR = '''"""What SGLang asks of Kimi-K2.5's processor before it serves text; images are not for this model."""

from types import SimpleNamespace

from transformers import AutoTokenizer


class TinyKimiProcessor:
    image_processor = None
    media_processor = SimpleNamespace(
        media_proc_cfg={
            "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16, "patch_limit_on_one_side": 8,
            "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        }
    )

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, folder, **_):
        return cls(AutoTokenizer.from_pretrained(folder))

    @classmethod
    def register_for_auto_class(cls, *_):
        pass
'''


def wrap_in_kimi(language_model: Path, folder: Path) -> None:
    """Wrap a DeepseekV3 folder as Kimi-K2.5 does: text_config, language_model.* weights, a vision tower (here without weights).

    SGLang serves it as KimiK25ForConditionalGeneration with --trust-remote-code (for the processor, as the real one) and
    --skip-tokenizer-init (else its warm-up request is an image, which needs the real processor).
    """
    from safetensors.torch import load_file, save_file

    for file in language_model.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, folder)
    text = json.loads((language_model / "config.json").read_text())
    vision = {
        "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "init_pos_emb_time": 2, "text_hidden_size": text["hidden_size"],
        "mm_hidden_size": _VISION["hidden_size"], **_VISION, **{f"vt_{name}": value for name, value in _VISION.items()},
    }  # fmt: skip
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": text["dtype"],
        "media_placeholder_token_id": VOCAB_SIZE - 1, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "text_config": text, "vision_config": vision,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    auto = {"processor_class": "TinyKimiProcessor", "auto_map": {"AutoProcessor": "processing_tiny_kimi.TinyKimiProcessor"}}
    (folder / "processor_config.json").write_text(json.dumps(auto))
    (folder / "processing_tiny_kimi.py").write_text(_KIMI_PROCESSOR)
    weights = load_file(language_model / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
