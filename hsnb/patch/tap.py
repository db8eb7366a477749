"""The second tap, for the probe only: what layer k's attention really took in, which is norm_k(B_k).

It shares no code with the capture: a forward pre-hook on each attention module, rows found from the positions that the model
was given, and the norm's output for the last boundary. The client normalises the dump's B_k with the checkpoint's own layer-k
weight and compares: a column that is one layer off fits the neighbour's tap and not its own. Read in SGLang 0.5.17 to 0.5.23:
every decoder layer calls `self.self_attn(positions=..., hidden_states=..., forward_batch=...)` as a module.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file

log = logging.getLogger("sglang.hsnb")
PREFIX = "hsnb-probe-"


class Tap:
    """Wrap the body's (already wrapped) forward; acts on probe requests, on the writing rank."""

    def __init__(self, forward, body, spool: Path, boundaries: tuple[int, ...], num_layers: int, lengths: dict):
        self.forward, self.body, self.spool, self.num_layers, self.lengths = forward, body, spool, num_layers, lengths
        near = {j for b in (*boundaries, num_layers) for j in (b - 1, b, b + 1)}  # the neighbours give the margin
        self.layers = sorted(j for j in near if 0 <= j < num_layers)
        self.rows: dict[str, list[torch.Tensor]] = {}

    def __call__(self, input_ids, positions, forward_batch, *args, **kwargs):
        rids = forward_batch.rids or []
        if not (forward_batch.forward_mode.name == "EXTEND" and any(r.startswith(PREFIX) for r in rids)):
            return self.forward(input_ids, positions, forward_batch, *args, **kwargs)
        taken: dict[int, torch.Tensor] = {}
        hooks = [self.body.layers[j].self_attn.register_forward_pre_hook(self._before(j, taken), with_kwargs=True) for j in self.layers]
        hooks.append(self.body.norm.register_forward_hook(self._after_norm(taken)))
        wanted = {r: self.lengths.get(r, (0, 0)) for r in rids}  # the capture forgets a request when it is whole
        try:
            result = self.forward(input_ids, positions, forward_batch, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        try:
            self._keep(rids, positions, taken, wanted)
        except Exception:  # the probe then finds no tap and says so
            log.exception("hsnb: the second tap failed")
        return result

    @staticmethod
    def _before(j: int, taken: dict):
        def hook(module, args, kwargs):
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
            taken[j] = x.detach().clone()

        return hook

    def _after_norm(self, taken: dict):
        def hook(module, args, output):
            taken[self.num_layers] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    def _keep(self, rids: list[str], positions: torch.Tensor, taken: dict, lengths: dict) -> None:
        """Split the taken rows by request: a new one begins wherever the position does not go on from the row before."""
        p = positions.tolist()
        starts = [0, *(i for i in range(1, len(p)) if p[i] != p[i - 1] + 1), len(p)]
        if len(starts) - 1 != len(rids):  # two requests whose chunks happen to continue each other
            raise ValueError(f"{len(starts) - 1} runs of positions for {len(rids)} requests")
        stacked = torch.stack([taken[j] for j in (*self.layers, self.num_layers)], dim=1).cpu()  # [tokens, J + 1, H]
        for rid, first, end in zip(rids, starts, starts[1:], strict=False):
            if not rid.startswith(PREFIX):
                continue
            if p[first] == 0:
                self.rows[rid] = []
            self.rows.setdefault(rid, []).append(stacked[first:end])
            if p[end - 1] + 1 == lengths[rid][0]:
                self._write(rid, torch.cat(self.rows.pop(rid)))
        while len(self.rows) > 16:  # clients that went away
            del self.rows[next(iter(self.rows))]

    def _write(self, rid: str, rows: torch.Tensor) -> None:
        name = xxhash.xxh3_128_hexdigest(rid.encode())
        temporary = self.spool / f".{name}.tap.{os.getpid()}.tmp"
        meta = {"layers": json.dumps([*self.layers, self.num_layers]), "request_id": rid}
        save_file({"attention_inputs": rows.contiguous()}, temporary, meta)
        os.replace(temporary, self.spool / f"{name}.tap")
