"""Samples as text, with the trained tokens told apart: the quickest look at whether a mask is where it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Text:
    """One sample: runs of (trained?, text) of its first tokens; `tokens` in all, `shown` of them here."""

    name: str
    runs: tuple[tuple[bool, str], ...]
    tokens: int
    trained: int
    shown: int

    def html(self) -> str:
        """Return it as HTML: its head, and `marked` below it."""
        parts = marked(self.runs)
        more = f" … {self.tokens - self.shown:,} more tokens" if self.tokens > self.shown else ""
        head = f"{escape(self.name)}: {self.tokens:,} tokens, {self.trained:,} trained"
        return f'<p><b>{head}</b></p><pre style="white-space:pre-wrap;overflow-wrap:anywhere">{parts}{more}</pre>'


def marked(runs: Iterable[tuple[bool, str]]) -> str:
    """Return runs of text as HTML, the trained ones underlined and in brackets: in a dark page, and without any colour, too."""
    return "".join(f"<ins>⟦{escape(text)}⟧</ins>" if trained else escape(text) for trained, text in runs)


def text_of(name: str, ids: Sequence[int], mask: Sequence[int], decode: Decode, most: int = 400) -> Text:
    """Decode the first `most` tokens of a sample in runs of equal mask (token by token would cut letters of several tokens)."""
    pairs = list(zip(ids[:most], mask[:most], strict=True))
    runs = tuple((bool(on), decode([i for i, _ in run])) for on, run in groupby(pairs, key=lambda pair: bool(pair[1])))
    return Text(name, runs, len(ids), int(sum(bool(m) for m in mask)), len(pairs))


def decoder(model: str | Path | None) -> tuple[Decode, str]:
    """Return (decode, "") for the model folder's tokenizer.json, else one that shows the ids, and why."""
    file = Path(model) / "tokenizer.json" if model else None
    if file is not None and file.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return (lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)), ""
    why = f"no {file}" if file is not None else "the folder names no model"
    return (lambda ids: " ".join(map(str, ids)) + " "), f"token ids are shown: {why}"
