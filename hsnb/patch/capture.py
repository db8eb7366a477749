"""Take the states of wanted requests out of the model body's own forward, and hand back exactly what it would have returned.

For a prefill batch with a wanted request in it, the body's `layers_to_capture` (the list behind SGLang's EAGLE-3) is borrowed
for one call: the engine's own path then completes tensor-parallel sums and gathers that a copy in the loop gets wrong. The
list is set directly, never through a setter (they shift ids, by version and model family). The state after the last layer
does not come out of the loop: it is the final norm's input, x + residual.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator

import torch

from hsnb.patch.armed import RING_FULL, Armed, ArmedFile
from hsnb.patch.batch import States
from hsnb.patch.bodies import Body
from hsnb.patch.digest import PROBE_PREFIX, Digests
from hsnb.patch.ring import Ring, ring_bytes
from hsnb.patch.rows import Known, Rows, Seen
from hsnb.patch.scribe import Begin
from hsnb.patch.settings import Settings
from hsnb.patch.spool import dtype_name
from hsnb.patch.writer import File, Writer

log = logging.getLogger("sglang.hsnb")
_MAX_KNOWN = 65536
_AUTOMATIC_ID = re.compile(r"[0-9a-f]{32}")


@contextlib.contextmanager
def never_the_models() -> Iterator[None]:
    """Log what keeps the armed file from being written (a disk that is dead or full): the forward and the threads go on."""
    try:
        yield
    except Exception:
        log.exception("hsnb: armed-0.json could not be written")


class Capture:
    """Wrap one model body's forward; `writes` on attention-TP rank 0 only (every rank must take part in the gathers)."""

    def __init__(self, body, settings: Settings, armed: ArmedFile, *, writes: bool, warmup: bool, spec: Body, images=frozenset()):
        self.body, self.settings, self.armed, self.writes, self.spec = body, settings, armed, writes, spec
        self.forward, self.images = body.forward, images
        self.num_layers = armed.armed.num_layers
        self.inner = [b for b in settings.boundaries if b < self.num_layers]
        self.lengths: OrderedDict[str, Known] = OrderedDict()  # by request id
        self.open: OrderedDict[str, File] = OrderedDict()  # prompts with rows to come; the writer has the others
        self.warmup_expected, self.warmup_id = warmup, None
        a = armed.armed
        self.telling = threading.Lock()  # of the armed file, for the forward and the thread that hears of failures
        self.digests = Digests(settings.spool, a.rank, [*map(str, settings.boundaries), "final"])
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
        self.writer = self.make_writer(a) if writes else None

    def make_writer(self, a: Armed) -> Writer:
        """Return the writer with its ring: four of the server's prefill chunks by default."""
        tokens = max(int(a.server_args.get("chunked_prefill_size") or 0), 0) or int(a.server_args.get("max_prefill_tokens") or 8192)
        token_bytes = (len(a.boundaries or self.settings.boundaries) + 1) * a.hidden_size * getattr(torch, a.dtype).itemsize + 8
        on_gpu = a.server_args.get("device") == "cuda"
        ring = Ring(ring_bytes(tokens, token_bytes), pin=on_gpu)
        return Writer(
            self.settings.spool,
            ring,
            self.armed,
            layout=self.settings.format,
            meta=self.meta,
            failed=lambda file, why: self.tell(file.begin.request_id, file.seen, why),
        )

    # -- which requests ------------------------------------------------------------------------------------------

    def note_lengths(self, reqs) -> None:
        """Remember each request's full length and whether it is the one that was here before."""
        for req in reqs:
            old = self.lengths.get(req.rid)
            seen = old.seen if old and old.seen.req() is req else Seen(weakref.ref(req), refused=self.not_text(req))
            self.lengths[req.rid] = Known(len(req.origin_input_ids), len(req.output_ids), req.to_finish is not None, seen)
            self.lengths.move_to_end(req.rid)
        while len(self.lengths) > _MAX_KNOWN:
            self.lengths.popitem(last=False)

    def not_text(self, req) -> str:
        """Return why a prompt is not text alone, "" when it is. An image's own ids are SGLang's, a placeholder's row no image's."""
        if getattr(req, "multimodal_inputs", None) is not None:
            return "the prompt has an image: only text is captured"
        if not self.images or self.images.isdisjoint(req.origin_input_ids):  # an empty set would look at every id, too
            return ""
        row, token = next((i, t) for i, t in enumerate(req.origin_input_ids) if t in self.images)
        return f"token id {token} at row {row} is the placeholder of an image: only text is captured, leave such prompts out"

    def kind(self, request_id: str) -> str:
        """Return data, health or warmup. The warm-up is the first request with an id that SGLang made up (it has no name)."""
        if request_id.startswith("HEALTH_CHECK"):
            return "health"
        if self.warmup_expected and _AUTOMATIC_ID.fullmatch(request_id):
            self.warmup_id, self.warmup_expected = request_id, False
        return "warmup" if request_id == self.warmup_id else "data"

    def wanted(self, batch) -> list[Rows]:
        """Return the rows of `batch` to capture; the others are counted once each.

        A retracted request runs its prompt again, with or without a token answered (with overlapped scheduling the first one
        may still be on its way): a prompt that ran whole is not taken a second time.
        """
        rows, offset = [], 0
        if batch.rids is None:  # a batch of SGLang's own, such as a kernel's warm-up
            return rows
        for rid, n, start in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
            kind, known = self.kind(rid), self.lengths[rid]
            row = Rows(rid, offset, int(start), int(n), kind)
            if not rid.startswith(self.settings.only):
                if not known.seen.counted:
                    self.count("other" if kind == "data" else kind)
                known.seen.counted = True
            elif known.aborted:
                self.fail([row], "SGLang gave the request up before it ran: its answer has the reason")
            elif known.seen.refused:
                self.fail([row], known.seen.refused)
            elif not (known.answered or known.seen.prefilled):
                rows.append(row)
            known.seen.prefilled |= row.start + row.n >= known.tokens
            offset += row.n
        return rows

    def refusal(self, batch) -> str:
        """Return why this batch cannot be captured, "" when it can."""
        mode = batch.forward_mode.name
        if mode != "EXTEND":
            return f"a {mode} batch is not captured: start the server without the flag that makes them (--enable-mixed-chunk, ...)"
        if getattr(batch, "can_run_tbo", False):
            return "two-batch overlap is not captured: start the server without --enable-two-batch-overlap"
        if torch.compiler.is_compiling():
            return "the forward is being compiled: start the server without --enable-torch-compile"
        if sum(batch.extend_seq_lens_cpu) != batch.input_ids.shape[0]:
            rows, tokens = batch.input_ids.shape[0], sum(batch.extend_seq_lens_cpu)
            return f"{rows} rows in a batch of {tokens} tokens: padded batches are not captured"
        return ""

    def let_go(self, live: set[str]) -> None:
        """Give up every unfinished prompt that is not in `live`: the batch to run and the prompt that SGLang is chunking.

        Called after each decision of the scheduler, so an aborted request's half-made file is gone at once, on an idle server
        too. A request that was retracted in the middle of its chunks is let go without a word: it starts again at row 0.
        """
        for rid in [r for r in {**self.open, **self.digests.open} if r not in live]:
            self.digests.open.pop(rid, None)
            if file := self.open.pop(rid, None):
                self.writer.give_up(file)
                req = self.lengths[rid].seen.req() if rid in self.lengths else None
                if req is None or req.finished_reason is not None:
                    why = f"aborted at row {file.next_row} of {file.begin.num_tokens}: its client gave it up or went away"
                    self.fail([Rows(rid, 0, 0, 0, file.begin.kind)], why)

    # -- one forward ---------------------------------------------------------------------------------------------

    def __call__(self, input_ids, positions, forward_batch, *args, **kwargs):
        """Run the body's forward; capture on the way when it is a prefill with a wanted request in it.

        The token ids are the batch's: a model with a vision tower (Kimi-K2.5) calls its body with embeddings and no ids.
        """
        rows = []
        if forward_batch.forward_mode.is_extend() and forward_batch.extend_seq_lens_cpu is not None:
            try:
                rows = self.wanted(forward_batch)
                if rows and (why := self.refusal(forward_batch)):
                    self.fail(rows, why)
                    rows = []
            except Exception as error:  # the model's own work goes on
                log.exception("hsnb: a batch was not understood")
                self.fail([Rows(rid, 0, 0, 0, "data") for rid in forward_batch.rids], f"the batch was not understood: {error!r}")
                rows = []
        if not rows:
            return self.forward(input_ids, positions, forward_batch, *args, **kwargs)
        states, result = self.borrow(input_ids, positions, forward_batch, *args, **kwargs)
        if self.writes or any(r.request_id.startswith(PROBE_PREFIX) for r in rows):
            self.store(rows, states, forward_batch.input_ids)
        return result

    def borrow(self, *args, **kwargs):
        """Return ({boundary or "final": [tokens, H]}, the forward's own result). A state that never came is left out."""
        states: dict = {}

        def before_norm(_, inputs):
            x, residual = inputs[0], inputs[1] if len(inputs) > 1 else None
            states[self.num_layers] = x.clone() if residual is None else x + residual  # a copy: the norm works in place

        hook = self.body.norm.register_forward_pre_hook(before_norm)
        try:
            with self.spec.asking(self.body, self.inner):
                result = self.forward(*args, **kwargs)
        finally:
            hook.remove()
        hidden, aux = result if self.inner and isinstance(result, tuple) else (result, [])
        if isinstance(aux, torch.Tensor):  # DeepSeek packs them as one [tokens, K * H]
            aux = aux.chunk(len(self.inner), dim=-1)
        if len(aux) == len(self.inner):
            states.update(zip(self.inner, aux, strict=True))
        if self.settings.final == "post":
            states["final"] = hidden
        elif self.num_layers in states:
            states["final"] = states[self.num_layers]
        return states, hidden

    def store(self, rows: list[Rows], states: dict, token_ids: torch.Tensor) -> None:
        """Hand each request's rows to the writer, copied on the model's own stream; a failure is the client's to hear, never the model's."""
        try:
            wanted = (*self.settings.boundaries, "final")
            if missing := [k for k in wanted if k not in states]:
                raise ValueError(f"none for {missing}")
            columns = States([states[k] for k in wanted])
            if columns.tokens != token_ids.shape[0]:
                raise ValueError(f"{columns.tokens} rows for {token_ids.shape[0]} tokens: scattered tokens are not captured")
            if (dtype := dtype_name(columns.dtype)) != self.meta["dtype"]:
                raise ValueError(f"states are {dtype}, the model is {self.meta['dtype']}")
            ids = token_ids.to(torch.int64, copy=True)  # [tokens]
            if self.writes and columns.on_gpu:
                self.writer.follow(ids.device)
        except Exception as error:
            if not all(self.lengths[r.request_id].seen.given_up for r in rows):  # not at every chunk of a prompt
                log.exception("hsnb: capture failed")
            self.fail(rows, f"the model gave no states: {error!r}")
            return
        files = []
        for r in rows:
            known = self.lengths[r.request_id]
            if known.seen.given_up:  # a later chunk of a prompt whose failure is told
                continue
            try:
                if r.request_id.startswith(PROBE_PREFIX):  # few and far between: here the forward may wait
                    self.digests.add(r.request_id, r.start, columns.rows(r.part), known.tokens)
                if self.writes:
                    files.append((self.file_of(r, columns), r))
            except Exception as error:
                self.fail([r], f"{type(error).__name__}: {error}")
        try:
            if files and (waited := self.writer.add(files, columns, ids)):
                self.count(RING_FULL, max(1, round(waited * 1000)))
        except Exception as error:
            late = [r for file, r in files if file.next_row < self.lengths[r.request_id].tokens]  # the others were handed over whole
            self.fail(late, f"{type(error).__name__}: {error}")
        for file, r in files:
            if file.next_row >= self.lengths[r.request_id].tokens:
                self.open.pop(r.request_id, None)

    def file_of(self, rows: Rows, states: States) -> File:
        """Return the dump that these rows go on, or a new one. SGLang chunks one prompt at a time, so few are ever open."""
        file = self.open.get(rows.request_id)
        if rows.start == 0:
            if file is not None:  # retracted in the middle of its chunks: it starts again
                self.writer.give_up(self.open.pop(rows.request_id))
            known, kinds = self.lengths[rows.request_id], (len(states.columns), states.hidden_size, self.meta["dtype"])
            file = self.open[rows.request_id] = File(Begin(rows.request_id, known.tokens, rows.kind, *kinds), known.seen)
        if file is None:
            raise ValueError(f"rows 0..{rows.start - 1} did not run: they came from the radix cache; use --disable-radix-cache")
        return file

    # -- what the client is told ---------------------------------------------------------------------------------

    def count(self, what: str, n: int = 1) -> None:
        """Add to a count of the armed file."""
        with self.telling, never_the_models():
            self.armed.count(what, n)

    def tell(self, request_id: str, seen: Seen | None, why: str) -> None:
        """Write a failure to the armed file, once for each request."""
        with self.telling:
            if not self.writes or not request_id.startswith(self.settings.only) or (seen and seen.given_up):
                return
            if seen:
                seen.given_up = True
            log.error("hsnb: request %s not captured: %s", request_id, why)
            with never_the_models():
                self.armed.fail(request_id, why)

    def fail(self, rows: list[Rows], why: str) -> None:
        """Give requests up and say why, once each; they are answered by the model all the same."""
        for r in rows:
            self.digests.open.pop(r.request_id, None)
            if file := self.open.pop(r.request_id, None):
                self.writer.give_up(file)
            self.tell(r.request_id, self.lengths[r.request_id].seen if r.request_id in self.lengths else None, why)
