"""Check everything that can be checked before a model is loaded: seconds instead of a failed start after minutes."""

from __future__ import annotations

import html
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from hsnb import paths
from hsnb.errors import HsnbError, ModelError, ServerError
from hsnb.params import Deployment
from hsnb.patch.large_pages import has_small_pages_only
from hsnb.server.command import gpus, resolve_device
from hsnb.server.flags import check_flags, check_nodes, sglang_version
from hsnb.server.leftovers import MARKER, SHM
from hsnb.server.state import refuse_taken
from hsnb.server.supervisor import family

GIB = 1 << 30
MIN_SPOOL_BYTES = 256 << 20  # a few requests in flight; the extraction works out its own need
MIN_DISK_BYTES = 1 * GIB  # for logs and reports; the extraction works out its own need
_PORTS = 20_000, 30_000  # between those of ray's workers and those of Kubernetes' nodes; Linux connects from 32768 on
MIN_SHM_BYTES = 64 << 20  # SGLang's own queues; Docker's default


@dataclass(frozen=True)
class Check:
    """One row: what was checked, what was found, whether it will do, and a word on it."""

    check: str
    value: str
    ok: bool
    note: str = ""
    error: HsnbError | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Preflight:
    """The rows of a preflight. Displays itself; `check` raises the first failure."""

    rows: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Say whether every row will do."""
        return all(row.ok for row in self.rows)

    def check(self) -> Preflight:
        """Raise the first failure as its own error; return self when there is none."""
        for row in self.rows:
            if row.error is not None:
                raise row.error
        return self

    def frame(self) -> pd.DataFrame:
        """Return columns check, value, ok, note."""
        return pd.DataFrame([{"check": r.check, "value": r.value, "ok": r.ok, "note": r.note} for r in self.rows])

    def as_dict(self) -> dict:
        """Return the rows, for --json."""
        return {"ok": self.ok, "rows": self.frame().to_dict("records")}

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><td>{html.escape(r.check)}</td><td>{html.escape(r.value)}</td><td>{'ok' if r.ok else 'FAILED'}</td>"
            f"<td>{html.escape(r.note)}</td></tr>"
            for r in self.rows
        )
        return f"<table class='hsnb'><tr><th>check</th><th>value</th><th>ok</th><th>note</th></tr>{body}</table>"


def preflight(deployment: Deployment, *, capture: bool = True, outputs: Path | None = None, node_rank: int | None = None) -> Preflight:
    """Check the deployment and this machine; load nothing, import neither torch nor sglang.

    A failed check is a row, not an exception: `Preflight.check` raises it. `outputs` is where results will go (default: the
    project's outputs/); `node_rank`: of the part that is started here, of a server over several nodes. What it does NOT prove:
    that the model fits into memory, and that the flags fit the model.
    """
    steps: list[tuple[str, Callable[[], tuple[str, str]]]] = [
        ("SGLang", _sglang),
        ("flags", lambda: _flags(deployment, capture)),
        *([("nodes", lambda: _nodes(deployment, node_rank))] if deployment.server.nnodes > 1 else []),
        ("environment", lambda: _environment(deployment, capture)),
        ("model", lambda: _model(deployment)),
        ("boundaries", lambda: _boundaries(deployment)),
        ("device", lambda: _device(deployment)),
        ("port", lambda: _port(deployment)),
        ("/dev/shm", lambda: _space(SHM, MIN_SHM_BYTES, total=True)),
    ]
    if capture:
        steps.append(("spool", lambda: _spool(deployment)))
    steps.append(("disk", lambda: _space(outputs or paths.project_root() / "outputs", MIN_DISK_BYTES)))
    rows = []
    for name, step in steps:
        try:
            rows.append(Check(name, *_with_ok(step())))
        except HsnbError as error:
            rows.append(Check(name, error.got, False, f"expected {error.expected}. Likely: {error.likely}. Next: {error.next}", error))
    return Preflight(tuple(rows))


def _with_ok(found: tuple[str, str]) -> tuple[str, bool, str]:
    return found[0], True, found[1]


def _sglang() -> tuple[str, str]:
    version = sglang_version()
    return version, "0.5.17 or newer" + ("" if version in ("0.5.17", "0.5.20", "0.5.23") else "; this one was not run by hsnb's authors")


def _flags(deployment: Deployment, capture: bool) -> tuple[str, str]:
    server = deployment.server
    check_flags(server.flags, server.env, capture=capture)
    return ", ".join(server.flags) or "none", "nothing that would break a capture" if capture else "no capture asked for"


def _nodes(deployment: Deployment, node_rank: int | None) -> tuple[str, str]:
    server = deployment.server
    check_nodes(server, node_rank=node_rank)
    return f"{node_rank + 1} of {server.nnodes}", f"{server.tp_size // server.nnodes} of {server.tp_size} ranks here"


def _environment(deployment: Deployment, capture: bool) -> tuple[str, str]:
    """Check that the server will find the plug-in, and on a CPU the shims, without importing either."""
    found = []
    if capture:
        chosen = ({**os.environ, **deployment.server.env}).get("SGLANG_PLUGINS", "")
        if chosen and "hsnb" not in [name.strip() for name in chosen.split(",")]:
            raise ServerError(
                got=f"SGLANG_PLUGINS={chosen}",
                expected="hsnb among its names",
                likely="the variable was set for another plug-in; SGLang loads only those it names",
                next=f"SGLANG_PLUGINS={chosen},hsnb, or unset it",
            )
        if not [point for point in importlib.metadata.entry_points(group="sglang.srt.plugins") if point.name == "hsnb"]:
            raise ServerError(
                got="no plug-in hsnb among the entry points of this environment",
                expected="the entry point that SGLang loads",
                likely="hsnb is imported from a folder and not installed",
                next="make setup (or pip install -e .)",
            )
        found.append("the plug-in")
    if resolve_device(deployment.server.device) == "cpu":
        if importlib.util.find_spec("sgl_kernel") is None:
            raise ServerError(
                got="no sgl_kernel in this environment",
                expected="the CPU shims beside SGLang",
                likely="the requirements of a GPU machine were installed, or an incomplete set",
                next="make setup",
            )
        found.append("the CPU shims")
    return " and ".join(found) or "as it is", "found beside SGLang"


def _model(deployment: Deployment) -> tuple[str, str]:
    """Check that config.json is there, and every weight file that an index names: half a download is found now, not after a load."""
    folder, config = deployment.model_path(), deployment.model_config_json()
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if missing := [name for name in named if not (folder / name).is_file()]:
            raise ModelError(
                got=f"{len(missing)} of {len(named)} weight files are not in {folder}, the first is {missing[0]}",
                expected=f"all that {index.name} names",
                likely="a download that is not whole, or links into a cache that was cleared",
                next="download the checkpoint again; what is there is kept",
            )
    return str(folder), str((config.get("architectures") or ["?"])[0])


def _boundaries(deployment: Deployment) -> tuple[str, str]:
    checked = deployment.check_against_model()
    return ", ".join(map(str, checked)), f"final: {deployment.capture.final}"


def _device(deployment: Deployment) -> tuple[str, str]:
    wanted, found = deployment.server.device, gpus()
    if wanted == "cpu" or (wanted == "auto" and not found):
        return "cpu", f"{len(os.sched_getaffinity(0))} cores" + ("" if wanted == "cpu" else "; nvidia-smi lists no GPU")
    server = deployment.server
    if len(found) < server.tp_size // server.nnodes:
        raise ServerError(
            got=f"{len(found)} GPUs listed by nvidia-smi",
            expected=f"at least tp_size ({server.tp_size})" + (f" over nnodes ({server.nnodes})" if server.nnodes > 1 else ""),
            likely="params of a larger machine" if found else "no NVIDIA driver here",
            next="lower server.tp_size" if found else "server.device: cpu, or another machine",
        )
    return "cuda", "; ".join(f"{name}, {mib / 1024:.0f} GiB" if mib else name for name, mib in found)


def port_is_free(host: str, port: int) -> bool:
    """Say whether a server could listen at host:port."""
    with socket.socket(family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; a port in TIME_WAIT is free to them
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def pick_port(deployment: Deployment) -> int:
    """Return the deployment's port, or for 0 a free one whose default spool is not taken either.

    It is none of those that Linux gives by default to whoever connects: half a minute passes until the server listens there.
    Raises ServerError when the host is none of this machine's.
    """
    if deployment.server.port:
        return deployment.server.port
    _check_host(deployment.server.host)
    while True:
        port = random.SystemRandom().randrange(*_PORTS)  # not the one that a notebook has seeded
        if port_is_free(deployment.server.host, port) and not paths.default_spool(port).exists():
            return port


def _check_host(host: str) -> None:
    try:
        with socket.socket(family(host)) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ServerError(
            got=f"server.host is {host}: {error.strerror or error}",
            expected="an address of this machine",
            likely="a typo, or another machine's address",
            next="server.host: 127.0.0.1, or 0.0.0.0 for every network that this machine is in",
        ) from error


def _port(deployment: Deployment) -> tuple[str, str]:
    server = deployment.server
    _check_host(server.host)
    if server.port == 0:
        return "0", "a free one is picked"
    refuse_taken(server.port)
    if not port_is_free(server.host, server.port):
        raise ServerError(
            got=f"port {server.port} on {server.host} is in use",
            expected="a free port",
            likely="another server, or one that was left running",
            next="hsnb stop --all, or server.port: 0 for a free one",
        )
    return str(server.port), "free"


def _spool(deployment: Deployment) -> tuple[str, str]:
    given = deployment.server.spool
    if not given and deployment.server.port == 0:
        return f"{paths.SPOOL_ROOT}/(port)", _space(paths.SPOOL_ROOT.parent, MIN_SPOOL_BYTES)[0] + _pages(deployment, SHM)
    spool = Path(given) if given else paths.default_spool(deployment.server.port)
    existed = spool.exists()
    if existed and not (spool / MARKER).is_file() and any(spool.iterdir()):
        raise ServerError(
            got=f"spool {spool} holds files that are not a server's of hsnb",
            expected="an empty or a new folder, or an earlier server's spool",
            likely="a data folder was named, or a server started by hand uses it",
            next="name another folder with server.spool, or remove this one",
        )
    paths.make_private(spool)
    try:
        value, note = _space(spool, MIN_SPOOL_BYTES)
        return str(spool), f"{value}, {note}{_pages(deployment, spool)}"
    finally:
        if not existed:
            spool.rmdir()


def _pages(deployment: Deployment, folder: Path) -> str:
    """Return advice where a GPU fills a spool faster than pages of 4 kB can be had, and there are no others."""
    small = resolve_device(deployment.server.device) == "cuda" and has_small_pages_only(folder)
    return "; in pages of 4 kB: large ones cost a fraction (docs/performance.md)" if small else ""


def _space(folder: Path, least: int, *, total: bool = False) -> tuple[str, str]:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    if usage.free < least:
        in_memory = folder.is_relative_to(SHM)
        raise ServerError(
            got=f"{usage.free / GIB:.2f} GiB free under {folder}",
            expected=f"at least {least / GIB:.2f} GiB",
            likely="a container's default of 64 MiB, or files that killed servers left" if in_memory else "old runs",
            next="docker run --shm-size=8g, or clear /dev/shm" if in_memory else "free some space, or name a folder on another disk",
        )
    size = f" of {usage.total / GIB:.1f} GiB" if total else ""
    return f"{usage.free / GIB:.1f} GiB free{size}", f"at least {least / GIB:.2f} GiB"
