"""A small random Llama in bfloat16: a dense model, because a mixture of experts changes its routes with the last bit.

The embeddings are of unit size and the other weights of 0.02, so that every layer changes the residual stream by a fifth: the
next boundary is then sixteen times farther away than bfloat16's rounding over sixteen layers (measured on a CPU).
"""

from __future__ import annotations

from pathlib import Path

import torch

from hsnb.demo import exclusive, quiet_transformers
from hsnb.paths import cache_dir

SEED, STD, VOCAB_SIZE, CONTEXT = 20250102, 0.02, 2048, 8192
SHAPES = {
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8},
    "narrow": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def llama_folder(shape: str) -> Path:
    """Return the folder of the random Llama of SHAPES[shape], made once in the cache."""
    folder = cache_dir() / "models" / f"bench-llama-{shape}-v1"
    with exclusive(folder):
        if not folder.is_dir():
            partial = folder.with_name(f".{folder.name}.partial")
            with quiet_transformers():
                _make(SHAPES[shape]).save_pretrained(partial)
            partial.rename(folder)
    return folder


def _make(sizes: dict[str, int]):
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = LlamaConfig(
        **sizes, head_dim=64, vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, tie_word_embeddings=False, rope_parameters=rope,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, dtype=torch.bfloat16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.uniform_(0.8, 1.2, generator=generator)  # not all one: a norm applied or forgotten must be seen
            else:
                weight.normal_(0, 1.0 if "embed_tokens" in name else STD, generator=generator)
    return model


@torch.no_grad()
def reference_states(folder: Path, token_ids: torch.Tensor, dtype: str, device: str) -> list[torch.Tensor]:
    """Return B_0 .. B_L [S, H] of transformers on `device`; B_L is the final norm's input, not the last of hidden_states."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True)
    model, seen = model.to(device).eval(), {}
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.__setitem__("pre", args[0][0].clone()))
    out = model.model(token_ids[None].to(device), output_hidden_states=True, use_cache=False)
    return [h[0] for h in out.hidden_states[:-1]] + [seen["pre"]]
