"""An EAGLE-3 drafter in plain torch: one Llama layer, as SGLang serves it and speculators trains it.

Written from speculators 0.9.0 (models/eagle3/core.py, model_definitions.py) and SGLang 0.5.23 (models/llama_eagle3.py), and tested
against both. It needs no trainer's environment, and is for judging drafters, not for training them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from hsnb.drafter.config import DrafterConfig, read_drafter
from hsnb.drafter.convert import LAYER, check_tensors, read_tensors
from hsnb.errors import ModelError
from hsnb.params import read_config
from hsnb.weights import embeddings, rms_norm

_ROWS = 1024  # of queries at a time: their scores are [heads, rows, S]


@dataclass(frozen=True)
class Drafter:
    """The drafter's weights in float32, with the target's embedding. `tokens` [D] int64: the target's id of each draft token."""

    config: DrafterConfig
    weights: dict[str, torch.Tensor]
    embedding: torch.Tensor
    tokens: torch.Tensor
    num_aux: int

    @classmethod
    def load(cls, folder: Path, target: Path) -> Drafter:
        """Read a drafter's folder (speculators, or SGLang style) and the target's embedding.

        Raises ModelError for tensors that are missing, unknown or of another shape, and for a rope that is scaled.
        """
        config = read_drafter(folder)
        kind = (config.layer.get("rope_parameters") or config.layer.get("rope_scaling") or {}).get("rope_type", "default")
        if kind != "default":
            raise ModelError(
                got=f"rope of type {kind!r}",
                expected="a plain rope",
                likely="a drafter for long contexts",
                next="measure this one by serving it",
            )
        tensors, embedding = read_tensors(Path(folder)), embeddings(target).float()
        num_aux = tensors["fc.weight"].shape[1] // int(config.raw.get("target_hidden_size") or config.layer["hidden_size"])
        names = check_tensors(config, tensors, num_aux, len(embedding))
        weights = {n.replace("midlayer.", LAYER): tensors[n].float() if tensors[n].is_floating_point() else tensors[n] for n in names}
        draft_vocab = len(weights["lm_head.weight"])
        tokens = torch.arange(draft_vocab) + (weights["d2t"].long() if "d2t" in weights else 0)
        return cls(config, weights, embedding, tokens, num_aux)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of x [S, H] by the weight `name`."""
        return rms_norm(x, self.weights[f"{name}.weight"], float(self.config.layer.get("rms_norm_eps", 1e-6)))

    def fused(self, aux: torch.Tensor) -> torch.Tensor:
        """Return what the layer takes in [S, H] from the target's aux states [S, A, H], ascending boundaries."""
        x = aux.float().flatten(1)
        if self.config.raw.get("norm_before_fc"):
            x = self.norm("input_norm", x)
        if self.config.raw.get("fc_norm"):
            x = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(x.chunk(self.num_aux, -1))], -1)
        return x @ self.weights["fc.weight"].T

    @torch.inference_mode()
    def drafts(self, token_ids: torch.Tensor, aux: torch.Tensor, steps: int) -> torch.Tensor:
        """Return the tokens drafted after every root, int64 [S - 1, steps], from token ids [S] and aux states [S, A, H].

        Root i has seen tokens 0..i+1 and the states of tokens 0..i, as a server has after a verification. Draft 0 is a guess at
        token i+2; draft k is made after the text's own tokens i+2..i+1+k, so that it is the server's draft wherever all before it
        were accepted (and is not looked at where they were not). Step k attends to the roots up to i and to its own earlier
        drafts: what SGLang computes, because it rewrites the KV of accepted tokens from the target's states.
        """
        ids, state = token_ids[1:], self.fused(aux[:-1])
        out, keys, values = [], [], []
        for step in range(steps):
            if step:
                ids = torch.cat([ids[1:], ids[-1:]])  # the last rows run past the text; nobody looks at them
            logits, state = self._step(ids, state, torch.arange(len(ids)) + step, keys, values)
            out.append(self.tokens[logits.argmax(-1)])
        return torch.stack(out, 1)

    def _step(self, ids, state, positions, keys: list, values: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on every root at once; `keys` and `values` [heads, S, D] of the earlier steps are added to."""
        w = lambda name, x: x @ self.weights[f"{LAYER}{name}.weight"].T  # noqa: E731
        normed = self.norm(f"{LAYER}hidden_norm", state)
        residual = normed if self.config.raw.get("norm_before_residual") else state
        x = torch.cat([self.norm(f"{LAYER}input_layernorm", self.embedding[ids]), normed], -1)
        layer = self.config.layer
        heads = int(layer["num_attention_heads"])
        kv_heads = int(layer.get("num_key_value_heads") or heads)
        size = self.weights[f"{LAYER}self_attn.q_proj.weight"].shape[0] // heads
        split = lambda y, n: y.view(len(y), n, size).transpose(0, 1)  # noqa: E731
        q = self._rope(split(w("self_attn.q_proj", x), heads), positions)
        k = self._rope(split(w("self_attn.k_proj", x), kv_heads), positions)
        keys.append(k.repeat_interleave(heads // kv_heads, 0))
        values.append(split(w("self_attn.v_proj", x), kv_heads).repeat_interleave(heads // kv_heads, 0))
        mixed = torch.cat([_attend(q, keys, values, slice(a, a + _ROWS)) for a in range(0, q.shape[1], _ROWS)], 1)
        x = residual + w("self_attn.o_proj", mixed.transpose(0, 1).flatten(1))
        y = self.norm(f"{LAYER}post_attention_layernorm", x)
        x = x + w("mlp.down_proj", F.silu(w("mlp.gate_proj", y)) * w("mlp.up_proj", y))
        last = self.norm("norm", x)
        return last @ self.weights["lm_head.weight"].T, last if self.config.raw.get("norm_output") else x

    def _rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [heads, S, D]; only differences of positions matter, so that it is all one where they begin."""
        layer = self.config.layer
        theta = float((layer.get("rope_parameters") or {}).get("rope_theta") or layer.get("rope_theta") or 10000.0)
        half = x.shape[-1] // 2
        angles = positions[:, None].float() * theta ** (-torch.arange(half).float() / half)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], rows: slice) -> torch.Tensor:
    """Attend rows of the newest step to the roots up to their own (step 0) and to their own later steps: [heads, rows, D]."""
    query, end = q[:, rows], min(rows.stop, q.shape[1])
    scale = q.shape[-1] ** -0.5
    past = (query @ keys[0][:, :end].transpose(1, 2)) * scale
    index = torch.arange(rows.start, end)
    past = past.masked_fill(torch.arange(end)[None] > index[:, None], float("-inf"))
    own = [(query * k[:, rows]).sum(-1, keepdim=True) * scale for k in keys[1:]]
    weights = torch.cat([past, *own], -1).softmax(-1)
    out = weights[..., :end] @ values[0][:, :end]
    for n, v in enumerate(values[1:]):
        out = out + weights[..., end + n : end + n + 1] * v[:, rows]
    return out


def load_drafter(folder: Path, target: Path) -> Drafter:
    """Return `Drafter.load`, after a look at whether `target` is a model's folder. Raises ModelError."""
    read_config(target)
    return Drafter.load(Path(folder), Path(target))
