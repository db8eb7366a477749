"""The neutral witness: transformers in float32, every boundary of a prompt, and the measures that states are compared by."""

from __future__ import annotations

import functools

import torch
from transformers import AutoModelForCausalLM

from hsnb.demo import model_folder


@functools.cache
def model(name: str):
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def boundaries(name, token_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return B_0 ... B_L of a demo model's name, or of a model, each [S, H]: B_L is the input of transformers' final norm, the last hidden_states entry is not used."""
    net, seen = model(name) if isinstance(name, str) else name, {}
    hook = net.model.norm.register_forward_pre_hook(lambda module, args: seen.__setitem__("pre", args[0][0].clone()))
    try:
        out = net.model(token_ids[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    return [h[0] for h in out.hidden_states[:-1]] + [seen["pre"]]


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return |a - b| / |b| per token [S], in float64. Per token, because token 0 can outweigh all others (norm 174 times the median)."""
    a, b = a.double(), b.double()
    return (a - b).norm(dim=-1) / b.norm(dim=-1)
