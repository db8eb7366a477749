"""The text of a folder of states: what is under the mask, decoded; and which of it a short training and a judgement take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hsnb.drafter.states import Sample, StatesFolder
from hsnb.errors import DataError
from hsnb.health.text import marked


@dataclass(frozen=True)
class Decoded:
    """Rows as text: [(row, [(text, under the mask)])]."""

    rows: tuple[tuple[int, tuple[tuple[str, bool], ...]], ...]

    def _repr_html_(self) -> str:
        out = []
        for row, parts in self.rows:
            out.append(f"<p style='white-space:pre-wrap'>row {row}: {marked((on, text) for text, on in parts)}</p>")
        return "<p>What is trained on is underlined and in ⟦brackets⟧.</p>" + "".join(out)


def decoded(states: StatesFolder, *, rows: int = 2, most: int = 160) -> Decoded:
    """Decode the first `most` tokens of some rows, split where the loss mask changes. Raises DataError for an empty folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(states.model)
    out = []
    for row in _rows(states)[:rows]:
        ids, mask = (states.table[row][name][:most].tolist() for name in ("input_ids", "loss_mask"))
        parts, begin = [], 0
        for i in range(1, len(ids) + 1):
            if i == len(ids) or mask[i] != mask[begin]:
                parts.append((tokenizer.decode(ids[begin:i]), bool(mask[begin])))
                begin = i
        out.append((row, tuple(parts)))
    return Decoded(tuple(out))


def pick(states: StatesFolder, *, training: int, held_out: int, answer_tokens: int) -> tuple[list[Sample], list[list[int]]]:
    """Return (samples to train on, prompts to judge on): first turns only, answers cut at `answer_tokens`.

    Rows whose states are extracted are trained on; prompts are taken from others where there are any, so that nothing that is
    judged was trained on. The choice is the same in every run. Raises DataError when there are too few rows.
    """
    extracted = _rows(states)
    others = sorted(set(range(len(states.table))) - set(extracted))
    random.Random(7).shuffle(extracted)
    random.Random(7).shuffle(others)
    if len(others) < held_out:
        short = held_out - len(others)
        others, extracted = others + extracted[:short], extracted[short:]
    first = [sample for row in extracted[: 2 * training] if (sample := _first_turn(states, row, answer_tokens))][:training]
    prompts = [list(s.prompt) for row in others[: 2 * held_out] if (s := _first_turn(states, row, answer_tokens))][:held_out]
    if not first or not prompts:
        raise DataError(
            got=f"{states.path}: {len(first)} samples to train on and {len(prompts)} prompts",
            expected=f"{training} and {held_out}",
            likely="too few rows extracted, or none with a prompt before its mask",
            next="extract another shard",
        )
    return first, prompts


def _rows(states: StatesFolder) -> list[int]:
    if not states.rows:
        raise DataError(
            got=f"{states.path}: no row has its states",
            expected="at least one extracted shard",
            likely="03_extract was not run yet, or with another run's name",
            next="papermill 03_extract.ipynb -p shard 0",
        )
    return list(states.rows)


def _first_turn(states: StatesFolder, row: int, answer_tokens: int) -> Sample | None:
    """Return the prompt before the mask and the answer under it, cut; None when the row has no prompt or no answer."""
    ids, mask = states.table[row]["input_ids"].tolist(), states.table[row]["loss_mask"].tolist()
    if 1 not in mask or mask[0]:
        return None
    begin = mask.index(1)
    end = mask.index(0, begin) if 0 in mask[begin:] else len(mask)
    return Sample(tuple(ids[:begin]), tuple(ids[begin : min(end, begin + answer_tokens)]), row)


def answers_text(samples: Sequence[Sample], states: StatesFolder, rows: int = 2) -> Decoded:
    """Decode prompts and answers, the answers marked."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(states.model)
    shown = ((n, ((tokenizer.decode(s.prompt), False), (tokenizer.decode(s.answer), True))) for n, s in enumerate(samples[:rows]))
    return Decoded(tuple(shown))
