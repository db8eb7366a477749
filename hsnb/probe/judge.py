"""Judge witnesses: every dump against what was asked, and the server's own logprobs rebuilt from the dump."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hsnb.checks import Asked, Check, dump_checks
from hsnb.dumps import Dump, open_dump
from hsnb.errors import DumpError
from hsnb.patch.armed import Armed
from hsnb.probe.result import ProbeResult
from hsnb.probe.witness import Witness
from hsnb.weights import Head

# Largest |error| of a rebuilt logprob, in nats: (mean, max). float32 on SmolLM2 gives 2e-5 at most, B_{L-1} in place of B_L
# 3.2 and 15.6, yet its best token errs by 9e-4 only: hence both bars. Half precision: the server's own head rounds as well.
LOGPROB_BARS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.5), "float16": (0.02, 0.2)}


def judge(witnesses: Sequence[Witness], armed: Armed, head: Head) -> ProbeResult:
    """Return the verdict over all witnesses. A dump that cannot be read is a failed check, not an exception."""
    checks: list[Check] = []
    drawn: dict[str, tuple[float, ...]] = {}
    for witness in witnesses:
        asked = Asked(torch.tensor(witness.prompt.token_ids), tuple(armed.boundaries), armed.final, armed.hidden_size, armed.dtype)
        try:
            dump = open_dump(witness.dump)
            found = dump_checks(dump, asked)
            if witness.prompt.text:
                errors = logprob_errors(dump, witness, asked, head)
                found += logprob_checks(errors, asked.dtype)
                drawn[witness.prompt.name] = tuple(errors.tolist())
        except DumpError as error:
            found = [Check("readable", error.got, error.expected, False)]
        checks += [Check(f"{witness.prompt.name}: {c.name}", c.value, c.threshold, c.ok, c.blind_to) for c in found]
    return ProbeResult(
        tuple(checks),
        armed.model_path,
        armed.sglang_version,
        tuple(armed.boundaries),
        armed.final,
        armed.pid,
        armed.started,
        armed.dtype,
        drawn,
    )


def logprob_errors(dump: Dump, witness: Witness, asked: Asked, head: Head) -> torch.Tensor:
    """Return |rebuilt - server's| log p of each next token [S], in nats; empty when the dump has other rows than were asked for."""
    if dump.num_tokens != len(asked.token_ids):
        return torch.empty(0)
    next_ids = torch.tensor([*witness.prompt.token_ids[1:], witness.answer_id])
    return (head.logprobs(dump.state("final"), next_ids, asked.final).double() - witness.logprobs).abs()


def logprob_checks(errors: torch.Tensor, dtype: str) -> list[Check]:
    """Gate the errors of the rebuilt logprobs on mean and maximum; a wrong state can have a good best token."""
    blind = "the boundaries before the last: the final state alone gives the logprobs"
    checks = []
    for name, bar, measure in zip(("mean", "largest"), LOGPROB_BARS[dtype], (torch.mean, torch.max), strict=True):
        value = measure(errors).item() if len(errors) else float("nan")
        shown = f"{value:.2g} nats" if len(errors) else "not rebuilt: other rows"
        checks.append(Check(f"rebuilt logprobs, {name} error", shown, f"at most {bar:g} nats ({dtype})", value <= bar, blind))  # NaN fails
    return checks
