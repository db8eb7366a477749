"""The same samples' states from the other engine: what numerics alone cost a drafter, when the boundaries are the same.

vLLM runs in an environment and a process of its own (`make setup-vllm`), is asked in its own numbering, and is given token ids.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from hsnb.boundaries import from_boundaries, model_family
from hsnb.drafter.states import Sample, StatesFolder, open_states, write_about, write_states, write_table
from hsnb.errors import DumpError
from hsnb.params import num_layers, read_config
from hsnb.progress import Progress

VLLM = "vllm"  # in the place of another engine's folder: it is started for these very samples


def take_vllm(samples: Sequence[Sample], out: Path, aux: Sequence[int], model: Path, *, dtype: str = "float32") -> StatesFolder:
    """Write vLLM's states of `samples` to `out` (made anew), bfloat16: the boundaries `aux`, and B_L before the norm.

    Raises what hsnb.vllm.capture does, and DumpError when vLLM gives other boundaries or other tokens than it was asked for.
    """
    from hsnb import vllm

    config = read_config(model)
    layers = num_layers(config)
    wanted = (*sorted(aux), layers)
    ids = from_boundaries(wanted, "vllm", num_layers=layers, family=model_family(config))
    with Progress(None, unit="s", desc="vLLM") as progress:
        tell = lambda seconds, line: progress.advance(max(0, int(seconds) - progress.done), note=line[-100:])  # noqa: E731
        taken = vllm.capture(model, [s.ids for s in samples], ids, dtype=dtype, out=out.with_name(f"{out.name}-vllm"), progress=tell)
    shutil.rmtree(out, ignore_errors=True)
    write_table(out, samples)
    (out / "hidden_states").mkdir()
    for n, (sample, dump) in enumerate(zip(samples, taken.dumps, strict=True)):
        got = dump.token_ids
        same = got is not None and got.tolist() == sample.ids
        if tuple(taken.boundaries) != wanted or not same:
            raise DumpError(
                got=f"vLLM's states {n}: boundaries {list(taken.boundaries)}, token ids {'equal' if same else 'other or missing'}",
                expected=f"boundaries {list(wanted)} of the sample's own token ids",
                likely="another version of vLLM, with another numbering",
                next="hsnb run 02_divergence compares both engines, boundary by boundary",
            )
        write_states(out, n, dump.states().to(torch.bfloat16), got, wanted[:-1], "pre")
    write_about(out, wanted[:-1], "pre", model, layers, engine=f"vLLM {taken.vllm_version}")
    return open_states(out)
