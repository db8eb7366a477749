"""Write a dense model's folder as a GGUF file: matrices quantised, norms in float32, under the names that llama.cpp gives them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from safetensors import safe_open


def write_gguf(folder: Path, file: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write the Qwen2 model in `folder` to `file`, its matrices in `kind`. There is no tokenizer in it."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", "np") as weights:
        for name in weights.keys():  # noqa: SIM118 (no mapping)
            stem, suffix = name.rsplit(".", 1)
            tensor, given = weights.get_tensor(name), f"{names.get_name(stem)}.{suffix}"
            if tensor.ndim == 1:
                writer.add_tensor(given, tensor)
            else:
                writer.add_tensor(given, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
