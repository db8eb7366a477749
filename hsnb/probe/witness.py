"""Ask a server all that the probe needs and keep what it answered; the dumps stay on disk until they are judged."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from hsnb.collect import collect, free
from hsnb.errors import ParamsError
from hsnb.patch.armed import Armed

SENTENCE = "The quick brown fox jumps over the lazy dog. This is a test sentence with multiple tokens to verify hidden state extraction."
GREEDY_TOKENS = 16
LONGEST_CHUNK = 2048  # tokens; a prompt longer than a larger chunk would take minutes on a CPU
TAP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Prompt:
    """A prompt by its token ids. `text`: its words are text, so its logprobs mean something (ids 1..10 are special tokens somewhere)."""

    name: str
    token_ids: tuple[int, ...]
    text: bool = True


@dataclass(frozen=True)
class Witness:
    """What the server said of one prompt, and where its files lie.

    `logprobs`: log p of each token but the first, then of the answer's first token [S], in nats, the server's own. `tap`: the
    second tap's file, None when the server wrote none. `ranks`: every rank's digests.
    """

    prompt: Prompt
    request_id: str
    dump: Path
    tap: Path | None
    ranks: tuple[Path, ...]
    text: str
    output_ids: tuple[int, ...]
    logprobs: torch.Tensor = field(repr=False)

    @property
    def next_ids(self) -> torch.Tensor:
        """Return the token after each row: int64 [S]."""
        return torch.tensor([*self.prompt.token_ids[1:], self.output_ids[0]])

    def answer(self) -> tuple:
        """Return all that must not change with the capture: text, ids, and the logprobs as the server gave them."""
        return self.text, self.output_ids, tuple(self.logprobs.tolist())


@dataclass(frozen=True)
class Evidence:
    """All that one probe asked. `batched` and `long` hold the sentence in a batch, and at the beginning of a prompt of several chunks."""

    armed: tuple[Armed, ...]
    spool: Path
    witnesses: tuple[Witness, ...]  # each alone; the second is the sentence
    greedy: Witness  # the sentence and the server's greedy answer to it
    batched: Witness
    long: Witness | None  # None: a chunk is longer than what is worth sending
    plain: tuple[tuple, tuple]  # the sentence's answer under an id that is not captured, twice
    bystanders: tuple[Witness, ...] = ()

    @property
    def sentence(self) -> Witness:
        return self.witnesses[1]

    def free(self) -> None:
        """Remove everything from the spool."""
        for witness in (*self.witnesses, self.greedy, self.batched, *([self.long] if self.long else []), *self.bystanders):
            for path in (witness.dump, witness.tap, *witness.ranks):
                if path:
                    free(path)


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
                expected=f"a text of two tokens or more, or a list of at least two token ids below {len(tokenizer)}",
                likely="an empty prompt, or ids of another model",
                next="-p prompts '[\"a text\", [1, 2, 3]]'",
            )
        prompts.append(Prompt(name, tuple(ids)))
    return prompts


def ask(server, client, prompt: Prompt, max_new_tokens: int = 1) -> Witness:
    """Send one prompt and return its witness. Raises ServerError or CaptureError when it gets no answer or no dump."""
    rid = f"hsnb-probe-{uuid.uuid4().hex}"
    reply = client.generate(list(prompt.token_ids), rid=rid, logprobs=True, max_new_tokens=max_new_tokens)
    values = [*reply.input_logprobs[1:], reply.output_logprobs[0]]
    dump = collect(server.spool, rid, server.armed[0].format)
    stem = xxhash.xxh3_128_hexdigest(rid.encode())
    names = [server.spool / f"{stem}.tap", *(server.spool / f"{stem}.rank-{a.rank}.json" for a in server.armed)]
    end = time.monotonic() + TAP_TIMEOUT_S  # written just after the dump
    while not all(p.exists() for p in names) and time.monotonic() < end:
        time.sleep(0.01)
    tap, *ranks = (p if p.exists() else None for p in names)
    logprobs = torch.tensor(values, dtype=torch.float64)
    return Witness(prompt, rid, dump, tap, tuple(r for r in ranks if r), reply.text, tuple(reply.output_ids), logprobs)


def gather(server, prompts: Sequence[Prompt], repeat: int = 1) -> Evidence:
    """Ask each prompt alone, then the sentence in a batch, in chunks, and under an id that is not captured."""
    sentence, armed = prompts[1], server.armed[0]
    with server.client() as client:
        witnesses = [ask(server, client, p, GREEDY_TOKENS if n == 1 else 1) for n, p in enumerate([*prompts] * repeat)]
        plain = tuple(_plain(client, sentence) for _ in range(2))
        answer = Prompt("fox sentence and its answer", (*sentence.token_ids, *witnesses[1].output_ids))
        greedy = ask(server, client, answer)
        chunk = int(armed.server_args.get("chunked_prefill_size") or 0)
        size = chunk + len(sentence.token_ids)
        long = None
        if 0 < chunk <= LONGEST_CHUNK and size < int(server.info.get("context_length") or 0):
            long = ask(
                server, client, Prompt("fox sentence in chunks", (sentence.token_ids * (size // len(sentence.token_ids) + 1))[:size])
            )
        others = [Prompt(f"bystander {n}", sentence.token_ids[n:] + sentence.token_ids[:n]) for n in range(1, 8)]
        with ThreadPoolExecutor(len(others) + 1) as pool:
            flying = [pool.submit(ask, server, client, p) for p in (*others[:3], sentence, *others[3:])]
            together = [f.result() for f in flying]
    return Evidence(
        tuple(server.armed),
        server.spool,
        tuple(witnesses),
        greedy,
        together[3],
        long,
        plain,
        tuple(w for n, w in enumerate(together) if n != 3),
    )


def _plain(client, prompt: Prompt) -> tuple:
    reply = client.generate(list(prompt.token_ids), rid=f"plain-{uuid.uuid4().hex}", logprobs=True, max_new_tokens=GREEDY_TOKENS)
    return reply.text, tuple(reply.output_ids), (*reply.input_logprobs[1:], reply.output_logprobs[0])
