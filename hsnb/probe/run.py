"""Run the probe on a server, from the prompts to the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from hsnb.collect import free
from hsnb.paths import resolve
from hsnb.probe.judge import judge
from hsnb.probe.result import ProbeResult
from hsnb.probe.witness import ask, fixed_prompts
from hsnb.weights import Head


def run(server, prompts: Sequence[str | Sequence[int]] = (), repeat: int = 1) -> ProbeResult:
    """Ask the fixed prompts and `prompts`, `repeat` times, judge the dumps, and free them.

    Raises CaptureError or ServerError when there is nothing to judge. See ProbeResult for what a PASS does not prove.
    """
    armed = server.armed[0]
    model = resolve(armed.model_path)
    head = Head.load(model)
    witnesses = ask(server, fixed_prompts(model, prompts) * repeat)
    try:
        return judge(witnesses, armed, head)
    finally:
        for witness in witnesses:
            free(witness.dump)
