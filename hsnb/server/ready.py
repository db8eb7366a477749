"""Wait until a server is ready, by HTTP; say in words why it is not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from hsnb.errors import HsnbError, ServerError
from hsnb.server import causes

POLL_S = 0.25
_REPORT_S = 0.5
_ASK_HEALTH_S = 10.0
_INFO_KEYS = (
    "version", "model_path", "served_model_name", "device", "dtype", "tp_size", "pp_size", "dp_size", "attn_dp_size", "enable_dp_attention",
    "context_length", "max_total_num_tokens", "max_req_input_len", "page_size", "max_running_requests", "chunked_prefill_size", "attention_backend", "quantization",
    "disable_radix_cache", "disable_cuda_graph", "disable_prefill_cuda_graph", "cuda_graph_backend_prefill", "disable_overlap_schedule",
    "speculative_algorithm", "enable_torch_compile", "skip_server_warmup",
)  # fmt: skip


@dataclass
class Progress:
    """Where the wait stands: the log, whom to tell, the limit in seconds."""

    log: Path
    tell: Callable[[float, str], None] | None
    limit_s: float
    started: float = 0.0
    _told: float = 0.0

    def seconds(self) -> float:
        """Return the seconds since the wait began."""
        return time.monotonic() - self.started

    def report(self, line: str = "") -> None:
        """Tell the elapsed seconds and the log's last meaningful line, at most twice a second."""
        if self.tell and time.monotonic() - self._told >= _REPORT_S:
            self._told = time.monotonic()
            self.tell(round(self.seconds(), 1), line or causes.last_meaningful(self.log) or "SGLang is being imported")


def pick_info(info: dict) -> dict:
    """Return the keys of /server_info that matter (of some 500)."""
    picked = {key: info[key] for key in _INFO_KEYS if key in info}
    config: Any = info.get("cuda_graph_config")
    if isinstance(config, dict) and isinstance(config.get("prefill"), dict):
        picked["prefill_cuda_graph"] = config["prefill"].get("backend")
    return picked


def wait_ready(url: str, progress: Progress, *, is_alive: Callable[[], bool], exit_record: Path) -> dict:
    """Return /server_info once the server is ready: it answers there and its warm-up request has come back.

    /model_info answers before the warm-up is back. The log's "fired up" line only says when it is worth believing HTTP;
    without it /health is asked now and then, which is refused at no cost while the server starts (and costs one token once).
    Raises ServerError when the server ends or the time is out.
    """
    progress.started = time.monotonic()
    listening: float | None = None
    asked = time.monotonic()
    port = httpx.URL(url).port or 80
    with httpx.Client(base_url=url, timeout=httpx.Timeout(5.0, connect=1.0), trust_env=False) as http:
        while True:
            if not is_alive():
                raise _ended(progress, exit_record)
            if line := causes.cannot_listen(progress.log, port):  # what answers there is another's
                raise ServerError(
                    got=f"the port was taken while the server loaded: {line}",
                    expected="a free port",
                    likely="another program began to listen or connected from there meanwhile",
                    next="start it again; server.port: 0 picks a port by itself",
                )
            if listening is None and _get(http, "/model_info", "/get_model_info") is not None:
                listening = progress.seconds()
            if listening is not None:
                warm = causes.is_fired_up(progress.log)
                if not warm and time.monotonic() - asked > _ASK_HEALTH_S:
                    asked = time.monotonic()
                    warm = _ok(http, "/health")
                if warm and (info := _get(http, "/server_info", "/get_server_info")):
                    return info
            if progress.seconds() > progress.limit_s:
                raise _too_slow(progress, listening)
            progress.report("" if listening is None else "the port answers; waiting for the warm-up request")
            time.sleep(POLL_S)


def _get(http: httpx.Client, *paths: str) -> dict | None:
    for path in paths:
        try:
            response = http.get(path)
            if response.status_code == 200:
                return response.json()
        except (httpx.HTTPError, ValueError):
            return None
    return None


def _ok(http: httpx.Client, path: str) -> bool:
    try:
        return http.get(path, timeout=25.0).status_code == 200  # SGLang waits 20 s for the one token
    except httpx.HTTPError:
        return False


def read_exit(exit_record: Path) -> dict:
    """Return the supervisor's exit record, empty when it wrote none."""
    try:
        return json.loads(exit_record.read_text())
    except (OSError, ValueError):
        return {}


def _ended(progress: Progress, exit_record: Path) -> HsnbError:
    record = read_exit(exit_record)
    code = record.get("code")
    cause = causes.find_cause(causes.read_lines(progress.log), code=code)
    how = (
        f"signal {record['signal']}"
        if record.get("signal")
        else f"exit code {code}"
        if code is not None
        else record.get("reason", "no exit code")
    )
    return ServerError(
        got=f"the server ended after {progress.seconds():.0f} s ({how}): {cause.words}",
        expected="a server that becomes ready",
        likely=cause.line or cause.words,
        next=cause.next,
    )


def _too_slow(progress: Progress, listening: float | None) -> HsnbError:
    if listening is not None:
        return ServerError(
            got=f"a hang in the warm-up: the weights are loaded and the port has answered since second {listening:.0f}, "
            f"but the warm-up request has not come back after {progress.seconds() - listening:.0f} s more",
            expected=f"its answer within ready_timeout_s ({progress.limit_s:.0f} s in all)",
            likely="ranks that wait for each other (NCCL), a kernel that hangs or still compiles, or a changed forward pass",
            next="NCCL_DEBUG=INFO under server.env and py-spy dump of the schedulers; on a first start only, a larger ready_timeout_s",
        )
    last = causes.last_meaningful(progress.log)
    return ServerError(
        got=f"the server is not ready after {progress.seconds():.0f} s and its port does not answer: "
        f"still loading ({last or 'no line in the log'})",
        expected=f"ready within ready_timeout_s ({progress.limit_s:.0f} s)",
        likely="a large model, a slow disk, or a machine that others use too",
        next="raise server.ready_timeout_s (1800 for large models)",
    )


def failure(error: HsnbError, log: Path) -> HsnbError:
    """Attach the log's last lines to `error` (as `log`, `log_tail` and a note under the traceback) and return it."""
    error.log, error.log_tail = log, causes.tail(log, 20)
    error.add_note(f"The last lines of {log}:\n{error.log_tail}")
    return error
