"""Run a capture: vLLM in a process group of its own, watched, with a log, and every failure told in words."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from hsnb.errors import DataError, HsnbError, ServerError
from hsnb.paths import write_json
from hsnb.server import causes as logs
from hsnb.server.command import gpus
from hsnb.server.launch import owners, spawn_supervisor
from hsnb.server.ready import failure, read_exit
from hsnb.server.state import STOP_LIMIT_S
from hsnb.server.supervisor import Job
from hsnb.vllm.captured import Captured
from hsnb.vllm.causes import find_cause
from hsnb.vllm.environment import build_env, vllm_python
from hsnb.vllm.request import CPU_CACHE_BYTES, build, check_cpu

DRIVER = Path(__file__).parent / "inside" / "driver.py"
POLL_S = 0.2
_OWN = re.compile(r"capture\.json|request\.json|failure\.json|vllm\.log|vllm\.exit\.json|prompt-\d+\.safetensors|raw")
_SAID = re.compile(r"^hsnb: (.+)$")


def capture(
    model: str | Path,
    prompts: Sequence[Sequence[int]],
    ids: Sequence[int],
    *,
    dtype: str = "float32",
    out: str | Path,
    way: str = "connector",
    max_new_tokens: int = 0,
    progress: Callable[[float, str], None] | None = None,
    tensor_parallel_size: int = 1,
    timeout_s: float = 1800.0,
    keep_raw: bool = False,
    cpu_cache_bytes: int = CPU_CACHE_BYTES,
) -> Captured:
    """Capture the states of `prompts` (token ids) with vLLM, started once and ended before this returns.

    `ids` are vLLM's own setting `eagle_aux_hidden_state_layer_ids`, as its users give it. `way`: "connector" is vLLM's own
    extraction (extract_hidden_states and a KV connector), "worker" reads the same states by forward hooks, as a cross-check.
    One prompt runs at a time, in eager mode and without the prefix cache. `progress(seconds, line)` is called about twice a second.

    Writes to `out`: prompt-{n}.safetensors each with hidden_states [S, ids, H] in `dtype` (ids ascending, whatever the order
    given) and token_ids int64 [S], labelled with the boundaries these are; capture.json (versions, logprobs, answers),
    request.json and vllm.log. `keep_raw` keeps the connector's own files under raw/. An earlier capture there is replaced.

    Raises BoundaryError, ParamsError, ModelError or DataError before anything is started; ServerError when vLLM is not installed
    (one line: make setup-vllm), does not start, fails, or takes longer than `timeout_s`: with the likely cause and the log's end.
    Nothing of vLLM outlives this call, nor this process, however that ends.
    """
    model, out = Path(model).resolve(), Path(out).resolve()
    request = build(
        model, prompts, ids, dtype=dtype, out=out, way=way, max_new_tokens=max_new_tokens, tp=tensor_parallel_size,
        keep_raw=keep_raw, cpu_cache_bytes=cpu_cache_bytes,
    )  # fmt: skip
    on_cpu = not gpus()
    if on_cpu:
        check_cpu(model)
    python = vllm_python()
    clear(out)
    write_json(out / "request.json", asdict(request))
    log = out / "vllm.log"
    log.write_text(f"# hsnb: {python} {DRIVER} {out / 'request.json'}\n")
    job = Job(
        command=[str(python), str(DRIVER), str(out / "request.json")],
        log=str(log),
        exit_record=str(out / "vllm.exit.json"),
        state=str(out / ".vllm.state.json"),
        spool="",
        port=0,  # it listens to nothing
        owners=owners(),
    )
    supervisor = spawn_supervisor(job, build_env(on_cpu=on_cpu))
    try:
        _wait(supervisor, log, timeout_s, progress)
    except HsnbError as error:
        _end(supervisor)
        raise failure(error, log) from error.__cause__
    finally:  # an interrupt, too, leaves nothing behind
        _end(supervisor)
    if not (out / "capture.json").exists():
        raise failure(_failed(out, log), log)
    return Captured.load(out)


def clear(out: Path) -> None:
    """Make `out`, or remove what an earlier capture left there. Raises DataError when it holds anything else."""
    if out.is_dir() and (foreign := [p.name for p in out.iterdir() if not _OWN.fullmatch(p.name) and not p.name.startswith(".")]):
        raise DataError(
            got=f"{out} holds {', '.join(sorted(foreign)[:3])}",
            expected="a new folder, an empty one, or an earlier capture's",
            likely="a data folder was named",
            next="name another folder",
        )
    out.mkdir(parents=True, exist_ok=True)
    for path in [*out.glob("*.json"), *out.glob("*.safetensors"), *out.glob("raw/*"), *out.glob(".prompt-*.tmp")]:
        path.unlink()


def _wait(supervisor: subprocess.Popen, log: Path, timeout_s: float, progress: Callable[[float, str], None] | None) -> None:
    started = told = time.monotonic()
    while supervisor.poll() is None:
        time.sleep(POLL_S)
        now = time.monotonic()
        if progress and now - told >= 0.5:
            told = now
            line = _last(log)
            progress(round(now - started, 1), f"{line}: {logs.last_meaningful(log)}" if line.startswith("starting vLLM") else line)
        if now - started > timeout_s:
            raise ServerError(
                got=f"vLLM has not finished after {timeout_s:.0f} s ({_last(log)})",
                expected=f"a capture within timeout_s ({timeout_s:.0f} s)",
                likely="a large model, many tokens, or a machine that others use too",
                next="raise timeout_s, or send fewer prompts",
            )


def _last(log: Path) -> str:
    """Return the driver's last line; vLLM's own lines are many and say little."""
    said = [m[1] for line in logs.read_lines(log) if (m := _SAID.match(line))]
    return said[-1] if said else "starting Python"


def _end(supervisor: subprocess.Popen) -> None:
    supervisor.terminate()
    try:
        supervisor.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _failed(out: Path, log: Path) -> HsnbError:
    record = read_exit(out / "vllm.exit.json")
    try:
        said = json.loads((out / "failure.json").read_text())
    except (OSError, ValueError):
        said = {}
    code = record.get("code")
    cause = find_cause(logs.read_lines(log), said, code=code)
    how = record.get("signal") or (f"exit code {code}" if code is not None else record.get("reason", "no exit code"))
    return ServerError(
        got=f"vLLM ended ({how}) at {_last(log)!r}: {cause.words}",
        expected="states of every prompt",
        likely=cause.line or cause.words,
        next=cause.next if cause.next != "read the log" else f"read {log}",
    )
