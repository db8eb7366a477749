"""Which flags of sglang.launch_server exist, which hsnb sets itself, and which would break a capture.

SGLang's own list of arguments is read from its source by ast: importing sglang takes seconds and loads torch.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

from hsnb.errors import HsnbError, ParamsError, ServerError
from hsnb.params import ServerParams
from hsnb.patch.modes import ADDS_IN_THE_LOOP, SUMS_FIRST_SINCE

MIN_VERSION = (0, 5, 17)

# Flag: (the deployment's own name for it, or None when hsnb leaves no choice).
OWN_FLAGS = {
    "model-path": "model",
    "model": "model",
    "host": "server.host",
    "port": "server.port",
    "device": "server.device",
    "dtype": "server.dtype",
    "tp-size": "server.tp_size",
    "tp": "server.tp_size",
    "tensor-parallel-size": "server.tp_size",
    "nnodes": "server.nnodes",
    "node-rank": "server.nnodes",
    "dist-init-addr": "server.nnodes",
    "nccl-init-addr": "server.nnodes",
    "context-length": "server.context_length",
    "chunked-prefill-size": "server.chunked_prefill_size",
    "max-total-tokens": "server.max_total_tokens",
    "config": None,
}

_GROUPS = "DP attention splits the requests over groups of ranks"
_SEQUENCE = "context parallelism splits a sequence over ranks"
_SCATTERED = "the tokens are scattered over ranks, so that no rank has a request's rows"
# Flag: why it would break a capture. True, or any value but those of _HARMLESS, is refused. Aliases are flags of their own here.
# hsnb.patch.modes refuses the same from inside a server that was started by hand, and says why fused all-reduce is not here.
REFUSED = {
    "speculative-algorithm": "speculative decoding verifies drafts in batches that look like prefill",
    "speculative-draft-model-path": "speculative decoding verifies drafts in batches that look like prefill",
    "speculative-draft-model": "speculative decoding verifies drafts in batches that look like prefill",
    "pp-size": "pipeline parallelism gives each rank a part of the layers only",
    "pipeline-parallel-size": "pipeline parallelism gives each rank a part of the layers only",
    "dp-size": "data parallelism splits the requests over groups of ranks",
    "data-parallel-size": "data parallelism splits the requests over groups of ranks",
    "attn-dp-size": _GROUPS,
    "attention-data-parallel-size": _GROUPS,
    "enable-dp-attention": _GROUPS,
    "attn-cp-size": _SEQUENCE,
    "attention-context-parallel-size": _SEQUENCE,
    "dcp-size": _SEQUENCE,
    "decode-context-parallel-size": _SEQUENCE,
    "enable-prefill-cp": _SEQUENCE,
    "enable-prefill-context-parallel": _SEQUENCE,
    "enable-dsa-prefill-context-parallel": _SEQUENCE,
    "enable-nsa-prefill-context-parallel": _SEQUENCE,
    "moe-dp-size": _SCATTERED,
    "moe-data-parallel-size": _SCATTERED,
    "dwdp-size": _SCATTERED,
    "ep-size": _SCATTERED,
    "expert-parallel-size": _SCATTERED,
    "ep": _SCATTERED,
    "moe-a2a-backend": _SCATTERED,
    "enable-attn-tp-input-scattered": _SCATTERED,
    "enable-layernorm-sp": _SCATTERED,
    "enable-torch-compile": "a compiled forward skips the Python code that captures",
    "enable-mixed-chunk": "decoding requests run in the batch of a prefill",
    "enable-two-batch-overlap": "two half batches run interleaved in one forward",
    "enable-single-batch-overlap": "not proved: it reorders the work within a layer",
    "enable-pdmux": "prefill runs split in parts",
    "disaggregation-mode": "prefill and decode run in different servers",
    "dllm-algorithm": "a diffusion model has no prefill of this kind",
    "enable-hierarchical-cache": "cached tokens give no rows",
    "enable-hicache": "cached tokens give no rows",
    "enable-lmcache": "cached tokens give no rows",
    "enable-piecewise-cuda-graph": "a prefill CUDA graph skips the Python code that captures",
    "enable-breakable-cuda-graph": "a prefill CUDA graph skips the Python code that captures",
    "enforce-piecewise-cuda-graph": "a prefill CUDA graph skips the Python code that captures",
    "cuda-graph-backend-prefill": "a prefill CUDA graph skips the Python code that captures",
    "cuda-graph-config": "it may turn prefill CUDA graphs back on",
    "enable-return-hidden-states": "it changes what the model returns",
    "return-hidden-states-mode": "it changes what the model returns",
    "enable-return-aux-hidden-states": "it changes what the model returns",
    "skip-server-warmup": "readiness is told by the warm-up request",
    "api-key": "keys would show in the list of processes and in SGLang's own log",
    "admin-api-key": "keys would show in the list of processes and in SGLang's own log",
}
_HARMLESS = {
    **{flag: ("1",) for flag in REFUSED if flag.endswith("-size") or flag == "ep"},
    "moe-a2a-backend": ("none",),
    "disaggregation-mode": ("null",),
    "cuda-graph-backend-prefill": ("disabled",),
}
_NEGATED = {  # flags hsnb always gives: leaving one out by `false` is refused
    "disable-radix-cache": "with the radix cache on, tokens that are cached already give no rows",
    "disable-prefill-cuda-graph": "a prefill CUDA graph skips the Python code that captures",
}
# Variables of the server that hsnb sets itself, or that would break a capture.
REFUSED_ENV = {
    "SGLANG_ENABLE_TORCH_COMPILE": "a compiled forward skips the Python code that captures",
    "SGLANG_HS_DUMP_DIR": "hsnb sets it: name the folder with server.spool",
    "SGLANG_HS_DUMP_BOUNDARIES": "hsnb sets it from capture.boundaries",
    "SGLANG_HS_DUMP_FINAL": "hsnb sets it from capture.final",
    "SGLANG_HS_DUMP_FORMAT": "hsnb sets it from capture.format",
    "SGLANG_HS_DUMP_ONLY": "hsnb sets it to hsnb-",
    "SGLANG_HS_DUMP_NODES": "hsnb sets it from server.nnodes",
}


def normal(flag: str) -> str:
    """Return a flag's name with dashes and without leading ones: tp_size, --tp-size -> tp-size."""
    return flag.strip().lstrip("-").replace("_", "-")


