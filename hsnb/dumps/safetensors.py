"""The safetensors layout: hidden_states [S, K+1, H] and token_ids [S]. vLLM's and speculators' files have it too, unlabelled.

vLLM's connector writes the boundaries it was asked for and no more: without B_L among them there is no final state, which
hsnb.vllm labels as final "none" (K columns), and with it B_L is the final state, pre (K+1 columns, as everywhere).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hsnb.dumps.dump import NO_FINAL, UNKNOWN, Dump, unreadable


class SafetensorsDump(Dump):
    """One .safetensors file, mapped: a column is read when it is asked for, the ids at once."""

    layout = "safetensors"

    def __init__(self, path: Path):
        self.path = path
        try:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                meta = file.metadata() or {}
                if not {"hidden_states", "token_ids"} <= names:
                    raise ValueError(f"tensors {sorted(names)}, expected hidden_states and token_ids")
                shape = file.get_slice("hidden_states").get_shape()
                if len(shape) != 3 or file.get_slice("token_ids").get_shape() != [shape[0]]:
                    raise ValueError(
                        f"hidden_states {shape} beside token_ids {file.get_slice('token_ids').get_shape()}, expected [S,K+1,H] and [S]"
                    )
                self.dtype = file.get_slice("hidden_states")[:0].dtype
                self._token_ids = file.get_tensor("token_ids").to(torch.int64, copy=True)  # a view would keep the file mapped
            boundaries = tuple(json.loads(meta["boundaries"])) if "boundaries" in meta else UNKNOWN
            final = meta.get("final", UNKNOWN)
            if boundaries != UNKNOWN and len(boundaries) + (final != NO_FINAL) != shape[1]:
                raise ValueError(f"{shape[1]} columns for boundaries {list(boundaries)} and {'no' if final == NO_FINAL else 'the'} final")
            num_layers = int(meta["num_layers"]) if "num_layers" in meta else None
        except (SafetensorError, ValueError, OSError) as error:
            raise unreadable(path, error) from error
        self.num_tokens, self.columns, self.hidden_size = shape
        self.metadata, self.boundaries, self.final, self.num_layers = meta, boundaries, final, num_layers
        self.request_id, self.kind = meta.get("request_id", path.stem), meta.get("kind", UNKNOWN)

    @property
    def token_ids(self) -> torch.Tensor:
        return self._token_ids

    @property
    def nbytes(self) -> int:
        return self.num_tokens * self.columns * self.hidden_size * self.dtype.itemsize

    def column(self, index: int) -> torch.Tensor:
        index = range(self.columns)[index]
        with safe_open(self.path, "pt") as file:
            return file.get_slice("hidden_states")[:, index : index + 1, :].squeeze(1)

    def states(self) -> torch.Tensor:
        with safe_open(self.path, "pt") as file:
            return file.get_tensor("hidden_states")


def relabelled(path: Path, meta: dict[str, str]) -> tuple[bytes, int]:
    """Return the first bytes of a file of hidden_states and token_ids with other metadata, and where its states begin; they are its end.

    Raises DumpError when it holds anything else, or has no room for the metadata.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        tree = json.loads(file.read(size))
        if tree.keys() != {"__metadata__", "hidden_states", "token_ids"}:
            raise unreadable(path, f"entries {sorted(tree)}, expected hidden_states and token_ids with their metadata")
        first, end = tree["hidden_states"]["data_offsets"]
        if 8 + size + end != os.fstat(file.fileno()).st_size:
            raise unreadable(path, f"states that end at byte {8 + size + end:,}, expected the file's end")
    return _head(path, {**tree, "__metadata__": meta}, size), 8 + size + first


def sort_header(path: Path) -> None:
    """Rewrite a file's header in place with sorted keys: the same content is then the same bytes.

    The safetensors package (0.4 to 0.7) writes its metadata in an order that differs from call to call.
    """
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        head = _head(path, json.loads(file.read(size)), size)
        file.seek(0)
        file.write(head)


def _head(path: Path, tree: dict, size: int) -> bytes:
    header = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    if len(header) > size:
        raise unreadable(path, f"a header of {size} bytes that takes {len(header)} when it is sorted")
    return size.to_bytes(8, "little") + header.ljust(size)
