"""Run in .venv-trainers: read a folder with its tool's own classes and save what they return. `python trainers_readers.py TOOL FOLDER OUT`."""

import sys
import warnings
from pathlib import Path

import torch

WIDTH, MAX = 16, 64


def speculators(folder):
    """speculators 0.9: data set, EAGLE-3's shift and collate function, one batch of everything."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    warnings.simplefilter("error", UserWarning)  # it drops samples with a warning
    data = ArrowDataset(MAX, folder, on_missing="raise")
    items = [data[k] for k in range(len(data))]
    batch = CollateFn(MAX, WIDTH, preprocess=shift_batch)(items)
    return {"items": [{k: v for k, v in item.items() if torch.is_tensor(v)} for item in items], "dropped": batch["error_records"],
            "batch_ids": batch["input_ids"], "lengths": data.approx_lengths, "vocabulary": vocabulary(folder)}  # fmt: skip


def vocabulary(folder):
    """speculators 0.9's own mapping from token_freq.pt, beside the files that it would take instead."""
    import numpy as np
    from speculators.train.cli import _load_mappings
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    sizes = [int(p.stem.split("-")[1]) for p in folder.glob("d2t-*.npy")]
    if not sizes:
        return None
    (size,), counts = sizes, torch.load(folder / "token_freq.pt", weights_only=True)
    t2d = np.load(folder / f"t2d-{size}.npy")
    d2t, t2d = build_vocab_mappings_from_distribution(counts, size, len(t2d))
    loaded = _load_mappings(folder / f"d2t-{size}.npy", folder / f"t2d-{size}.npy", size)
    return {"own": [d2t, t2d], "loaded": [torch.as_tensor(x) for x in loaded[:2]], "size": loaded[2]}


def specforge(folder):
    """SpecForge 0.2: offline reader (it validates each file), loader, normaliser, collator, and its count of tokens under the mask."""
    from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
    from specforge.training.vocab_mapping import count_effective_feature_tokens

    normalise, items, raw, names = build_offline_normalizer(MAX), [], [], []
    for ref in OfflineManifestReader(str(folder), max_len=MAX, validate_files=True):
        path = ref.feature_store_uri.removeprefix("file://")
        names.append(str(Path(path).relative_to(folder)))
        raw.append(load_feature_file(path))
        items.append(normalise(dict(raw[-1])))
    batch = build_offline_collator()(items)
    return {"items": items, "raw": raw, "names": names, "batch": {k: v for k, v in batch.items() if torch.is_tensor(v)},
            "counts": dict(count_effective_feature_tokens(str(folder))), "config": config(folder)}  # fmt: skip


def config(folder):
    """SpecForge 0.2's own reading of the specforge.yaml that the printed command names."""
    from specforge.config import load_config

    config = load_config(str(folder / "specforge.yaml"))
    return {"model": config.model.model_dump(), "data": config.data.model_dump(), "strategy": config.training.strategy}


if __name__ == "__main__":
    tool, folder, out = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.save(globals()[tool](folder), out)
