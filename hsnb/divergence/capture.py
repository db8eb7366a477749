"""Take the states of the same prompts from SGLang (through hsnb, or through its own option), from vLLM, and from transformers."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hsnb import reference as hf
from hsnb.collect import collect, free
from hsnb.divergence.states import States, labels
from hsnb.dumps import open_dump
from hsnb.errors import CaptureError
from hsnb.params import Deployment
from hsnb.server import Server
from hsnb.weights import Head

Prompts = Sequence[Sequence[int]]
OWN_OPTION_SINCE = (0, 5, 23)  # --enable-return-aux-hidden-states


def through_hsnb(server: Server, prompts: Prompts) -> tuple[States, dict[int, float]]:
    """Return the boundaries that `server` is armed with, and its noise: {boundary: relative L2, alone against in a batch}.

    Each prompt is asked alone, with its logprobs, then all of them at once.
    """
    with server.client() as client:
        alone = [_ask(server, client, ids) for ids in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            batched = [f.result() for f in [pool.submit(_ask, server, client, ids) for ids in prompts]]
    armed = server.armed[0]
    states = States(
        name=f"SGLang {server.sglang_version} (hsnb)",
        token_ids=tuple(torch.tensor(ids) for ids in prompts),
        tensors=tuple(tensor for tensor, _ in alone),
        columns=labels(armed.boundaries),
        said=tuple(armed.boundaries),
        logprobs=tuple(values for _, values in alone),
        final=f"B_{armed.num_layers}" if armed.num_layers in armed.boundaries else "",
        dtype=armed.dtype,
    )
    noise = {k: _apart([a[:, n] for a, _ in alone], [b[:, n] for b, _ in batched]) for n, k in enumerate(armed.boundaries)}
    return states, noise


def _ask(server: Server, client, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rid = f"hsnb-divergence-{uuid.uuid4().hex}"
    reply = client.generate(list(ids), rid=rid, logprobs=True)
    path = collect(server.spool, rid, server.armed[0].format)
    dump = open_dump(path)
    if not torch.equal(dump.token_ids, torch.tensor(ids)):
        raise CaptureError(
            got=f"{path}: other token ids than were sent", expected="the ids sent", likely="a damaged dump", next="hsnb probe"
        )
    tensor = torch.stack([dump.state(k).clone() for k in dump.boundaries], dim=1)
    free(path)
    return tensor, torch.tensor(reply.input_logprobs[1:], dtype=torch.float64)


def _apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Return the median over tokens, first ones left out, of |a - b| / |b|."""
    x, y = torch.cat([t[1:] for t in a]).double(), torch.cat([t[1:] for t in b]).double()
    return ((x - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-30)).median().item()


def through_sglangs_option(deployment: Deployment, ids: Sequence[int], prompts: Prompts, log_dir: Path, progress=None) -> States:
    """Return what a server without hsnb hands out for `ids` by SGLang's own user-facing option (0.5.23 and newer).

    The states come as JSON, so ask for little. `said` are the ids: which boundaries they mean is to be found.
    """
    flags = {
        **deployment.server.flags,
        "enable-return-aux-hidden-states": True,
        "speculative-algorithm": "EAGLE3",
        "return-aux-hidden-state-layer-ids": list(ids),
    }
    asked = deployment.model_copy(update={"server": deployment.server.model_copy(update={"flags": flags, "port": 0, "spool": ""})})
    with Server.start(asked, log_dir=log_dir, capture=False, progress=progress) as server, server.client() as client:
        tensors = [_handed_out(client, prompt, len(ids)) for prompt in prompts]
        version = server.sglang_version
    return States(
        name=f"SGLang {version}",
        token_ids=tuple(torch.tensor(p) for p in prompts),
        tensors=tuple(tensors),
        columns=tuple(f"id {i}" for i in sorted(ids)),
        said=tuple(sorted(ids)),
        dtype=deployment.server.dtype,
    )


def _handed_out(client, prompt: Sequence[int], columns: int) -> torch.Tensor:
    body = {"input_ids": list(prompt), "return_hidden_states": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    reply = client.request("POST", "/generate", body)
    packed = torch.tensor(reply["meta_info"]["hidden_states"][0], dtype=torch.float32)  # [S, n * H]
    if packed.ndim != 2 or packed.shape[0] != len(prompt) or packed.shape[1] % columns:
        raise CaptureError(
            got=f"hidden_states of shape {list(packed.shape)} for {len(prompt)} tokens and {columns} ids",
            expected=f"[{len(prompt)}, {columns} x H]",
            likely="an SGLang whose own option packs its states otherwise",
            next="compare with another version of SGLang",
        )
    return packed.unflatten(1, (columns, -1))


def through_vllm(model: Path, ids: Sequence[int], prompts: Prompts, dtype: str, out: Path, progress=None) -> States:
    """Return what vLLM hands out for its user-facing eagle_aux_hidden_state_layer_ids, with its own logprobs."""
    from hsnb import vllm

    taken = vllm.capture(model, prompts, ids, dtype=dtype, out=out, progress=progress)
    layers = taken.num_layers
    return States(
        name=f"vLLM {taken.vllm_version}",
        token_ids=tuple(torch.tensor(p) for p in prompts),
        tensors=tuple(dump.states().clone() for dump in taken.dumps),
        columns=tuple(f"id {i}" for i in sorted(ids)),
        said=tuple(sorted(ids)),
        logprobs=tuple(torch.tensor(p.logprobs, dtype=torch.float64) for p in taken.prompts),
        final=f"id {layers}" if layers in ids else "",
        dtype=dtype,
    )


def through_transformers(model: Path, prompts: Prompts, dtype: str = "float32") -> States:
    """Return B_0 .. B_L and norm(B_L) of transformers, and its logprobs."""
    net, head = hf.load(model, dtype), Head.load(model)
    tensors, logprobs, last = [], [], 0
    for ids in prompts:
        states, logits = hf.states(net, torch.tensor(ids))
        last = len(states) - 1
        tensors.append(torch.stack([*states, head.normed(states[-1]).to(states[-1].dtype)], dim=1))
        following = torch.tensor(list(ids[1:]))
        logprobs.append(logits[:-1].double().log_softmax(-1).gather(1, following[:, None])[:, 0])
    import transformers

    return States(
        name=f"transformers {transformers.__version__}",
        token_ids=tuple(torch.tensor(ids) for ids in prompts),
        tensors=tuple(tensors),
        columns=(*labels(range(last + 1)), f"norm(B_{last})"),
        said=(*range(last + 1), None),
        logprobs=tuple(logprobs),
        final=f"B_{last}",
        dtype=dtype,
    )
