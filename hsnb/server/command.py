"""The command and the environment of a server, built from a deployment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsnb.boundaries import text_config
from hsnb.params import Deployment
from hsnb.server.flags import normal, prefill_graph_flags, unfused_flags

ONLY_PREFIX = "hsnb-"
CAPTURE_VARIABLES = (
    "SGLANG_HS_DUMP_DIR",
    "SGLANG_HS_DUMP_BOUNDARIES",
    "SGLANG_HS_DUMP_FINAL",
    "SGLANG_HS_DUMP_FORMAT",
    "SGLANG_HS_DUMP_ONLY",
    "SGLANG_HS_DUMP_NODES",
)
CPU_CONTEXT = 4096  # a KV cache for a model's full context would not fit into a small machine
CPU_TOTAL_TOKENS = 8192
_SECRET = re.compile(r"key|token(?!s|izer)|secret|password|credential", re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """One node's part of a server over several: its number, and HOST:PORT of the first node, where all ranks meet."""

    node_rank: int
    address: str


def gpus() -> list[tuple[str, int]]:
    """Return (name, MiB) of each GPU that nvidia-smi lists; none: []. torch is not imported."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [(name.strip(), int(mib)) if mib.strip().isdigit() else (name.strip(), 0) for name, mib in rows]


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda"; auto: cuda when nvidia-smi lists a GPU."""
    return device if device != "auto" else "cuda" if gpus() else "cpu"


def context_length(deployment: Deployment, device: str) -> int | None:
    """Return the context length (tokens) to ask for; None: SGLang takes the model's own."""
    given = deployment.server.context_length
    if given is not None or device != "cpu":
        return given
    longest = int(text_config(deployment.model_config_json()).get("max_position_embeddings") or CPU_CONTEXT)
    return min(longest, CPU_CONTEXT)


def build_command(deployment: Deployment, port: int, part: Part | None = None) -> list[str]:
    """Return the argv that starts the server, or its `part` on one node; `server.flags` add to hsnb's own flags or replace them."""
    server = deployment.server
    device = resolve_device(server.device)
    flags: dict[str, Any] = {
        "model-path": str(deployment.model_path()),
        "host": server.host,
        "port": port,
        "device": device,
        "dtype": server.dtype,
        "tp-size": server.tp_size,
        "context-length": context_length(deployment, device),
        "chunked-prefill-size": server.chunked_prefill_size,
        "max-total-tokens": server.max_total_tokens or (CPU_TOTAL_TOKENS if device == "cpu" else None),
        "disable-radix-cache": True,
    }
    if device == "cpu":
        # Idle schedulers spin without --sleep-on-idle and starve a small machine. (The rest: ENGINES, run on 0.5.17-0.5.23.)
        flags |= {"attention-backend": "torch_native", "disable-cuda-graph": True, "disable-overlap-schedule": True}
        flags |= {"max-running-requests": 8, "sleep-on-idle": True}
    else:
        flag, *value = prefill_graph_flags()
        flags[normal(flag)] = value or True
        architecture = (deployment.model_config_json().get("architectures") or [""])[0]
        flags |= {normal(flag): True for flag in unfused_flags(architecture, server.tp_size)}
    if part is not None:
        flags |= {"nnodes": server.nnodes, "node-rank": part.node_rank, "dist-init-addr": part.address}
    flags |= {normal(name): value for name, value in server.flags.items()}
    return [sys.executable, "-m", "sglang.launch_server", *_argv(flags)]


def _argv(flags: dict[str, Any]) -> list[str]:
    argv = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if value is not True:
            argv += [str(v) for v in value] if isinstance(value, list) else [str(value)]
    return argv


def build_env(deployment: Deployment, spool: str | Path | None, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return the server's whole environment: this process's own, the CPU settings, `server.env`, the capture variables.

    `spool` None: capture is off, and no variable that would turn it on is passed down. `extra` comes last but cannot turn
    capture on or off.
    """
    env = dict(os.environ)
    if resolve_device(deployment.server.device) == "cpu":
        # Without TORCHDYNAMO_DISABLE the first forward compiles for 10-20 s.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        server = deployment.server
        if server.tp_size > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in env:
            # Once for each node: a rank looks itself up by its number on the node (0.5.23), and would find itself by its own, too.
            here = thread_binding(server.tp_size // server.nnodes)
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([here] * server.nnodes)
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}  # models are folders; the log is read while it grows
    env |= deployment.server.env | (extra or {})
    for name in CAPTURE_VARIABLES:
        env.pop(name, None)
    if spool is not None:
        env |= capture_env(deployment, spool)
    return env


def capture_env(deployment: Deployment, spool: str | Path) -> dict[str, str]:
    """Return the variables that arm the plug-in."""
    capture, nodes = deployment.capture, deployment.server.nnodes
    values = (str(spool), ",".join(map(str, sorted(capture.boundaries))), capture.final, capture.format, ONLY_PREFIX, str(nodes))
    return dict(zip(CAPTURE_VARIABLES, values, strict=True))


def thread_binding(ranks: int) -> str:
    """Return SGLANG_CPU_OMP_THREADS_BIND for `ranks` CPU ranks: this process's cores in equal parts, "0-3|4-7" style."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // ranks)
    parts = [cores[i * size : (i + 1) * size] or [cores[i % len(cores)]] for i in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)


def masked(command: list[str], env: dict[str, str]) -> str:
    """Return the command and the variables that matter, for the head of the log; values that may be secrets are masked."""
    shown = []
    for i, word in enumerate(command):
        secret = i and command[i - 1].startswith("--") and _SECRET.search(command[i - 1])
        shown.append("***" if secret and not word.startswith("--") else word)
    names = sorted(n for n in env if n.startswith(("SGLANG_", "NCCL_", "CUDA_", "TORCHDYNAMO_", "HF_HUB_OFFLINE", "OMP_")))
    return " ".join([*(f"{n}={'***' if _SECRET.search(n) else env[n]}" for n in names), *shown])
