"""Small folders of every layout, written as docs and the tools' own sources say, by code that shares nothing with hsnb's writers."""

import json
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

H, AUX = 16, 3
LENGTHS = (5, 9, 1, 12)


def samples(seed=0, lengths=LENGTHS):
    """Return [(ids int64 [S], mask int64 [S], states bfloat16 [S, AUX + 1, H])]."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for n in lengths:
        ids = torch.randint(0, 1000, (n,), generator=rng)
        mask = torch.randint(0, 2, (n,), generator=rng)
        made.append((ids, mask, torch.randn(n, AUX + 1, H, generator=rng).to(torch.bfloat16)))
    return made


def write_speculators(folder: Path, made, metadata=None):
    from datasets import Dataset

    rows = [{"input_ids": i.tolist(), "loss_mask": m.tolist(), "seq_len": len(i)} for i, m, _ in made]
    Dataset.from_list(rows).with_format("torch").save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for row, (ids, _, states) in enumerate(made):
        save_file({"hidden_states": states, "token_ids": ids}, folder / f"hidden_states/hs_{row}.safetensors", metadata=metadata)
    torch.save({1: 2}, folder / "token_freq.pt")


def write_speculators_pt(folder: Path, made, layer_ids=None):
    folder.mkdir(parents=True, exist_ok=True)
    for k, (ids, mask, states) in enumerate(made):
        parts = [c.clone() for c in states.unbind(1)]
        torch.save({"input_ids": ids, "hidden_states": parts, "loss_mask": mask}, folder / f"data_{k}.pt")
    if layer_ids:
        tree = {"version": "2.0", "hidden_states": {"layer_ids": layer_ids}, "format": {"file_pattern": "data_{idx}.pt"}}
        (folder / "data_config.json").write_text(json.dumps(tree))


def write_specforge(folder: Path, made, group=2000):
    for k, (ids, mask, states) in enumerate(made):
        g = k // group * group
        inner = folder / f"rows_{g}-{g + group}"
        inner.mkdir(parents=True, exist_ok=True)
        tree = {
            "input_ids": ids,
            "loss_mask": mask,
            "aux_hidden_state": states[:, :-1].flatten(1)[None].clone(),
            "hidden_state": states[:, -1][None].clone(),
        }
        torch.save(tree, inner / f"data_{k}.ckpt")


def write_model_optimizer(folder: Path, made, prenorm=None, mask=True):
    folder.mkdir(parents=True, exist_ok=True)
    for k, (ids, loss_mask, states) in enumerate(made):
        tree = {
            "input_ids": ids,
            "hidden_states": states[:, -1].clone(),
            "aux_hidden_states": states[:, :-1].flatten(1).clone(),
            "conversation_id": f"conv-{k}",
        }
        tree |= {"loss_mask": loss_mask} if mask else {}
        tree |= {} if prenorm is None else {"hidden_states_prenorm": prenorm}
        torch.save(tree, folder / f"conv-{k}.pt")


def write_deepspec(folder: Path, made, layer_ids=(1, 14, 26)):
    folder.mkdir(parents=True, exist_ok=True)
    shard, index = b"", b""
    for k, (ids, mask, states) in enumerate(made):
        offsets = []
        for part in (
            ids.to(torch.int32),
            torch.ones_like(ids).to(torch.uint8),
            mask.to(torch.uint8),
            states[:, :-1].contiguous().view(torch.int16),
            states[:, -1].contiguous().view(torch.int16),
        ):
            offsets.append(len(shard))
            shard += part.numpy().tobytes()
        index += struct.pack("<QIIQQQQQ", k, 0, len(ids), *offsets)
    (folder / "shard-00000.bin").write_bytes(shard)
    (folder / "samples.idx").write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": len(made),
        "num_shards": 1,
        "target_layer_ids": list(layer_ids),
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": made[0][2].shape[-1],
        "target_model_name_or_path": "some/model",
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_req(folder: Path, made):
    """The first deployment's folders: no key of ours in metadata.json."""
    for k, (ids, _, states) in enumerate(made):
        inner = folder / f"req_{k}"
        inner.mkdir(parents=True)
        for c in range(states.shape[1] - 1):
            torch.save(states[:, c].clone(), inner / f"aux_{c}.pt")
        torch.save(states[:, -1].clone(), inner / "final.pt")
        (inner / "metadata.json").write_text(json.dumps({"request_id": f"r{k}", "num_tokens": len(ids), "token_ids": ids.tolist()}))


def write_connector(folder: Path, made):
    folder.mkdir(parents=True, exist_ok=True)
    for k, (ids, _, states) in enumerate(made):
        save_file({"hidden_states": states, "token_ids": ids}, folder / f"cmpl-{k}-0.safetensors")


WRITERS = {
    "speculators": write_speculators,
    "speculators-0.4": write_speculators_pt,
    "specforge": write_specforge,
    "model-optimizer": write_model_optimizer,
    "deepspec": write_deepspec,
    "spool-pt": write_req,
    "vllm": write_connector,
}
