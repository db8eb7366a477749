"""Ask a server for the probe's prompts and keep what it answered; the dumps stay on disk until they are judged."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hsnb.collect import collect
from hsnb.errors import ParamsError

SENTENCE = "The quick brown fox jumps over the lazy dog. This is a test sentence with multiple tokens to verify hidden state extraction."


@dataclass(frozen=True)
class Prompt:
    """A prompt by its token ids. `text`: its words are text, so its logprobs mean something (ids 1..10 are special tokens somewhere)."""

    name: str
    token_ids: tuple[int, ...]
    text: bool = True


@dataclass(frozen=True)
class Witness:
    """What the server said of one prompt, and where its dump lies.

    `logprobs`: log p of each token but the first [S - 1], then of the answer's first token; in nats, the server's own.
    """

    prompt: Prompt
    request_id: str
    dump: Path
    answer_id: int
    logprobs: torch.Tensor


def fixed_prompts(model: Path, extra: Sequence[str | Sequence[int]] = ()) -> list[Prompt]:
    """Return the probe's two prompts and `extra` ones (texts or lists of token ids). Raises ParamsError for an empty one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    prompts = [Prompt("ids 1..10", tuple(range(1, 11)), text=False)]
    for name, content in [("fox sentence", SENTENCE), *((f"prompt {n}", p) for n, p in enumerate(extra, 1))]:
        ids = tokenizer(content, add_special_tokens=False)["input_ids"] if isinstance(content, str) else list(content)
        if len(ids) < 2 or not all(isinstance(i, int) and 0 <= i < len(tokenizer) for i in ids):
            raise ParamsError(
                got=f"{name}: {content!r}",
                expected=f"a text, or a list of at least two token ids below {len(tokenizer)}",
                likely="an empty prompt, or ids of another model",
                next="-p prompts '[\"a text\", [1, 2, 3]]'",
            )
        prompts.append(Prompt(name, tuple(ids)))
    return prompts


def ask(server, prompts: Sequence[Prompt]) -> list[Witness]:
    """Send each prompt alone and return the witnesses. Raises ServerError or CaptureError when one gets no answer or no dump."""
    witnesses = []
    with server.client() as client:
        for prompt in prompts:
            rid = f"hsnb-probe-{uuid.uuid4().hex}"
            reply = client.generate(list(prompt.token_ids), rid=rid, logprobs=True)
            values = [*reply.input_logprobs[1:], reply.output_logprobs[0]]
            dump = collect(server.spool, rid, server.armed[0].format)
            witnesses.append(Witness(prompt, rid, dump, reply.output_ids[0], torch.tensor(values, dtype=torch.float64)))
    return witnesses
