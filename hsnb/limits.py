"""The longest prompt that an SGLang server takes, so that a sample it would refuse is found before the start.

Read in SGLang 0.5.17, 0.5.20 and 0.5.23, and run on 0.5.23: the scheduler answers 400 to a prompt of `max_req_input_len` tokens or
more (managers/utils.py, validate_input_length), which is min(context_length - 1, max_total_num_tokens - 1) - 5 (managers/tp_worker.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hsnb.params import Deployment
from hsnb.server.command import CPU_CONTEXT, CPU_TOTAL_TOKENS, resolve_device

REFUSED_FROM = 6  # a prompt of min(context_length, max_total_num_tokens) - 6 tokens is refused, one of a token less is taken


@dataclass(frozen=True)
class Limits:
    """What bounds a prompt, in tokens. None: not known before the server runs (a GPU's KV cache is sized by what is left of it)."""

    context_length: int | None
    max_total_num_tokens: int | None = None
    page_size: int = 1
    max_req_input_len: int | None = None  # a running server's own word

    @property
    def longest(self) -> int | None:
        """Return the most tokens a prompt may have; None when nothing is known.

        With pages of several tokens a prompt must leave a page free besides its own, or it waits for ever (PrefillAdder of
        managers/schedule_policy.py): the one kind that is not refused, and never answered.
        """
        bounds = [n - REFUSED_FROM - 1 for n in (self.context_length, self.max_total_num_tokens) if n]
        if self.max_req_input_len:
            bounds.append(self.max_req_input_len - 1)
        if self.max_total_num_tokens and self.page_size > 1:
            bounds.append(self.max_total_num_tokens - 2 * self.page_size)
        return max(0, min(bounds)) if bounds else None

    def words(self) -> str:
        """Return what the bound comes from, for errors and tables."""
        known = {"context_length": self.context_length, "max_total_num_tokens": self.max_total_num_tokens}
        return ", ".join(f"{name} {value}" if value else f"{name} known once the server runs" for name, value in known.items())


def limits_of(deployment: Deployment) -> Limits:
    """Return what the params and the model's config say; the server may turn out to have less room, never more."""
    server, own = deployment.server, deployment.model_shape().context_length
    if resolve_device(server.device) == "cpu":  # where hsnb sets both, so that the KV cache fits into a small machine
        own, total = min(own or CPU_CONTEXT, CPU_CONTEXT), server.max_total_tokens or CPU_TOTAL_TOKENS
    else:
        total = server.max_total_tokens
    return Limits(server.context_length or own, total, _page_size(server.flags))


def server_limits(info: dict[str, Any]) -> Limits:
    """Return what a running server says of itself in /server_info."""
    names = ("context_length", "max_total_num_tokens", "max_req_input_len")
    context, total, longest = (int(info[name]) if info.get(name) else None for name in names)
    return Limits(context, total, int(info.get("page_size") or 1), longest)


def _page_size(flags: dict[str, Any]) -> int:
    return int(next((value for name, value in flags.items() if name.replace("_", "-").lstrip("-") == "page-size"), 1))
