"""The final norm and the output head of a checkpoint, read from the files that hold them and no others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from hsnb.boundaries import text_config
from hsnb.errors import ModelError
from hsnb.params import read_config

_PREFIXES = ("", "language_model.")  # Kimi-K2.5 wraps its language model
_BLOCKS, _BLOCK = 16, 1 << 16  # of a weight file that its identity is known by; bytes
_VOCAB_BLOCK = 16384  # rows of the head in float32 at a time: 470 MB at 7168 wide


@dataclass(frozen=True)
class Head:
    """norm [H], eps, head [V, H] in the checkpoint's dtype."""

    norm: torch.Tensor
    eps: float
    head: torch.Tensor

    @classmethod
    def load(cls, folder: Path) -> Head:
        """Read norm and head of the model in `folder`; tied embeddings are followed.

        Raises ModelError naming the tensors looked for, or a norm that is not an RMS norm with a plain weight.
        """
        norm, eps = final_norm(folder)
        tied = bool(text_config(read_config(folder)).get("tie_word_embeddings", False))
        names = ("model.embed_tokens.weight",) if tied else ("lm_head.weight", "model.embed_tokens.weight")
        return cls(norm, eps, _read(folder, _index(folder), *names))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return norm(x) for x [S, H], in float32."""
        return rms_norm(x, self.norm, self.eps)

    def logprobs(self, final: torch.Tensor, next_ids: torch.Tensor, state: str) -> torch.Tensor:
        """Return log p(next_ids[i] | row i) [S] in float32, from final [S, H] that is "pre" or "post" the norm."""
        x = self._input(final, state)
        picked = (x * self.head[next_ids].float()).sum(-1)
        total = torch.full_like(picked, float("-inf"))
        for block in self.head.split(_VOCAB_BLOCK):
            total = torch.logaddexp(total, torch.logsumexp(x @ block.float().T, dim=-1))
        return picked - total

    def top1(self, final: torch.Tensor, state: str) -> torch.Tensor:
        """Return the most likely next token of each row, int64 [S]."""
        x = self._input(final, state)
        best, where = torch.full((len(x),), float("-inf")), torch.zeros(len(x), dtype=torch.int64)
        for n, block in enumerate(self.head.split(_VOCAB_BLOCK)):
            value, index = (x @ block.float().T).max(-1)
            where = torch.where(value > best, index + n * _VOCAB_BLOCK, where)
            best = torch.maximum(best, value)
        return where

    def _input(self, final: torch.Tensor, state: str) -> torch.Tensor:
        return final.float() if state == "post" else self.normed(final)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of x [S, H] with `weight` [H], in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def final_norm(folder: Path) -> tuple[torch.Tensor, float]:
    """Return the final norm's weight [H] and eps without reading the head. Raises ModelError for a norm that is not an RMS norm."""
    config = text_config(read_config(folder))
    if "rms_norm_eps" not in config:
        raise _not_found(folder, "rms_norm_eps in config.json", "a model whose final norm is not an RMS norm")
    return _read(folder, _index(folder), "model.norm.weight"), float(config["rms_norm_eps"])


def layer_norms(folder: Path, layers: list[int]) -> dict[int, torch.Tensor]:
    """Return {j: weight [H] of layer j's input norm}, read from the files that hold them."""
    files = _index(folder)
    return {j: _read(folder, files, f"model.layers.{j}.input_layernorm.weight") for j in layers}


def embeddings(folder: Path) -> torch.Tensor:
    """Return the token embeddings [V, H] of the model in `folder`, in the checkpoint's dtype."""
    return _read(folder, _index(folder), "model.embed_tokens.weight")


def weights_hash(folder: Path) -> str:
    """Return a hash of the weights' identity: config.json, and each weight file's name, size and seventeen blocks of 64 KiB.

    The blocks lie evenly from the file's beginning to its end. Reading all of 547 GB would take longer than the probe; a change
    between the blocks alone is not seen, a training moves all of them. No times: they differ in two machines' copies.
    """
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for k in range(_BLOCKS + 1):
                file.seek(max(0, size - _BLOCK) * k // _BLOCKS)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _index(folder: Path) -> dict[str, str]:
    """Return {tensor name: file name} of the checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files.update(dict.fromkeys(file.keys(), path.name))
    if not files:
        raise _not_found(folder, "*.safetensors", "weights in another format, or a download that is not whole")
    return files


def _read(folder: Path, files: dict[str, str], *names: str) -> torch.Tensor:
    for name in names:
        for prefix in _PREFIXES:
            if prefix + name in files:
                with safe_open(folder / files[prefix + name], "pt") as file:
                    return file.get_tensor(prefix + name)
    raise _not_found(folder, " or ".join(names), "a checkpoint with other names")


def _not_found(folder: Path, what: str, likely: str) -> ModelError:
    return ModelError(
        got=f"{folder}: no {what}",
        expected="a checkpoint whose final norm and head can be read",
        likely=likely,
        next="name the folder of the model that the server serves",
    )
