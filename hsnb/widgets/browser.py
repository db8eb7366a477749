"""The dump browser: one sample, one boundary, some tokens; their norms, largest values, neighbours and text."""

from __future__ import annotations

from html import escape
from pathlib import Path

import ipywidgets
import torch

from hsnb import figures
from hsnb.health.text import decoder, text_of
from hsnb.trainers import TrainingSample
from hsnb.widgets.explorer import Explorer, choice, table_html
from hsnb.widgets.samples import Samples

VIEWS = ("norms", "largest values", "neighbours", "text")
MOST = 64  # tokens of a similarity map


def dumps(path: str | Path) -> Explorer:
    """Browse the samples of a folder of training files. Raises DumpError for a folder of no known layout."""
    samples = Samples(path)
    decode, note = decoder(samples.claims.model or None)
    names = samples.columns
    sample = ipywidgets.BoundedIntText(value=0, min=0, max=len(samples) - 1, description="sample")
    tokens = ipywidgets.IntRangeSlider(value=(0, 511), min=0, max=4095, description="tokens", continuous_update=False)

    def draw(sample: int, boundary: int, view: str, tokens: tuple[int, int]) -> str:
        one = samples.read(sample)
        first, last = min(tokens[0], one.num_tokens - 1), min(tokens[1] + 1, one.num_tokens)
        head = f"<p>{escape(one.name)}: {one.num_tokens:,} tokens, width {one.hidden_size:,}, {escape(names[boundary])}</p>"
        if view == "text":
            mask = one.loss_mask.tolist() if one.loss_mask is not None else [0] * one.num_tokens
            said = f"<p>Trained tokens are underlined and in ⟦brackets⟧. {escape(note)}</p>"
            return head + said + text_of(one.name, one.token_ids.tolist(), mask, decode).html()
        states = one.columns[boundary][first:last].float()
        if view == "norms":
            return head + figures.image(figures.norms_of_tokens(states.norm(dim=-1).numpy(), first, names[boundary]).figure)
        if view == "largest values":
            return head + table_html(largest(one, states, first, decode))
        states = states[:MOST]
        return head + figures.image(figures.similarity(cosines(states).numpy(), first, names[boundary]).figure)

    boundary = choice("boundary", [(name, k) for k, name in enumerate(names)])
    return Explorer({"sample": sample, "boundary": boundary, "view": choice("view", VIEWS), "tokens": tokens}, draw)


def largest(sample: TrainingSample, states: torch.Tensor, first: int, decode, most: int = 12):
    """Return the largest values of states [n, H] as a table; `first`: the position of its first row."""
    import pandas as pd

    values, at = states.abs().flatten().topk(min(most, states.numel()))
    scale = states.abs().median().item()
    rows = []
    for size, k in zip(values.tolist(), at.tolist(), strict=True):
        row, dimension = divmod(k, states.shape[1])
        token = decode([int(sample.token_ids[first + row])]) if sample.token_ids is not None else "unknown"
        rows.append(
            {
                "position": first + row,
                "token": token,
                "dimension": dimension,
                "value": states[row, dimension].item(),
                "times the median": size / scale,
            }
        )
    return pd.DataFrame(rows)


def cosines(states: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each row of states [n, H] with each other one, [n, n]."""
    unit = states / states.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return unit @ unit.T
