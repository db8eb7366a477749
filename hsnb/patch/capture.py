"""Take the states of wanted requests out of the model body's own forward, and hand back exactly what it would have returned.

For a prefill batch with a wanted request in it, the body's `layers_to_capture` (the list behind SGLang's EAGLE-3) is borrowed
for one call: the engine's own path then completes tensor-parallel sums and gathers that a copy in the loop gets wrong. The
list is set directly, never through a setter (they shift ids, by version and model family). The state after the last layer
does not come out of the loop: it is the final norm's input, x + residual.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from dataclasses import dataclass

import torch

from hsnb.patch.armed import ArmedFile
from hsnb.patch.settings import Settings
from hsnb.patch.spool import LAYOUTS, Request, dtype_name

log = logging.getLogger("sglang.hsnb")
_MAX_OPEN = 64  # prompts begun and not whole; SGLang chunks one at a time, more means that clients went away
_MAX_KNOWN = 65536
_AUTOMATIC_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Rows:
    """Where one request's rows lie in a batch: `offset` there, `start` in its prompt, `n` of them."""

    request_id: str
    offset: int
    start: int
    n: int
    kind: str


class Capture:
    """Wrap one model body's forward; `writes` on attention-TP rank 0 only (every rank must take part in the gathers)."""

    def __init__(self, body, settings: Settings, armed: ArmedFile, *, writes: bool, warmup: bool):
        self.body, self.settings, self.armed, self.writes = body, settings, armed, writes
        self.forward = body.forward
        self.num_layers = armed.armed.num_layers
        self.inner = [b for b in settings.boundaries if b < self.num_layers]
        self.lengths: OrderedDict[str, tuple[int, int]] = OrderedDict()  # request id: prompt tokens, tokens answered so far
        self.open: OrderedDict[str, Request] = OrderedDict()
        self.warmup_expected, self.warmup_id = warmup, None
        a = armed.armed
        self.meta = {
            "hsnb_format": "1",
            "boundaries": str(list(settings.boundaries)),
            "final": settings.final,
            "dtype": a.dtype,
            "model": a.model_path,
            "sglang_version": a.sglang_version,
            "patch_version": a.patch_version,
            "tp_rank": str(a.tp_rank),
            "tp_size": str(a.tp_size),
        }

    # -- which requests ------------------------------------------------------------------------------------------

    def note_lengths(self, reqs) -> None:
        """Remember each request's full length: a batch holds only the chunk that it runs."""
        for req in reqs:
            self.lengths[req.rid] = (len(req.origin_input_ids), len(req.output_ids))
            self.lengths.move_to_end(req.rid)
        while len(self.lengths) > _MAX_KNOWN:
            self.lengths.popitem(last=False)

    def kind(self, request_id: str) -> str:
        """Return data, health or warmup. The warm-up is the first request with an id that SGLang made up (it has no name)."""
        if request_id.startswith("HEALTH_CHECK"):
            return "health"
        if self.warmup_expected and _AUTOMATIC_ID.fullmatch(request_id):
            self.warmup_id, self.warmup_expected = request_id, False
        return "warmup" if request_id == self.warmup_id else "data"

    def wanted(self, batch) -> list[Rows]:
        """Return the rows of `batch` to capture; the others are counted once each."""
        rows, offset = [], 0
        for rid, n, start in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
            kind = self.kind(rid)
            if not rid.startswith(self.settings.only):
                if start == 0:
                    self.armed.count("other" if kind == "data" else kind)
            elif self.lengths.get(rid, (0, 0))[1] == 0:  # else: prefilled again after a retraction, published before
                rows.append(Rows(rid, offset, int(start), int(n), kind))
            offset += n
        return rows

    def refusal(self, batch, input_ids) -> str:
        """Return why this batch cannot be captured, "" when it can."""
        mode = batch.forward_mode.name
        if mode != "EXTEND":
            return f"a {mode} batch is not captured: start the server without the flag that makes them (--enable-mixed-chunk, ...)"
        if getattr(batch, "can_run_tbo", False):
            return "two-batch overlap is not captured: start the server without --enable-two-batch-overlap"
        if torch.compiler.is_compiling():
            return "the forward is being compiled: start the server without --enable-torch-compile"
        if sum(batch.extend_seq_lens_cpu) != input_ids.shape[0]:
            return f"{input_ids.shape[0]} rows in a batch of {sum(batch.extend_seq_lens_cpu)} tokens: padded batches are not captured"
        return ""

    # -- one forward ---------------------------------------------------------------------------------------------

    def __call__(self, input_ids, positions, forward_batch, *args, **kwargs):
        """Run the body's forward; capture on the way when it is a prefill with a wanted request in it."""
        rows = []
        if forward_batch.forward_mode.is_extend() and forward_batch.extend_seq_lens_cpu is not None:
            rows = self.wanted(forward_batch)
            if rows and (why := self.refusal(forward_batch, input_ids)):
                self.fail(rows, why)
                rows = []
        if not rows:
            return self.forward(input_ids, positions, forward_batch, *args, **kwargs)
        states, result = self.borrow(input_ids, positions, forward_batch, *args, **kwargs)
        if self.writes:
            self.store(rows, states, input_ids)
        return result

    def borrow(self, *args, **kwargs):
        """Return ({boundary or "final": [tokens, H]}, the forward's own result)."""
        states: dict = {}

        def before_norm(_, inputs):
            x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
            states[self.num_layers] = x.clone() if residual is None else x + residual  # a copy: the norm works in place

        hook = self.body.norm.register_forward_pre_hook(before_norm)
        own, self.body.layers_to_capture = self.body.layers_to_capture, list(self.inner)
        try:
            result = self.forward(*args, **kwargs)
        finally:
            self.body.layers_to_capture = own
            hook.remove()
        if not self.inner:
            hidden, aux = result, []
        else:
            hidden, aux = result
            if isinstance(aux, torch.Tensor):  # DeepSeek packs them as one [tokens, K * H]
                aux = aux.chunk(len(self.inner), dim=-1)
        states.update(zip(self.inner, aux, strict=True))
        if self.settings.final == "post":
            states["final"] = hidden
        elif self.num_layers in states:
            states["final"] = states[self.num_layers]
        return states, hidden

    def store(self, rows: list[Rows], states: dict, input_ids) -> None:
        """Copy each request's rows to the host and put them into its dump; a failure is the client's to hear, never the model's."""
        try:
            columns = [states[k] for k in (*self.settings.boundaries, "final")]
            stacked = torch.stack(columns, dim=1)  # [tokens, K + 1, H]: a request's rows are one contiguous piece
            if stacked.shape[0] != input_ids.shape[0]:
                raise ValueError(f"{stacked.shape[0]} rows for {input_ids.shape[0]} tokens: scattered tokens are not captured")
        except Exception as error:
            log.exception("hsnb: capture failed")
            self.fail(rows, f"the model gave no states: {error!r}")
            return
        for r in rows:
            part = slice(r.offset, r.offset + r.n)
            try:
                self.put(r, stacked[part].cpu(), input_ids[part].cpu())
            except Exception as error:
                log.exception("hsnb: request %s failed", r.request_id)
                self.fail([r], f"{type(error).__name__}: {error}")

    def put(self, rows: Rows, states: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Put [n, K + 1, H] rows in place; publish when the prompt is whole."""
        request = self.open.get(rows.request_id)
        if rows.start == 0 and request is not None:  # retracted in the middle of its chunks: it starts again
            self.open.pop(rows.request_id).discard()
            request = None
        if request is None:
            if rows.start != 0:
                raise ValueError(f"rows 0..{rows.start - 1} did not run: they came from the radix cache; use --disable-radix-cache")
            request = self.begin(rows, states)
        request.put(rows.start, states, token_ids)
        if request.whole:
            del self.open[rows.request_id]
            self.lengths.pop(rows.request_id, None)
            try:
                request.publish(self.settings.spool)
            except BaseException:
                request.discard()
                raise
            self.armed.count("captured")

    def begin(self, rows: Rows, states: torch.Tensor) -> Request:
        """Open a request's dump; the oldest unfinished one is given up when too many are open (its client went away)."""
        while len(self.open) >= _MAX_OPEN:
            rid, oldest = self.open.popitem(last=False)
            oldest.discard()
            self.armed.fail(rid, f"given up at row {oldest.next_row} of {oldest.num_tokens}: the rest of the prompt never ran")
        num_tokens = self.lengths[rows.request_id][0]
        request = LAYOUTS[self.settings.format](
            rows.request_id, num_tokens, rows.kind, states.shape[1], states.shape[2], states.dtype, self.meta
        )
        if dtype_name(states.dtype) != self.meta["dtype"]:
            raise ValueError(f"states are {dtype_name(states.dtype)}, the model is {self.meta['dtype']}")
        request.begin(self.settings.spool)
        self.open[rows.request_id] = request
        return request

    def fail(self, rows: list[Rows], why: str) -> None:
        """Give requests up and write why to the armed file; they are answered by the model all the same."""
        if not self.writes:
            return
        for r in rows:
            if request := self.open.pop(r.request_id, None):
                request.discard()
            log.error("hsnb: request %s not captured: %s", r.request_id, why)
            self.armed.fail(r.request_id, why)
