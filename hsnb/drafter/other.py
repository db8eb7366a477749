"""The same samples' states from the other engine: what numerics alone cost a drafter, when the boundaries are the same.

vLLM runs in an environment and a process of its own (`make setup-vllm`), is asked in its own numbering, and is given token ids.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from hsnb.boundaries import from_boundaries, model_family
from hsnb.drafter.states import SPECULATORS, Sample, StatesFolder, open_states, write_table
from hsnb.errors import DumpError
from hsnb.params import num_layers, read_config
from hsnb.paths import write_json
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
        if tuple(taken.boundaries) != wanted or got is None or got.tolist() != sample.ids:
            raise DumpError(
                got=f"vLLM's states {n}: boundaries {list(taken.boundaries)}, token ids {'equal' if got is not None else 'missing'}",
                expected=f"boundaries {list(wanted)} of the sample's own token ids",
                likely="another version of vLLM, with another numbering",
                next="hsnb run 02_divergence compares both engines, boundary by boundary",
            )
        meta = {"hsnb_format": "1", "boundaries": str(list(wanted[:-1])), "final": "pre"}
        states = {"hidden_states": dump.states().to(torch.bfloat16).contiguous(), "token_ids": got.contiguous()}
        save_file(states, out / SPECULATORS.sample_file(n), metadata=meta)
    about = {"hsnb_format": 1, "layout": "speculators", "boundaries": list(wanted[:-1]), "final": "pre", "model": str(model)}
    write_json(out / "hsnb.json", {**about, "num_layers": layers, "engine": f"vLLM {taken.vllm_version}"})
    return open_states(out)
