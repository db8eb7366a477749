"""The dump browser: one sample, one boundary, some tokens; their norms, largest values, neighbours and text."""

from __future__ import annotations

from html import escape
from pathlib import Path

import ipywidgets
import torch

from hsnb import figures
from hsnb.errors import HsnbError
from hsnb.health.text import decoder, text_of
from hsnb.show import token
from hsnb.trainers import TrainingSample
from hsnb.widgets.explorer import Explorer, choice, table_html
from hsnb.widgets.samples import Samples

VIEWS = ("norms", "largest values", "neighbours", "text")
MOST = 64  # tokens of a similarity map
FIRST = 512  # tokens that are shown at first, of a sample that has so many


def dumps(path: str | Path) -> Explorer:
    """Browse the samples of a folder of training files. Raises DumpError for a folder of no known layout."""
    samples = Samples(path)
    decode, note = decoder(samples.claims.model or None)
    names = samples.columns
    sample = ipywidgets.BoundedIntText(value=0, min=0, max=len(samples) - 1, description="sample")
    tokens = ipywidgets.IntRangeSlider(value=(0, FIRST - 1), min=0, max=FIRST - 1, description="tokens", continuous_update=False)
    end_at(tokens, samples, sample.value)
    sample.observe(lambda change: end_at(tokens, samples, change["new"]), "value")  # before the explorer's own, which draws

    def draw(sample: int, boundary: int, view: str, tokens: tuple[int, int]) -> str:
        one = samples.read(sample)
        first, last = tokens[0], tokens[1] + 1
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


def end_at(tokens: ipywidgets.IntRangeSlider, samples: Samples, sample: int) -> None:
    """Let the slider end at the sample's last token, and hold what was chosen; a range up to the old end goes on to the new one,
    or to FIRST tokens. A sample that cannot be read leaves it as it is: the picture's place says why.
    """
    try:
        last = samples.read(sample).num_tokens - 1
    except HsnbError:
        return
    low, high = tokens.value
    high = min(last, max(high, FIRST - 1) if high == tokens.max else high)
    with tokens.hold_trait_notifications():  # one picture, not one of a range that is half set
        tokens.max = last
        tokens.value = (min(low, high), high)


def largest(sample: TrainingSample, states: torch.Tensor, first: int, decode, most: int = 12):
    """Return the largest values of states [n, H] as a table; `first`: the position of its first row."""
    import pandas as pd

    values, at = states.abs().flatten().topk(min(most, states.numel()))
    scale = states.abs().median().item()
    rows = []
    for size, k in zip(values.tolist(), at.tolist(), strict=True):
        row, dimension = divmod(k, states.shape[1])
        text = token(decode([int(sample.token_ids[first + row])])) if sample.token_ids is not None else "unknown"
        rows.append(
            {
                "position": first + row,
                "token": text,
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