def sglang_version() -> str:
    """Return the installed SGLang's version without importing it. Raises ServerError when it is missing or too old."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise ServerError(
            got="no sglang in this environment",
            expected="SGLang 0.5.17 or newer beside hsnb",
            likely="the environment was not made by make setup, or another Python is running",
            next="make setup",
        ) from error
    check_version(version)
    return version


def check_version(version: str) -> None:
    """Refuse a SGLang older than 0.5.17: its plug-ins and its CUDA graphs have other names."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if numbers < MIN_VERSION:
        raise ServerError(
            got=f"SGLang {version}",
            expected="SGLang 0.5.17 or newer",
            likely="an older install; capture was read and run in 0.5.17, 0.5.20 and 0.5.23",
            next="make setup (or pip install 'sglang>=0.5.17')",
        )


@functools.cache
def known_flags() -> frozenset[str] | None:
    """Return the names of the installed SGLang's arguments, or None when its source could not be read.

    Read in 0.5.17 (one server_args.py) and 0.5.20 to 0.5.23 (arg_groups/fields/*.py): annotated fields `name: A[...]`, their
    aliases, and add_argument calls.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations))) / "srt"
    names: set[str] = set()
    for file in [root / "server_args.py", *sorted((root / "arg_groups" / "fields").glob("*.py"))]:
        try:
            tree = ast.parse(file.read_text())
        except (OSError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names |= {normal(s.target.id) for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"--[a-z0-9][a-z0-9_-]*", node.value):
                names.add(normal(node.value))
    return frozenset(names) if len(names) > 100 else None


def prefill_graph_flags() -> list[str]:
    """Return how the installed SGLang is told to leave prefill CUDA graphs off (on by default on CUDA).

    0.5.17, 0.5.20 and 0.5.23 have both spellings (read in their source); the short one is deprecated in none of them.
    """
    known = known_flags()
    if known is None or "disable-prefill-cuda-graph" in known:
        return ["--disable-prefill-cuda-graph"]
    return ["--cuda-graph-backend-prefill", "disabled"]


def unfused_flags(architecture: str, tp_size: int) -> list[str]:
    """Return the flag that keeps fused all-reduce off, for the models whose states it would leave un-reduced (hsnb.patch.modes)."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version("sglang"))[:3])
    if tp_size == 1 or architecture not in ADDS_IN_THE_LOOP.values() or numbers >= SUMS_FIRST_SINCE:
        return []
    return ["--enforce-disable-flashinfer-allreduce-fusion"]


