"""The receipt: a verdict bound to the very server it was made on, kept in its spool and gone with it."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hsnb.errors import ExtractError
from hsnb.patch.armed import Armed
from hsnb.paths import resolve, write_json
from hsnb.weights import weights_hash

NAME = "receipt.json"


@dataclass(frozen=True)
class Receipt:
    """`verdict`: PASS, FAIL or NOT PROVED; `server`: what it is bound to; `made` ISO 8601, UTC."""

    verdict: str
    made: str
    server: dict[str, Any]

    def _repr_html_(self) -> str:
        what = f"{self.server['model']}, boundaries {self.server['boundaries']}, final {self.server['final']}"
        return f"<p>Probe of {html.escape(self.made)}: <b>{self.verdict}</b> for {html.escape(what)}</p>"


def identity(armed: list[Armed]) -> dict[str, Any]:
    """Return what makes this server this server: its processes, its weights, what it captures."""
    first = armed[0]
    return {
        "ranks": [[a.rank, a.pid, a.pid_created, a.started] for a in armed],
        "model": first.model_path,
        "config": first.config_hash,
        "weights": weights_hash(resolve(first.model_path)),
        "sglang": first.sglang_version,
        "hsnb": first.patch_version,
        "boundaries": first.boundaries,
        "final": first.final,
        "format": first.format,
        "dtype": first.dtype,
    }


def write_receipt(server, result) -> Path:
    """Keep the verdict in the server's spool."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return write_json(server.spool / NAME, {"verdict": result.verdict, "made": made, "server": identity(server.armed)})


def read_receipt(server) -> Receipt | None:
    """Return this very server's receipt; None when there is none, or when it is another server's."""
    try:
        tree = json.loads((server.spool / NAME).read_text())
    except (OSError, ValueError):
        return None
    return Receipt(**tree) if tree.get("server") == json.loads(json.dumps(identity(server.armed))) else None


def require_receipt(server) -> Receipt:
    """Return the receipt of a PASS. Raises ExtractError when this server was not probed, or did not pass."""
    receipt = read_receipt(server)
    if receipt is None or receipt.verdict != "PASS":
        raise ExtractError(
            got="no probe of this very server" if receipt is None else f"the probe of {receipt.made} said {receipt.verdict}",
            expected="a PASS bound to its processes, weights and boundaries",
            likely="it was started again since, or never probed" if receipt is None else "it does not hand out the states it is asked for",
            next=f"hsnb probe --server {server.url}, or 01_probe.ipynb",
        )
    return receipt
