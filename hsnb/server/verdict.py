"""The verdict on a server's bring-up, and what its schedulers say of themselves, as tables."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from hsnb.checks import Check
from hsnb.errors import ServerError


@dataclass(frozen=True)
class ServerVerdict:
    """Whether the server is up, armed and not yet in trouble. It does not prove that the states are right: the probe does."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks)

    def frame(self) -> pd.DataFrame:
        """Return the checks as a table."""
        rows = [{"check": c.name, "value": c.value, "threshold": c.threshold, "result": "pass" if c.ok else "FAIL"} for c in self.checks]
        return pd.DataFrame(rows)

    def require(self) -> None:
        """Raise ServerError naming the first check that failed."""
        for check in self.checks:
            if not check.ok:
                raise ServerError(
                    got=f"{check.name} is {check.value}",
                    expected=check.threshold,
                    likely="see the server's log",
                    next="start the server again",
                )


def verdict(server) -> ServerVerdict:
    """Judge a server that answers: every rank armed alike, nothing failed, all within the time allowed."""
    first = server.armed[0]
    ranks = f"{len(server.armed)} of {first.tp_size}"
    failed = sum(a.counts.get("failed", 0) for a in server.armed)
    limit = server.deployment.server.ready_timeout_s if server.deployment and not server.attached else None
    checks = [
        Check("answers over HTTP", "yes" if server.running() or not server.attached else "no", "yes", server.running()),
        Check("ranks armed", ranks, f"{first.tp_size} of {first.tp_size}", len(server.armed) == first.tp_size),
        Check("boundaries", str(first.boundaries), "the same on every rank", all(a.boundaries == first.boundaries for a in server.armed)),
        Check("requests that could not be captured", str(failed), "0", failed == 0),
    ]
    if limit:
        checks.append(Check("time to ready", f"{server.startup_seconds:g} s", f"at most {limit:g} s", server.startup_seconds <= limit))
    return ServerVerdict(tuple(checks))


def armed_frame(server) -> pd.DataFrame:
    """Return one row a scheduler: what it armed and counted."""
    names = ("rank", "pid", "model_class", "num_layers", "hidden_size", "dtype", "boundaries", "final", "format", "only", "counts")
    return pd.DataFrame([{n: str(getattr(a, n)) if n in ("boundaries", "counts") else getattr(a, n) for n in names} for a in server.armed])


def env_frame(server) -> pd.DataFrame:
    """Return the NCCL, CUDA and SGLANG variables of every scheduler, one column a rank."""
    return pd.DataFrame({f"rank {a.rank}": pd.Series(a.env, dtype=object) for a in server.armed}).fillna("(not set)")