def check_nodes(server: ServerParams, *, node_rank: int | None = None) -> None:
    """Refuse a server over several nodes that is started as one of a single node, or whose ranks do not divide over them.

    `node_rank`: of the part that is about to be started; None: the whole server is. Raises ServerError or ParamsError.
    """
    if server.tp_size % server.nnodes:
        raise _params(
            f"server.tp_size {server.tp_size} over server.nnodes {server.nnodes}",
            "as many ranks on each node",
            "one of the two was changed alone",
            "a tp_size that nnodes divides",
        )
    if server.nnodes > 1 and node_rank is None:
        raise ServerError(
            got=f"server.nnodes is {server.nnodes}",
            expected="1: a server on this machine alone",
            likely="params of a cluster; only a run on one starts the other nodes' parts, watches them and reads what their ranks armed",
            next="hsnb run 03_extract.ipynb --shards 0-15 --ray auto (docs/cluster.md), or server.nnodes: 1",
        )


def check_flags(flags: dict[str, Any], env: dict[str, str], *, capture: bool = True) -> None:
    """Refuse flags and variables that would break a capture, that hsnb sets itself, or that SGLang does not know.

    Without a `capture` (a server to compare with) nothing can break it.
    Raises ServerError for what would break a capture, ParamsError for the rest; the flag is named, and what to do.
    """
    seen: dict[str, str] = {}
    known = known_flags()
    for name, value in flags.items():
        flag = normal(name)
        if flag in seen:
            got = f"--{flag} is given twice, as {seen[flag]} and as {name}"
            raise _params(got, "each flag once", "two spellings of one flag", f"take {name} out of server.flags")
        seen[flag] = name
        if flag in OWN_FLAGS:
            own = OWN_FLAGS[flag]
            raise _params(
                f"server.flags has {name}",
                f"{own}, which hsnb turns into --{flag}" if own else "every flag spelled out, so that it can be checked",
                "the flag would be given twice" if own else "a config file of SGLang may hold flags that break a capture",
                f"set {own} instead" if own else "write its flags under server.flags",
            )
        if flag in _NEGATED and (value is False or str(value).lower() == "false"):
            remedy = f"take {name} out of server.flags: hsnb gives --{flag} itself"
            raise _refused(f"server.flags has {name}: false", _NEGATED[flag], remedy)
        harmless = value is False or str(value).lower() in _HARMLESS.get(flag, ())
        if capture and flag in REFUSED and not harmless:
            raise _refused(f"server.flags has {name}: {value}", REFUSED[flag], f"take {name} out of server.flags")
        if known is not None and flag not in known:
            near = difflib.get_close_matches(flag, sorted(known), 3)
            raise _params(
                f"server.flags has {name}, which SGLang {importlib.metadata.version('sglang')} does not know",
                "a flag of sglang.launch_server" + (f": {', '.join(near)}" if near else ""),
                "a typo, or a flag of another version",
                f"mend server.flags.{name}",
            )
    for name, value in env.items():
        if capture and name in REFUSED_ENV and value:
            raise _refused(f"server.env has {name}", REFUSED_ENV[name], f"take {name} out of server.env")


def _params(got: str, expected: str, likely: str, next: str) -> HsnbError:
    return ParamsError(got=got, expected=expected, likely=likely, next=next)


def _refused(got: str, why: str, next: str) -> HsnbError:
    return ServerError(got=got, expected="a server whose prefill can be captured", likely=why, next=next)
