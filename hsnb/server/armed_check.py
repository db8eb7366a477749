"""Prove from the armed files that a server captures what was asked: one entry per rank, armed, with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hsnb
from hsnb.errors import CaptureError, ServerError
from hsnb.params import Deployment
from hsnb.patch.armed import Armed, read_armed
from hsnb.server.command import ONLY_PREFIX
from hsnb.server.far import FarRanks
from hsnb.server.supervisor import is_alive

NONE_FAR = FarRanks()


def read_or_refuse(spool: Path, *, url: str, plugin_failure: str = "") -> list[Armed]:
    """Return the armed entries of `spool`. Raises CaptureError when there is none: the server runs without the plug-in."""
    try:
        armed = read_armed(spool)
    except (OSError, ValueError) as error:
        raise CaptureError(
            got=f"{spool}: {error}",
            expected="readable armed-*.json files",
            likely="another user's spool, or files of another version",
            next="start the server as this user, with this hsnb",
        ) from error
    if armed:
        return armed
    if plugin_failure:
        likely, remedy = f"the plug-in failed to load: {plugin_failure}", "see the traceback in the server's log"
    else:
        likely = "hsnb is not installed in the server's environment, SGLANG_PLUGINS leaves it out, or the spool is another one"
        remedy = "hsnb serve, or pip install hsnb beside SGLang; for a server that was started by hand name its spool"
    raise CaptureError(
        got=f"the server at {url} runs without the plug-in (no armed-*.json in {spool})",
        expected="one per rank",
        likely=likely,
        next=remedy,
    )


def check_info(info: dict) -> None:
    """Refuse a server whose own settings (/server_info) break a capture. Raises ServerError that names the flag."""
    graph = info.get("cuda_graph_config")
    graph = (graph.get("prefill") or {}).get("backend") if isinstance(graph, dict) else None
    modes = [
        (not info.get("disable_radix_cache", True), "the radix cache on: cached tokens give no rows", "--disable-radix-cache"),
        (
            graph not in (None, "disabled"),
            f"a prefill CUDA graph ({graph}): it skips the code that captures",
            "--disable-prefill-cuda-graph",
        ),
        (
            bool(info.get("speculative_algorithm")),
            f"--speculative-algorithm {info.get('speculative_algorithm')}",
            "no speculative decoding",
        ),
        (int(info.get("pp_size") or 1) > 1, f"--pp-size {info.get('pp_size')}", "--tp-size alone"),
        (int(info.get("dp_size") or 1) > 1, f"--dp-size {info.get('dp_size')}", "--tp-size alone"),
        (bool(info.get("enable_dp_attention")) or int(info.get("attn_dp_size") or 1) > 1, "DP attention", "--tp-size alone"),
        (bool(info.get("enable_torch_compile")), "--enable-torch-compile", "no torch.compile"),
        ((info.get("disaggregation_mode") or "null") != "null", "prefill and decode in different servers", "one server for both"),
    ]
    for bad, what, remedy in modes:
        if bad:
            raise ServerError(
                got=f"the server runs with {what}",
                expected="a server whose prefill can be captured",
                likely="it was started for serving, not for extraction",
                next=f"start it with {remedy}, or with hsnb serve",
            )


def check_armed(
    armed: Sequence[Armed],
    *,
    ranks: int | None = None,
    expect: Deployment | None = None,
    port: int | None = None,
    far: FarRanks = NONE_FAR,
) -> None:
    """Refuse entries that are not armed, not alive, of another hsnb, or not as `expect` says; `far`: those of other nodes.

    Raises CaptureError that names the first difference. Proves what was armed, not that the states are right: that is the probe's.
    """
    ranks = ranks if ranks is not None else max(a.tp_size for a in armed)
    if sorted(a.rank for a in armed) != list(range(ranks)):
        raise _differs(
            f"armed ranks {sorted(a.rank for a in armed)}",
            f"ranks 0..{ranks - 1}",
            "a rank whose plug-in failed to load",
            "read the server's log",
        )
    for entry in armed:
        address, there = far.ranks.get(entry.rank, ("", port))
        who = f"rank {entry.rank} on {address}" if address else f"rank {entry.rank}"
        if entry.state != "armed":
            raise _differs(
                f"{who} is {entry.state}: {entry.error or 'no reason given'}",
                "armed",
                "what the reason names",
                "mend it and start the server again",
            )
        if address and not far.watched():
            raise _differs(
                f"{who} is watched by nobody here any longer (process {far.watcher[0]} has ended)",
                "the process that started the server, which ends it when that node is lost",
                "an old server's spool",
                "hsnb run --ray starts another",
            )
        if not address and not is_alive(entry.pid, entry.pid_created):
            raise _differs(
                f"{who} was armed by process {entry.pid}, which does not run on this host",
                "a scheduler that runs here",
                "the server runs on another host, or the spool is an old server's",
                "run hsnb on the server's host, or name its spool",
            )
        if entry.patch_version != hsnb.__version__:
            raise _differs(
                f"{who} runs the plug-in of hsnb {entry.patch_version or '(unknown)'}",
                f"{hsnb.__version__}, as here",
                "hsnb was upgraded while the server ran, or is another one in the server's environment",
                "start the server again",
            )
        if port is not None and entry.port and entry.port != there:
            raise _differs(
                f"{who} belongs to port {entry.port}", f"port {there}", "another server writes to this spool", "name this server's spool"
            )
        if entry.only != ONLY_PREFIX:
            raise _differs(
                f"{who} captures requests {entry.only + '*' if entry.only else 'of every id'}",
                f"{ONLY_PREFIX}* only",
                "SGLANG_HS_DUMP_ONLY was set by hand",
                f"set SGLANG_HS_DUMP_ONLY={ONLY_PREFIX}, or start it with hsnb serve",
            )
        if expect is not None:
            _check_settings(entry, who, expect)
    first = armed[0]
    for entry in armed[1:]:
        for name in ("boundaries", "final", "format", "only", "sglang_version", "config_hash"):
            if getattr(entry, name) != getattr(first, name):
                where = f" on {far.ranks[entry.rank][0]}" if entry.rank in far.ranks else ""
                got = f"rank {entry.rank}{where} has {name} {getattr(entry, name)!r}, rank {first.rank} has {getattr(first, name)!r}"
                raise _differs(got, "all ranks alike", "files of two servers in one spool", "start the server again")


def _check_settings(entry: Armed, who: str, expect: Deployment) -> None:
    capture = expect.capture
    wanted = {"boundaries": sorted(capture.boundaries), "final": capture.final, "format": capture.format}
    for name, value in wanted.items():
        given = getattr(entry, name)
        if (sorted(given) if name == "boundaries" else given) != value:
            raise _differs(
                f"{who} captures {name} {given}",
                f"{value}, as {expect.name} asks",
                "the server was started for other params",
                "start it again with these params, or name the params it was started with",
            )


def _differs(got: str, expected: str, likely: str, next: str) -> CaptureError:
    return CaptureError(got=got, expected=expected, likely=likely, next=next)
