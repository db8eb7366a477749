"""The probe: does this server hand out the states that it is asked for?"""

from hsnb.probe.judge import judge
from hsnb.probe.receipt import read_receipt, require_receipt
from hsnb.probe.result import ProbeResult
from hsnb.probe.run import ensure, run
from hsnb.probe.witness import Evidence, Prompt, Witness, fixed_prompts, gather

__all__ = [
    "Evidence",
    "ProbeResult",
    "Prompt",
    "Witness",
    "ensure",
    "fixed_prompts",
    "gather",
    "judge",
    "read_receipt",
    "require_receipt",
    "run",
]
