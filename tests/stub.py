"""A stub of the server, and said to be one: it answers at once and writes real dumps, whose states follow from the token ids.

For what a real engine is too slow or too well-behaved for: thousands of samples, answers that never come, a full spool.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import torch

import hsnb
from hsnb.data import Prepared
from hsnb.errors import ServerError
from hsnb.patch.armed import Armed, ArmedFile, read_armed
from hsnb.patch.spool import SafetensorsRequest, bits, dtype_name
from hsnb.probe.receipt import write_receipt
from hsnb.server.client import Generated
from hsnb.table import ABOUT, DATA_FORMAT

HIDDEN = 8
BOUNDARIES = [1, 2]


def states_of(ids: list[int], columns: int, hidden: int) -> torch.Tensor:
    """Return [S, columns, H] float32: what the stub's model makes of token ids."""
    x = torch.tensor(ids, dtype=torch.float32)[:, None, None]
    k = torch.arange(1, columns + 1, dtype=torch.float32)[None, :, None]
    h = torch.arange(1, hidden + 1, dtype=torch.float32)[None, None, :]
    return torch.sin(x * k / 7 + h) * k


class StubServer:
    """What extraction uses of a Server. `behave(rid, ids)` may be awaited before an answer, and may raise or return a substitute."""

    attached = True
    deployment = None
    log = None

    def __init__(self, folder: Path, *, name: str = "stub", hidden: int = HIDDEN, boundaries=BOUNDARIES, **info):
        model = folder / "model"
        self.spool, self.url = folder / f"spool-{name}", f"http://{name}"
        self.spool.mkdir(parents=True, exist_ok=True)
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        self.boundaries, self.hidden = list(boundaries), hidden
        about = Armed(
            state="armed", sglang_version="0.5.23", patch_version=hsnb.__version__, model_path=str(model), model_class="Stub",
            config_hash="stub", num_layers=4, hidden_size=hidden, dtype="float32", boundaries=self.boundaries, final="pre",
            format="safetensors", only="hsnb-",
        )  # fmt: skip
        self.file = ArmedFile(self.spool, about)
        self.armed = read_armed(self.spool)
        self.info = {"max_total_num_tokens": 4096, "context_length": 4096, "chunked_prefill_size": 512, "max_running_requests": 16} | info
        self.alive, self.asked, self.most_in_flight, self.in_flight = True, [], 0, 0
        self.behave = None
        write_receipt(self, SimpleNamespace(verdict="PASS"))

    def running(self) -> bool:
        return self.alive

    @contextlib.asynccontextmanager
    async def client(self, **_):
        yield self

    async def arequest(self, method: str, path: str):
        if not self.alive:
            raise self.gone()
        return {}

    def gone(self) -> ServerError:
        return ServerError(got=f"{self.url}: ConnectError", expected="a server that listens", likely="it has ended", next="see its log")

    async def agenerate(self, ids: list[int], rid: str) -> Generated:
        if not self.alive:
            raise self.gone()
        self.asked.append(rid)
        self.in_flight += len(ids)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = await self.behave(rid, ids) if self.behave else None
            if answer is None:
                self.dump(rid, states_of(ids, len(self.boundaries) + 1, self.hidden), ids)
                await asyncio.sleep(0)
            return Generated(rid, "", [0], len(ids), 0) if answer is None else answer
        finally:
            self.in_flight -= len(ids)

    def dump(self, rid: str, states: torch.Tensor, ids: list[int]) -> None:
        """Write a dump as the plug-in does, or note its failure."""
        a = self.armed[0]
        meta = {"hsnb_format": "1", "boundaries": json.dumps(self.boundaries), "final": "pre", "dtype": "float32", "model": a.model_path}
        meta |= {"sglang_version": a.sglang_version, "patch_version": a.patch_version, "tp_rank": "0", "tp_size": "1"}
        request = SafetensorsRequest(rid, len(ids), "data", states.shape[1], states.shape[2], dtype_name(states.dtype), meta)
        try:
            request.begin(self.spool)
        except OSError as error:
            self.file.fail(rid, f"OSError: {error}")
            return
        request.put(0, bits(states), np.array(ids, np.int64))
        request.publish(self.spool)
        self.file.count("captured")


def make_data(folder: Path, lengths: list[int], **settings) -> Prepared:
    """Write a prepared data set of `lengths` tokens a row, token t of row r being (7 r + 3 t) % 101 + 1."""
    rows = [[(7 * r + 3 * t) % 101 + 1 for t in range(n)] for r, n in enumerate(lengths)]
    tree = {"input_ids": rows, "loss_mask": [[1] * n for n in lengths], "seq_len": lengths, "status": ["ok"] * len(rows)}
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(tree).with_format("torch").save_to_disk(str(folder))
    if not bars:
        datasets.enable_progress_bars()
    settings = {"source": "stub", "max_length": 4096, "too_long": "error", "limit": 0, "tokenizer": "t", "chat_template": "c"} | settings
    made = Prepared(folder, len(rows), sum(lengths), sum(lengths), 0, 0, 0, "data-hash", settings)
    about = {name: value for name, value in made.as_dict().items() if name not in ("path", "reused")}
    (folder / ABOUT).write_text(json.dumps({"format": DATA_FORMAT, **about}))  # for whoever finds the folder: verify, redo
    return made
