"""What one party (an engine, transformers, a folder of files) says of the same prompts: columns of states, and what it calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hsnb.errors import DumpError


@dataclass(frozen=True)
class States:
    """States of n columns on some prompts.

    `tensors`: one [S, n, H] a prompt, in the party's dtype. `columns`: what the party calls them ("B_2", "id 2", "aux 0").
    `said`: the number that the party gives each column, a boundary or an id of its own; None: no number. `logprobs`: the party's
    own log p of each next token [S - 1] (nats, float64) a prompt, where it gives them. `final`: the column that is said to be the
    last layer's output, before or after the norm ("" when there is none).
    """

    name: str
    token_ids: tuple[torch.Tensor, ...]
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    columns: tuple[str, ...] = ()
    said: tuple[int | None, ...] = ()
    logprobs: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    final: str = ""
    dtype: str = "float32"

    def __post_init__(self):
        for ids, states in zip(self.token_ids, self.tensors, strict=True):
            if states.shape[:2] != (len(ids), len(self.columns)) or len(self.said) != len(self.columns):
                raise DumpError(
                    got=f"{self.name}: states {list(states.shape)} for {len(ids)} tokens and the columns {', '.join(self.columns)}",
                    expected=f"[{len(ids)}, {len(self.columns)}, H]",
                    likely="the engine returned fewer states than it was asked for",
                    next="ask for fewer ids; a last one past the model's layers is dropped silently by some engines",
                )

    def column(self, name: str) -> list[torch.Tensor]:
        """Return one column [S, H] of each prompt."""
        at = self.columns.index(name)
        return [t[:, at] for t in self.tensors]

    def numbered(self) -> dict[int, str]:
        """Return {number: column} of the columns that have one."""
        return {k: name for k, name in zip(self.said, self.columns, strict=True) if k is not None}

    def stacked(self, first: bool) -> torch.Tensor:
        """Return the first row of every prompt [P, n, H], or all the others [T, n, H], in float64.

        They are kept apart because a first token can outweigh all others: on SmolLM2 its norm at B_12 is 174 times the median.
        """
        return torch.cat([t[:1] if first else t[1:] for t in self.tensors]).double()


def same_prompts(a: States, b: States) -> None:
    """Raise DumpError unless both parties saw the same token ids."""
    for n, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if not torch.equal(x, y):
            raise DumpError(
                got=f"prompt {n}: {b.name} has other token ids than {a.name}",
                expected="the same ids, so that the states can be compared",
                likely="another tokenizer or chat template on one side",
                next="give both sides the same token ids",
            )
    widths = [p.tensors[0].shape[-1] for p in (a, b)]
    if widths[0] != widths[1]:
        raise DumpError(
            got=f"{a.name} of width {widths[0]} and {b.name} of {widths[1]}",
            expected="states of one model",
            likely="folders of two models",
            next="name folders of the same model",
        )
    if len(a.token_ids) != len(b.token_ids):
        raise DumpError(
            got=f"{len(a.token_ids)} prompts of {a.name} and {len(b.token_ids)} of {b.name}",
            expected="the same prompts",
            likely="one side was cut short",
            next="capture both again",
        )


def labels(boundaries: Sequence[int]) -> tuple[str, ...]:
    """Return "B_k" of each boundary."""
    return tuple(f"B_{b}" for b in boundaries)
