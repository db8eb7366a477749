"""transformers as a neutral witness: every boundary of a prompt, on the CPU, by code that shares nothing with the engines."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError

from hsnb.errors import ModelError

SHARE = 0.3  # of the free memory that a copy of the model may take


def fits(folder: Path, dtype: str = "float32") -> bool:
    """Say whether transformers may load the model here, with room to spare. The files are taken to be in half precision."""
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    return 0 < size * getattr(torch, dtype).itemsize / 2 < psutil.virtual_memory().available * SHARE


def load(folder: Path, dtype: str = "float32"):
    """Load the model on the CPU in `dtype`, with attention written out in torch. Raises ModelError when that cannot be done."""
    from transformers import AutoModelForCausalLM

    try:
        net = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ModelError(
            got=f"{folder}: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            expected="a checkpoint that transformers loads",
            likely="a damaged file, or a model of a kind that this transformers does not know",
            next="name another folder, or compare with a running server",
        ) from error
    if not hasattr(getattr(net, "model", None), "norm"):
        raise ModelError(
            got=f"{folder}: a {type(net).__name__} without model.norm",
            expected="a decoder whose final norm is model.norm",
            likely="a kind of model that was not tried",
            next="compare with a running server",
        )
    return net.eval()


@torch.no_grad()
def states(net, token_ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return (B_0 .. B_L, each [S, H], logits [S, V]) of one prompt.

    B_L is the final norm's input; the last entry of transformers' hidden_states is taken after the norm, and not used.
    """
    seen = {}
    hook = net.model.norm.register_forward_pre_hook(lambda module, args: seen.__setitem__("pre", args[0][0].clone()))
    try:
        out = net(token_ids[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    return [h[0] for h in out.hidden_states[:-1]] + [seen["pre"]], out.logits[0]
