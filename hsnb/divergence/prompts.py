"""The prompts that two parties are compared on: plain text, code, a conversation with its special tokens."""

from __future__ import annotations

from pathlib import Path

from hsnb.boundaries import text_config
from hsnb.params import read_config
from hsnb.probe.witness import SENTENCE

CODE = 'def distance(a: list[float], b: list[float]) -> float:\n    """Return the Euclidean distance."""\n    return sum((x - y) ** 2 for x, y in zip(a, b)) ** 0.5\n'
PROSE = (
    "Boundary zero is the embedding of the tokens, and the last boundary is what the final norm turns into the logits of the next "
    "token. In between, every decoder layer reads the residual stream, adds what attention found, and then adds what its MLP made of it."
)
TALK = [
    {"role": "user", "content": "What is a residual stream?"},
    {"role": "assistant", "content": "The sum that every layer of a transformer reads from and writes to."},
]
LONGEST, LONGEST_WIDE, WIDE = 64, 24, 2048  # tokens a prompt; fewer where a row is wider than 2048 numbers


def default_prompts(model: Path) -> tuple[dict[str, list[int]], object]:
    """Return ({name: token ids}, the tokenizer) for `model`; the conversation only where there is a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    wide = int(text_config(read_config(model))["hidden_size"]) > WIDE
    texts = {"sentence": SENTENCE, "prose": PROSE, "code": CODE}
    prompts = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in texts.items()}
    if tokenizer.chat_template:
        prompts["conversation"] = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    longest = LONGEST_WIDE if wide else LONGEST
    return {name: [int(i) for i in ids][:longest] for name, ids in prompts.items()}, tokenizer
