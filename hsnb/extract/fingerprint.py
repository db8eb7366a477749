"""What must be the same for two runs to write into one data set."""

from __future__ import annotations

from hsnb.data import Prepared
from hsnb.paths import resolve
from hsnb.weights import weights_hash

# Of the data's settings: how its samples were tokenised and cut. Its content and its order are in `data`.
LENGTH_POLICY = ("max_length", "too_long", "limit")
TOKENS = ("tokenizer", "chat_template")
# Flags of the server that change the numbers. Left out: sizes of batches and chunks, memory, ports (the probe covers those).
FLAGS = ("tp_size", "quantization", "kv_cache_dtype", "attention_backend", "load_format", "revision", "device")


def fingerprint(server, data: Prepared, layout: str, dtype: str) -> dict:
    """Return {item: value}, flat, so that the items which differ can be named. `dtype`: of the published files."""
    armed = server.armed[0]
    settings = {name: data.settings[name] for name in (*TOKENS, *LENGTH_POLICY) if name in data.settings}
    flags = {f"flag {name}": armed.server_args[name] for name in FLAGS if armed.server_args.get(name) is not None}
    return {
        "data": data.fingerprint,
        **settings,
        "model": armed.config_hash,
        "weights": weights_hash(resolve(armed.model_path)),
        "boundaries": list(armed.boundaries),
        "final": armed.final,
        "dtype": armed.dtype,
        "sglang": armed.sglang_version,
        "hsnb": armed.patch_version,
        "layout": layout,
        "published dtype": dtype,
        **flags,
    }
