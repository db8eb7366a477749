"""How long the explorers take to open, and to show another sample, on a folder of 100,000 samples with every file there.

python -m benchmarks.explorers [--rows 100000] [--in DIR]    # real files, each of 24 tokens; a million bytes of index
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROWS, TOKENS, HIDDEN = 100_000, 24, 32
BOUNDARIES = (2, 4, 6)


def write_samples(path: Path, rows: int = ROWS, files: int | None = None) -> Path:
    """Lay out a prepared and extracted data set: hsnb.json, its index, the Arrow table, and the states of its first `files` rows.

    The files are hard links to one another where the file system has them: they are many, and small.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset
    from safetensors.torch import save_file

    from hsnb.table import INDEX

    ids, mask = list(range(10, 10 + TOKENS)), [0] * (TOKENS // 2) + [1] * (TOKENS - TOKENS // 2)
    table = pa.table({"input_ids": pa.array([ids] * rows), "loss_mask": pa.array([mask] * rows), "seq_len": np.full(rows, TOKENS)})
    Dataset(table).with_format("torch").save_to_disk(str(path))
    (path / "hidden_states").mkdir()
    first = path / "hidden_states" / "hs_0.safetensors"
    states = torch.randn(TOKENS, len(BOUNDARIES) + 1, HIDDEN).bfloat16()
    save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, first)
    data = first.read_bytes()
    for row in range(1, rows if files is None else files):
        if row % 30_000:  # an inode has so many links and no more
            os.link(first, first.with_name(f"hs_{row}.safetensors"))
        else:
            first = first.with_name(f"hs_{row}.safetensors")
            first.write_bytes(data)
    about = {"hsnb_format": 1, "layout": "speculators", "boundaries": list(BOUNDARIES), "final": "pre", "model": str(path / "no-model")}
    (path / "hsnb.json").write_text(json.dumps(about))
    lengths = np.full(rows, TOKENS)
    pq.write_table(pa.table({"length": lengths, "masked": lengths // 2, "ok": np.ones(rows, bool)}), path / INDEX)
    return path


class Opened:
    """The files below a folder that this process opens, and the folders that it lists, from `start()` on (by Python's audit events)."""

    def __init__(self, folder: Path):
        self.folder, self.on = str(folder), False
        self.files: list[str] = []
        self.listed: list[str] = []
        sys.addaudithook(self._hook)  # there is no way to take one off again

    def start(self) -> Opened:
        """Count from now on, from nothing."""
        self.files, self.listed, self.on = [], [], True
        return self

    def _hook(self, event: str, args: tuple) -> None:
        if not self.on or event not in ("open", "os.listdir", "os.scandir") or not isinstance(args[0], str | os.PathLike):
            return
        path = os.fspath(args[0])
        if isinstance(path, str) and path.startswith(self.folder):
            (self.files if event == "open" else self.listed).append(path)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--in", dest="folder", type=Path, help="where the folder is made (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        path = write_samples(Path(temporary) / "data", args.rows)
        begin = time.perf_counter()
        from hsnb import widgets
        from hsnb.health import examine

        rows = [("import", time.perf_counter() - begin, 0, 0)]
        opened = Opened(path)

        def measure(name: str, what):
            opened.start()
            begin = time.perf_counter()
            result = what()
            rows.append((name, time.perf_counter() - begin, len(opened.files), len(opened.listed)))
            return result

        explorer = measure("dumps: open", lambda: widgets.dumps(path))
        measure("dumps: the last sample", lambda: setattr(explorer.controls["sample"], "value", explorer.controls["sample"].max))
        measure("dumps: another boundary", lambda: setattr(explorer.controls["boundary"], "value", 2))
        measure("monitor: open", lambda: widgets.monitor(path))
        measure("health: 32 samples", lambda: widgets.health(examine(path, samples=32)))
        print(f"{args.rows:,} samples\n\n| what | s | files opened | folders listed |\n| --- | --- | --- | --- |")
        for name, seconds, files, listed in rows:
            print(f"| {name} | {seconds:.2f} | {files} | {listed} |")


if __name__ == "__main__":
    main()
