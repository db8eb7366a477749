"""Conversations to token ids and loss masks, by the model's own chat template.

Nothing about any model's template is known here: where an answer begins and ends is found by rendering the beginnings of the
conversation, and what cannot be found that way is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hsnb.errors import DataError, ModelError
from hsnb.params import Deployment

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}  # ShareGPT's names too
# What a message may say besides its text: to leave one of these out would render another conversation, or train what is not to be.
_MEANT = ("tool_calls", "function_call", "tool_call_id", "reasoning_content", "reasoning", "thinking", "images", "weight", "tools")


def tokenise(tokenizer: Any, talks: Sequence[Any], start: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield (ids, loss mask) of each conversation: the model's own template, 1 on every assistant turn up to its end-of-turn token.

    The mask is found by rendering the beginnings of the conversation, and refused (DataError) where the ids of a beginning are
    not the beginning of the ids. `start` is the number of the first conversation, for the errors.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    texts: list[str] = []
    turns: list[tuple[int, list[int]]] = []  # where each conversation's texts begin, and which of its messages are answers
    for sample, talk in enumerate(talks, start):
        messages = _messages(sample, talk)
        answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        turns.append((len(texts), answers))
        try:
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
            for turn in answers:
                texts.append(tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True))
                texts.append(tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False))
        except Exception as error:  # jinja's own errors, and whatever the template raises
            raise data_error(
                f"sample {sample}: the chat template says {str(error) or type(error).__name__}",
                "a conversation that the model's template renders",
                "roles in an order that the template does not know",
                "mend the sample, or bring input_ids and loss_mask",
            ) from error
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"] if texts else []
    for sample, (at, answers) in enumerate(turns, start):
        ids = encoded[at]
        mask = np.zeros(len(ids), np.int64)
        for order, turn in enumerate(answers):
            prompt, so_far = encoded[at + 1 + 2 * order], encoded[at + 2 + 2 * order]
            if ids[: len(prompt)] != prompt or ids[: len(so_far)] != so_far:
                raise data_error(
                    f"sample {sample}, message {turn}: the ids up to this answer are not the beginning of the conversation's ids",
                    "a template that renders one turn after the other",
                    "an answer that begins with blanks, or a template that leaves out earlier reasoning or adds to the prompt",
                    "strip the answers, or bring input_ids and loss_mask",
                )
            mask[len(prompt) : _answer_end(tokenizer, so_far, len(prompt), special)] = 1
        yield ids, mask


def _answer_end(tokenizer: Any, ids: list[int], start: int, special: set[int]) -> int:
    """Return where the answer at `start` ends: after its end-of-turn token, without the line break that templates put behind it."""
    last = next((at for at in range(len(ids) - 1, start - 1, -1) if ids[at] in special), None)
    return len(ids) if last is None or tokenizer.decode(ids[last + 1 :]).strip() else last + 1


def _messages(sample: int, talk: Any) -> list[dict[str, str]]:
    """Return one conversation as role and content, from either spelling."""
    messages = []
    for turn, message in enumerate(talk if isinstance(talk, list) else []):
        given = message if isinstance(message, dict) else {}
        said = given.get("role") or given.get("from")
        content = given["content"] if given.get("content") is not None else given.get("value")
        role = _ROLES.get(said) if isinstance(said, str) else None
        if isinstance(said, str) and role is None and isinstance(content, str):
            raise data_error(
                f"sample {sample}, message {turn} has the role {said!r}",
                f"one of {', '.join(_ROLES)}",
                "tool results or another data set's names: a template renders an unknown role as something else, or leaves it out",
                "rename the role, or bring input_ids and loss_mask",
            )
        if meant := [name for name in _MEANT if given.get(name) not in (None, "", [], {}) and (name, given[name]) != ("weight", 1)]:
            raise data_error(
                f"sample {sample}, message {turn} has {', '.join(meant)}",
                "role and content only",
                "tool calls, reasoning or images, which would be left out, or a turn that is not to be trained",
                "render it with the tool that made it, and bring input_ids and loss_mask",
            )
        if not isinstance(role, str) or not isinstance(content, str):
            raise data_error(
                f"sample {sample}, message {turn} is {str(message)[:60]}",
                'a role and a content of text ("from" human | gpt | system and "value" are known too)',
                "images, tool calls, or other names for the two",
                "mend the sample, or bring input_ids and loss_mask",
            )
        messages.append({"role": role, "content": content})
    if not messages:
        raise data_error(
            f"sample {sample} without messages", "at least one message", "an empty conversation", "remove the sample from the source"
        )
    return messages


def load_tokenizer(deployment: Deployment) -> Any:
    """Return the model's tokenizer. Raises ModelError when it has none, or none with a chat template."""
    from transformers import AutoTokenizer

    folder = deployment.model_path()
    trust = any(deployment.server.flags.get(name) is True for name in ("trust-remote-code", "trust_remote_code"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
    except (OSError, ValueError) as error:
        reason, next_step = str(error).splitlines()[0], "set trust-remote-code: true below server.flags if its code is to be run"
        raise ModelError(
            got=f"{folder}: {reason}", expected="a tokenizer", likely="files missing, or code of its own", next=next_step
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(
            got=f"{folder}: no chat template",
            expected="a tokenizer with one, since the samples are conversations",
            likely="a base model",
            next="bring input_ids and loss_mask instead of conversations",
        )
    return tokenizer


def data_error(got: str, expected: str, likely: str, next: str) -> DataError:
    """Return the DataError of these four parts (the names would fill the page where samples are checked)."""
    return DataError(got=got, expected=expected, likely=likely, next=next)
