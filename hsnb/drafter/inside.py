"""Inside a server with a drafter: write down what the drafter is really fed and what weights it really has, for the client to read.

Opt-in by SGLANG_HS_DRAFTER_DIR (unset: no trace); no state is captured, nothing the server computes is touched. Hooked, and read
in SGLang 0.5.17, 0.5.20 and 0.5.23: ModelRunner.init_attention_backends of the target, after which its layers_to_capture are set,
and ModelRunner.load_model of the draft, after which its weights are loaded: SGLang skips names that it does not know in silence.

With SGLANG_HS_DRAFTER_WAIT=SECONDS the draft's load first waits for its weights: a server may start, import and load its target
while the drafter that it is going to serve (its config.json is there) is still being trained.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

log = logging.getLogger("sglang.hsnb")
VARIABLE = "SGLANG_HS_DRAFTER_DIR"
WAIT = "SGLANG_HS_DRAFTER_WAIT"
_LOADED = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
_BACKENDS = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"


def register_hooks() -> None:
    """Register the two hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    folder = Path(os.environ[VARIABLE])

    def guarded(tell):
        def after(result, runner, *args, **kwargs):
            try:
                tell(folder, runner)
            except Exception:  # the server is not to suffer; the client finds no file, and says so
                log.exception("hsnb: the drafter is not written down")
            return result

        return after

    if wait_s := float(os.environ.get(WAIT) or 0):
        HookRegistry.register(_LOADED, lambda runner, *args, **kwargs: _wait_for_weights(runner, wait_s), HookType.BEFORE)
    HookRegistry.register(_LOADED, guarded(_tell_draft), HookType.AFTER)
    HookRegistry.register(_BACKENDS, guarded(_tell_target), HookType.AFTER)


def _wait_for_weights(runner, wait_s: float) -> None:
    """Return when the draft's folder has a safetensors file. Raises TimeoutError after `wait_s` seconds, which ends the server."""
    folder, begin = Path(runner.model_config.model_path), time.monotonic()
    while runner.is_draft_worker and not any(folder.glob("*.safetensors")):
        if time.monotonic() - begin > wait_s:
            raise TimeoutError(f"no *.safetensors in {folder} within {wait_s:g} s ({WAIT})")
        time.sleep(0.1)


def _tell_target(folder: Path, runner) -> None:
    """Write target-{rank}.json: the boundaries that the target captures for its drafter, as its body has them now."""
    if runner.is_draft_worker:
        return
    bodies = [m for m in runner.model.modules() if getattr(m, "layers_to_capture", None)]
    body = bodies[0] if bodies else None
    config = getattr(runner, "spec_aux_config", None)
    about = {
        "model_class": type(runner.model).__name__,
        "layers_to_capture": list(body.layers_to_capture) if body else [],
        "num_layers": len(body.layers) if body else 0,
        "ids": _plain(getattr(config, "eagle_aux_hidden_state_layer_ids", None)),
        "use_aux": bool(getattr(config, "eagle_use_aux_hidden_state", False)),
    }
    _write(folder, "target", runner, about)


def _tell_draft(folder: Path, runner) -> None:
    """Write draft-{rank}.json: the draft model's class and options, and the sum of |w| of every parameter it holds now."""
    if not runner.is_draft_worker:
        return
    body = getattr(runner.model, "model", runner.model)
    hot = getattr(runner.model, "hot_token_id", None)
    about = {
        "model_class": type(runner.model).__name__,
        "path": str(runner.model_config.model_path),
        "norm_before_fc": getattr(body, "input_norm", None) is not None,
        "fc_norm": getattr(body, "fc_norm", None) is not None,
        "norm_output": bool(getattr(body, "norm_output", False)),
        "num_aux": int(getattr(body, "num_aux_hidden_states", 0)),
        "hot_tokens": 0 if hot is None else len(hot),
        "sums": {name: float(p.detach().double().abs().sum()) for name, p in runner.model.named_parameters()},
    }
    _write(folder, "draft", runner, about)


def _write(folder: Path, what: str, runner, about: dict) -> None:
    from sglang.srt.runtime_context import get_parallel
    from sglang.version import __version__

    rank = int(get_parallel().tp_rank)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = {"pid": os.getpid(), "sglang_version": __version__, "rank": rank, "dtype": str(runner.model_config.dtype), **about}
    temporary = folder / f".{what}-{rank}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(about, indent=1))
    os.replace(temporary, folder / f"{what}-{rank}.json")
    log.info("hsnb: wrote %s", folder / f"{what}-{rank}.json")


def _plain(ids):
    return list(ids) if isinstance(ids, list | tuple) else ids
