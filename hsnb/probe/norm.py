"""Before or after the norm? Found numerically from the logprobs and the greedy text, not read from the label."""

from __future__ import annotations

import torch

from hsnb.checks import Check
from hsnb.probe.bars import LOGPROB_BARS, TEACHER_BARS
from hsnb.weights import Head

_BLIND = "the boundaries before the last: the final state alone gives the logprobs"


def logprob_errors(final: torch.Tensor, next_ids: torch.Tensor, server: torch.Tensor, head: Head, state: str) -> torch.Tensor:
    """Return |rebuilt - server's| log p of each next token [S], in nats, taking final [S, H] to be `state` the norm."""
    return (head.logprobs(final, next_ids, state).double() - server).abs()


def logprob_checks(errors: torch.Tensor, dtype: str) -> list[Check]:
    """Gate the errors of the rebuilt logprobs on mean and maximum; a wrong state can have a good best token."""
    checks = []
    for name, bar, measure in zip(("mean", "largest"), LOGPROB_BARS[dtype], (torch.mean, torch.max), strict=True):
        value = measure(errors).item() if len(errors) else float("nan")
        shown = f"{value:.2g} nats" if len(errors) else "not rebuilt: other rows"
        source = "float32: measured 2e-5; one layer early 3.2 and 15.6" if dtype == "float32" else "the server's own head rounds too"
        checks.append(Check(f"rebuilt logprobs, {name} error", shown, f"at most {bar:g} nats ({dtype})", value <= bar, _BLIND, source))
    return checks


def norm_check(final: torch.Tensor, next_ids: torch.Tensor, server: torch.Tensor, head: Head, label: str) -> Check:
    """Take the final for pre and for post: the label must be the one that rebuilds the logprobs better, ten times at least."""
    means = {state: logprob_errors(final, next_ids, server, head, state).mean().item() for state in ("pre", "post")}
    found = min(means, key=means.get)
    other = max(means.values())
    sure = other > 10 * means[found]
    value = f"{found} (mean error {means['pre']:.2g} as pre, {means['post']:.2g} as post)"
    return Check(
        "norm state found", value, f"{label}, ten times better", found == label and sure, _BLIND, "", not_proved=found == label and not sure
    )


def teacher_check(final: torch.Tensor, answer_ids: torch.Tensor, head: Head, state: str, dtype: str, *, blurred: bool) -> Check:
    """Compare the head's most likely tokens with the server's own greedy text [N], from the N rows before each.

    `blurred`: this server's noise exceeds a third of the distance to B_{L-1}, so its own text need not agree with its prefill.
    """
    share = (head.top1(final, state) == answer_ids).float().mean().item()
    bar = TEACHER_BARS[dtype]
    source = "SmolLM2: .999 right, .377 normed twice, .538 one layer early"
    blind = "a wrong state can have 96 % of the best tokens right: never the only gate"
    return Check(
        "teacher top-1 on the greedy text",
        f"{share:.3f} of {len(answer_ids)}",
        f"at least {bar:g}",
        share >= bar,
        blind,
        source,
        not_proved=share < bar and blurred,
    )
