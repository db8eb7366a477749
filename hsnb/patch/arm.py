"""Arm the capture inside a scheduler: three hooks in SGLang's own registry, nothing of SGLang edited.

Hooked (read in 0.5.17, 0.5.20 and 0.5.23): ModelRunner.load_model, after which the model is there and its body's forward is
wrapped on that one object; ForwardBatch.init_new, which alone sees a request's full length; Scheduler.get_next_batch_to_run,
after which `chunked_req` is the one prompt whose chunks go on: whatever else is half made was aborted, or starts again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import hsnb
from hsnb.images import image_tokens
from hsnb.patch.armed import Armed, ArmedFile, refuse
from hsnb.patch.bodies import body_config, check_boundaries, find_body
from hsnb.patch.capture import Capture
from hsnb.patch.modes import partial_sums, settled, unsupported
from hsnb.patch.settings import MIN_SGLANG, Settings, sglang_version, version_tuple, visible_env
from hsnb.patch.spool import dtype_name, remove_leftovers
from hsnb.patch.tap import Tap

log = logging.getLogger("sglang.hsnb")
_captures: list[Capture] = []  # of this process: one, or none
_LOADED = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
_SCHEDULED = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"


def register_hooks() -> None:
    """Register the hooks. Raises (and writes the refusal) when the settings are off or SGLang is too old."""
    spool = Path(os.environ["SGLANG_HS_DUMP_DIR"])
    try:
        settings = Settings.from_env()
        if version_tuple(sglang_version()) < MIN_SGLANG:
            raise ValueError(f"SGLang {sglang_version()}, expected {'.'.join(map(str, MIN_SGLANG))} or newer")
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except Exception as error:
        refuse(spool, f"{type(error).__name__}: {error}", sglang_version=sglang_version(), patch_version=hsnb.__version__)
        raise

    def after_load_model(result, runner, *args, **kwargs):
        try:
            if not runner.is_draft_worker:
                if missing := {_BATCH, _SCHEDULED} - HookRegistry._patched:  # SGLang only logs a target that it did not find
                    raise LookupError(f"{sorted(missing)} could not be hooked: this SGLang has other names than 0.5.17 to 0.5.23")
                _captures[:] = [arm(runner, settings)]
        except Exception as error:  # the server lives on; the client reads the refusal and goes no further
            log.exception("hsnb: not armed")
            refuse(
                settings.spool,
                f"{type(error).__name__}: {error}",
                rank=_tp_rank(),
                sglang_version=sglang_version(),
                patch_version=hsnb.__version__,
            )
        return result

    def after_init_new(result, cls, batch, *args, **kwargs):
        if _captures and result.forward_mode.is_extend():
            _captures[0].note_lengths(batch.reqs)
        return result

    def after_schedule(result, scheduler, *args, **kwargs):
        try:
            if _captures and (_captures[0].open or _captures[0].digests.open):
                batch, chunked = result.batch_to_run, scheduler.chunked_req
                _captures[0].let_go({req.rid for req in (*(batch.reqs if batch else ()), *([chunked] if chunked else ()))})
        except Exception:  # never the scheduler's trouble
            log.exception("hsnb: what was half made could not be cleared up")
        return result

    HookRegistry.register(_LOADED, after_load_model, HookType.AFTER)
    HookRegistry.register(_BATCH, after_init_new, HookType.AFTER)
    HookRegistry.register(_SCHEDULED, after_schedule, HookType.AFTER)


def _tp_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def arm(runner, settings: Settings) -> Capture:
    """Wrap the loaded model's body and write armed-{rank}.json. Raises LookupError or ValueError when it must not be armed."""
    args, config = looked_after(settled()), runner.model_config
    if why := unsupported(args):
        raise ValueError(why)
    body, spec = find_body(runner.model)
    if why := partial_sums(args, type(body).__name__, sglang_version()):
        raise ValueError(why)
    text = body_config(runner.model, body)
    num_layers = int(text.num_hidden_layers)
    check_boundaries(settings.boundaries, num_layers, spec, sglang_version())
    if other := {*body.layers_to_capture, *spec.asked(body)}:
        raise ValueError(f"the model already captures {sorted(other)} for another purpose: start the server without a drafter")

    inner = [b for b in settings.boundaries if b < num_layers]
    with spec.asking(body, inner):
        read_back = spec.asked(body)
    if read_back != inner or spec.asked(body):
        raise ValueError(f"layers_to_capture reads {read_back} after it was set to {inner}, and then {spec.asked(body)}")

    parallel = {"tp_rank": _tp_rank(), **{name: int(getattr(args, name, 1) or 1) for name in ("tp_size", "pp_size", "dp_size")}}
    settings.spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parallel["tp_rank"] == 0:
        remove_leftovers(settings.spool)
    config_file = Path(args.model_path) / "config.json"
    armed = Armed(
        state="armed",
        rank=parallel["tp_rank"],
        pid=os.getpid(),
        pid_created=_created(),
        port=int(args.port),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        sglang_version=sglang_version(),
        patch_version=hsnb.__version__,
        model_path=str(args.model_path),
        model_class=type(body).__name__,
        config_hash=hashlib.sha256(config_file.read_bytes()).hexdigest() if config_file.is_file() else "",
        num_layers=num_layers,
        hidden_size=int(text.hidden_size),
        dtype=dtype_name(config.dtype),
        boundaries=list(settings.boundaries),
        layers_to_capture=read_back,
        final=settings.final,
        format=settings.format,
        only=settings.only,
        env=visible_env(),
        server_args=_plain(args),
        **parallel,
    )
    writes, warmup = armed.rank == 0, not args.skip_server_warmup
    images = frozenset(image_tokens(config.hf_config.to_dict()))
    capture = Capture(body, settings, ArmedFile(settings.spool, armed), writes=writes, warmup=warmup, spec=spec, images=images)
    tapped = Tap(capture, body, settings.spool, settings.boundaries, num_layers, capture.lengths) if capture.writes else capture
    body.forward = tapped  # on this object only; nn.Module.__call__ and a direct .forward() both find it
    log.info("hsnb: armed %s at boundaries %s, final %s, into %s", armed.model_class, armed.boundaries, armed.final, settings.spool)
    return capture


def looked_after(args):
    """Return `args`, with nnodes 1 when whoever started the server reads what the ranks of all its nodes arm (hsnb.server.link).

    A server that was started over several nodes by hand is refused: its client would see the first node's ranks alone. The rows
    are on the first node all the same: it has the ranks 0..tp_size/nnodes-1 (read in 0.5.23: engine._calculate_rank_ranges).
    """
    if int(os.environ.get("SGLANG_HS_DUMP_NODES") or 1) == int(getattr(args, "nnodes", 1) or 1):
        args.nnodes = 1
    return args


def _created() -> float:
    import psutil

    return psutil.Process().create_time()


_SHOWN = (
    "tp_size", "pp_size", "dp_size", "dtype", "quantization", "context_length", "chunked_prefill_size", "max_prefill_tokens",
    "max_total_tokens", "max_running_requests", "disable_radix_cache", "disable_overlap_schedule", "attention_backend", "device",
    "mem_fraction_static", "kv_cache_dtype", "random_seed", "skip_server_warmup", "disable_cuda_graph", "revision", "load_format",
)  # fmt: skip


def _plain(args) -> dict:
    values = {name: getattr(args, name, None) for name in _SHOWN}
    return {k: v if isinstance(v, str | int | float | bool | type(None)) else str(v) for k, v in values.items()}
