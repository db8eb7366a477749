"""The probe: does this server hand out the states that it is asked for?"""

from hsnb.probe.judge import judge
from hsnb.probe.result import ProbeResult
from hsnb.probe.run import run
from hsnb.probe.witness import Prompt, Witness, ask, fixed_prompts

__all__ = ["ProbeResult", "Prompt", "Witness", "ask", "fixed_prompts", "judge", "run"]
