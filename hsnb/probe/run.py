"""Run the probe on a server, from the prompts to the verdict, and leave a receipt."""

from __future__ import annotations

from collections.abc import Sequence

from hsnb.paths import resolve
from hsnb.probe.judge import judge
from hsnb.probe.receipt import Receipt, read_receipt, require_receipt, write_receipt
from hsnb.probe.result import ProbeResult
from hsnb.probe.witness import fixed_prompts, gather


def run(server, prompts: Sequence[str | Sequence[int]] = (), repeat: int = 1) -> ProbeResult:
    """Ask the fixed prompts and `prompts`, `repeat` times, judge the dumps, free them, and bind the verdict to this server.

    Raises CaptureError or ServerError when there is nothing to judge. See ProbeResult for what a PASS does not prove.
    """
    model = resolve(server.armed[0].model_path)
    evidence = gather(server, fixed_prompts(model, prompts), repeat)
    try:
        result = judge(evidence, model)
    finally:
        evidence.free()
    write_receipt(server, result)
    return result


def ensure(server) -> Receipt:
    """Return the receipt of this server's PASS; probe it first when it has none. Raises CaptureError when it does not pass."""
    receipt = read_receipt(server)
    if receipt is None or receipt.verdict != "PASS":
        run(server).require()
    return require_receipt(server)
