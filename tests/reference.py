"""The neutral witness: transformers, every boundary of a prompt in float64, and the measures that states are compared by."""

from __future__ import annotations

import functools

import torch
from transformers import AutoModelForCausalLM

from hsnb.demo import model_folder


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32):
    torch.set_num_threads(2)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # torch's grouped product has no float64
    return AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=dtype, **eager).eval()


@torch.no_grad()
def boundaries(name, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return B_0 ... B_L of a demo model's name, or of a model, each [S, H]: B_L is the input of transformers' final norm, the last hidden_states entry is not used.

    Of a name computed in float64: in float32 transformers' own rounding is up to 4e-6 of a row (by a processor without AVX-512), which
    is no fault of the engine's.
    """
    net, seen = model(name, torch.float64) if isinstance(name, str) else name, {}
    hook = net.model.norm.register_forward_pre_hook(lambda module, args: seen.__setitem__("pre", args[0][0].clone()))
    try:
        out = net.model(token_ids[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    return [h[0].float() for h in out.hidden_states[:-1]] + [seen["pre"].float()]


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return |a - b| / |b| per token [S], in float64. Per token, because token 0 can outweigh all others (norm 174 times the median)."""
    a, b = a.double(), b.double()
    return (a - b).norm(dim=-1) / b.norm(dim=-1)
