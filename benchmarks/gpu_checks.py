"""The steps of a GPU run: each asks real servers something, and returns figures and tables."""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
import xxhash

from benchmarks.gpu_models import VOCAB_SIZE, llama_folder, reference_states
from benchmarks.gpu_probe import clear, probe_figures, prompt_ids, take, take_together
from benchmarks.gpu_results import Figure, Table, figure, plain
from benchmarks.gpu_servers import NO_MULTICAST, Fleet, Plan
from hsnb.demo import model_folder
from hsnb.demo.random_deepseek import VOCAB_SIZE as DEEPSEEK_VOCAB
from hsnb.patch.armed import read_armed
from hsnb.probe.bars import FP32_BAR, ROUNDING, middle, relative_l2

Found = tuple[list[Figure], list[Table]]
_ROUTES = "no bar: a random mixture of experts in half precision changes its routes with the last bit"


@dataclass
class Context:
    """What the steps share: the plan, the servers, where to compute, and what one step keeps for a later one."""

    plan: Plan
    fleet: Fleet
    out: Path = Path()  # of the results
    ends: float = math.inf  # monotonic: when what takes turns is to stop
    kept: dict = field(default_factory=dict)
    keep: Callable = lambda figures, tables: None
    _found: Found = ([], [])

    def tell(self, figures: list[Figure], tables: list[Table]) -> None:
        """Keep what a step has found so far: a run that is cut, or a step that fails, has it all the same."""
        self._found = (list(figures), list(tables))
        self.keep(*self._found)

    def take_found(self) -> Found:
        """Return what the last step told, once."""
        found, self._found = self._found, ([], [])
        return found

    @property
    def lengths(self) -> tuple[int, ...]:
        return (*self.plan.lengths, self.plan.long)


def noise_bar(dtype: str) -> float:
    """Return what batches and chunks may move a state by: sixteen roundings of the dtype (float32: as SGLang against transformers)."""
    return FP32_BAR if dtype == "float32" else 16 * ROUNDING[dtype]


def errors(plan: Plan, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the relative L2 of each token and column [S, C] of a to b, both [S, C, H]."""
    device = plan.device
    columns = [relative_l2(a[:, c].to(device), b[:, c].to(device)).cpu() for c in range(a.shape[1])]
    return torch.stack(columns, dim=1)


def column_table(title: str, names: list[str], e: torch.Tensor) -> Table:
    """Return one row a column: median, 99 of 100 and worst token, and how many tokens are equal bit for bit."""
    rows = []
    for c, name in enumerate(names):
        v = e[:, c]
        rows.append([name, plain(middle(v)), plain(v.quantile(0.99).item()), plain(v.max().item()), int((v == 0).sum()), len(v)])
    columns = ["state", "median token", "99 % of tokens", "worst token", "tokens equal bit for bit", "tokens"]
    return Table(title=title, columns=columns, units=["", *["relative L2"] * 3, "tokens", "tokens"], rows=rows)


def names_of(server) -> list[str]:
    """Return the names of a dump's columns."""
    return [*(f"B_{b}" for b in server.armed[0].boundaries), "final"]


# -- steps -------------------------------------------------------------------------------------------------------------


def probe_deepseek(ctx: Context) -> Found:
    """Every check of the probe on the mixture of experts."""
    plan, folder = ctx.plan, model_folder(ctx.plan.deepseek)
    noisy = "" if plan.deepseek_dtype == "float32" else _ROUTES
    server = ctx.fleet.get("deepseek")
    return probe_figures(server, plan.deepseek, folder, DEEPSEEK_VOCAB, plan.long, reference=False, noisy=noisy)


def probe_llama(ctx: Context) -> Found:
    """Every check of the probe on the dense model, transformers on the CPU included."""
    server = ctx.fleet.get(f"llama {ctx.plan.llama_dtypes[0]}")
    return probe_figures(server, "Llama", llama_folder(ctx.plan.llama), VOCAB_SIZE, ctx.plan.long, reference=True)


def together_deepseek(ctx: Context) -> Found:
    return _together(ctx, "deepseek", ctx.plan.deepseek, DEEPSEEK_VOCAB)


def together_llama(ctx: Context) -> Found:
    return _together(ctx, f"llama {ctx.plan.llama_dtypes[0]}", "Llama", VOCAB_SIZE)


def _together(ctx: Context, server_name: str, shown: str, vocab: int) -> Found:
    """Compare each prompt alone with itself, and with itself among others."""
    plan, server = ctx.plan, ctx.fleet.get(server_name)
    prompts = [prompt_ids(n, vocab, seed=n) for n in ctx.lengths]
    with server.client() as client:
        alone = [take(server, p, client) for p in prompts]
        again = [take(server, p, client) for p in prompts]
    many = take_together(server, prompts, prompt_ids(plan.chunk, vocab, seed=7))
    chunks = [json.loads(d.metadata["chunks"]) for d in (alone[-1], many[-1])]
    expected = [[0, plan.chunk], [plan.chunk, plan.long]]
    states = [[d.states() for d in dumps] for dumps in (alone, again, many)]
    ctx.kept[server_name] = (names_of(server), states[0][-1], len(chunks[0]))
    log = server.log.read_text(errors="replace")
    seen = [int(n) for n in re.findall(r"Prefill batch.*?#new-seq: (\d+)", log)]
    clear(server.spool)
    twice = sum(torch.equal(a, b) for a, b in zip(states[0], states[1], strict=True))
    e = torch.cat([errors(plan, b, a) for a, b in zip(states[0], states[2], strict=True)])
    dtype = server.armed[0].dtype
    gated = {"rule": "at most", "bar": noise_bar(dtype)} if shown == "Llama" or dtype == "float32" else {"note": _ROUTES}
    worst = max(middle(e[:, c]) for c in range(e.shape[1]))
    figures = [
        figure(f"{shown}: prompts equal bit for bit when sent twice, alone", twice, "prompts", "equal to", len(prompts), n=len(prompts)),
        figure(f"{shown}: most prompts in one prefill batch", max(seen, default=0), "prompts", "at least", 2),
        figure(f"{shown}: chunks of the {plan.long:,}-token prompt, alone", str(chunks[0]), "rows", "equal to", str(expected)),
        figure(f"{shown}: last row of the {plan.long:,}-token prompt, among others", chunks[1][-1][1], "row", "equal to", plan.long),
        figure(f"{shown}: alone against among others, median token, worst state", worst, "relative L2", n=len(e), **gated),
        figure(f"{shown}: alone against among others, worst token and state", e.max().item(), "relative L2", n=e.numel()),
    ]
    return figures, [column_table(f"{shown}: alone against among others", names_of(server), e)]


def chunked(ctx: Context) -> Found:
    """Compare a prompt in chunks with the same prompt in one piece (another server: its chunk holds the prompt whole)."""
    plan = ctx.plan

    def sent_to(name: str) -> tuple[list[str], torch.Tensor, int]:
        server = ctx.fleet.get(name)
        with server.client() as client:
            dump = take(server, prompt_ids(plan.long, DEEPSEEK_VOCAB, seed=plan.long), client)
        states, pieces = dump.states(), json.loads(dump.metadata["chunks"])
        clear(server.spool)
        return names_of(server), states, len(pieces)

    names, in_chunks, _ = ctx.kept.get("deepseek") or sent_to("deepseek")
    _, whole, pieces = sent_to("deepseek wide")
    e = errors(plan, in_chunks, whole)
    first, rest = e[: plan.chunk], e[plan.chunk :]
    gated = {"rule": "at most", "bar": noise_bar("float32")} if plan.deepseek_dtype == "float32" else {"note": _ROUTES}
    figures = [
        figure(f"{plan.deepseek}: pieces of the prompt in one piece", pieces, "chunks", "equal to", 1),
        figure(f"{plan.deepseek}: median token of the first chunk, worst state", _worst(first), "relative L2", n=len(first), **gated),
        figure(f"{plan.deepseek}: median token after it, worst state", _worst(rest), "relative L2", n=len(rest), **gated),
        figure(f"{plan.deepseek}: worst token and state", e.max().item(), "relative L2", n=e.numel()),
    ]
    return figures, [column_table(f"{plan.deepseek}: {plan.long:,} tokens in chunks of {plan.chunk:,} against one piece", names, e)]


def _worst(e: torch.Tensor) -> float:
    return max(middle(e[:, c]) for c in range(e.shape[1]))


def boundaries(ctx: Context, dtype: str) -> Found:
    """Compare every boundary of the dense model, in chunks, with transformers in float32 on the same weights, and with its neighbours."""
    plan, server = ctx.plan, ctx.fleet.get(f"llama {dtype}")
    ids = prompt_ids(plan.long, VOCAB_SIZE, seed=11)
    with server.client() as client:
        dump = take(server, ids, client)
    states, folder = dump.states(), llama_folder(plan.llama)
    armed = dump.boundaries
    clear(server.spool)
    true = reference_states(folder, torch.tensor(ids), "float32", plan.device)
    rounded = reference_states(folder, torch.tensor(ids), dtype, plan.device)
    rows, medians, margins, worst = [], [], [], 0.0
    last = len(true) - 1
    for c, name in enumerate(names_of(server)):
        k = last if name == "final" else armed[c]
        mine = states[:, c].to(plan.device)
        own = relative_l2(mine, true[k])
        theirs = middle(relative_l2(rounded[k], true[k]))
        near = {j: middle(relative_l2(mine, true[j])) for j in (k - 1, k + 1) if 0 <= j <= last}
        margin = min(near.values()) / max(middle(own), 1e-30)
        medians.append(middle(own))
        margins.append(margin)
        worst = max(worst, own.max().item())
        shown = [plain(near[j]) if j in near else "none" for j in (k - 1, k + 1)]
        rows.append([name, plain(middle(own)), plain(own.max().item()), plain(theirs), *shown, plain(margin)])
    bar, least = noise_bar(dtype), {"float32": 1e4, "float16": 50.0}.get(dtype, 8.0)
    what = f"Llama in {dtype} against transformers in float32"
    figures = [
        figure(f"{what}: median token, worst boundary", max(medians), "relative L2", "at most", bar, n=plan.long),
        figure(f"{what}: worst token and boundary", worst, "relative L2", n=plan.long * len(rows)),
        figure(f"{what}: how many times farther the nearest wrong boundary is, at least", min(margins), "ratio", "at least", least),
    ]
    columns = ["state", "median token", "worst token", f"transformers' own {dtype}", "to k - 1", "to k + 1", "margin"]
    return figures, [Table(title=what, columns=columns, units=["", *["relative L2"] * 5, "ratio"], rows=rows)]


def unchanged(ctx: Context) -> Found:
    """Compare ids and logprobs, one request at a time: captured, not captured by the same server, and without the plug-in's hooks."""
    lengths = (5, 40, ctx.plan.long)

    def answers(server, prefix: str) -> list[tuple]:
        with server.client() as client:
            given = []
            for n in lengths:
                ids, rid = prompt_ids(n, DEEPSEEK_VOCAB, seed=100 + n), f"{prefix}{uuid.uuid4().hex}"
                reply = client.generate(ids, rid=rid, max_new_tokens=8, logprobs=True)
                given.append((tuple(reply.output_ids), tuple(reply.input_logprobs[1:]), tuple(reply.output_logprobs)))
            return given

    armed = ctx.fleet.get("deepseek")
    captured, once, twice = (answers(armed, p) for p in ("hsnb-same-", "plain-", "plain-"))
    clear(armed.spool)
    without = answers(ctx.fleet.get("deepseek off"), "plain-")
    logprobs = sum(len(a[1]) + len(a[2]) for a in captured)
    figures = [figure("logprobs compared", logprobs, "logprobs", n=len(lengths))]
    for what, other in (("not captured, twice", twice), ("captured", captured), ("without the plug-in", without)):
        off = sum(x != y for a, b in zip(once, other, strict=True) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
        figures.append(figure(f"not captured against {what}: ids and logprobs that differ", off, "values", "equal to", 0, n=logprobs))
    return figures, []


def counts(ctx: Context) -> Found:
    """Read what the plug-in counted around one request of each kind, and the bytes of one dump."""
    server, plan = ctx.fleet.get("deepseek"), ctx.plan
    before = read_armed(server.spool)[0].counts
    with server.client() as client:
        client.generate(prompt_ids(5, DEEPSEEK_VOCAB), rid="somebody-elses")
        time.sleep(1.5)  # /health runs a token only on a server that has been idle for a second
        health = httpx.get(f"{server.url}/health", timeout=60, trust_env=False).status_code
        dump = take(server, prompt_ids(plan.long, DEEPSEEK_VOCAB), client)
    after = read_armed(server.spool)[0].counts
    size, found = dump.path.stat().st_size, list(server.spool.glob("*.safetensors"))
    row = dump.columns * dump.hidden_size * dump.dtype.itemsize
    clear(server.spool)

    def more(what: str) -> int:
        return after.get(what, 0) - before.get(what, 0)

    figures = [
        figure("warm-up requests counted", after.get("warmup", 0), "requests", "equal to", 1),
        figure("/health answered", health, "HTTP status", "equal to", 200),
        figure("/health requests counted for one /health", more("health"), "requests", "equal to", 1),
        figure("foreign requests counted for one", more("other"), "requests", "equal to", 1),
        figure("captured requests counted for one", more("captured"), "requests", "equal to", 1),
        figure("requests that could not be captured", after.get("failed", 0), "requests", "equal to", 0),
        figure("dumps in the spool after them", len(found), "files", "equal to", 1),
        figure("states of one token, computed", row, "bytes"),
        figure(f"states of {plan.long:,} tokens in the dump", dump.nbytes, "bytes", "equal to", plan.long * row),
        figure("file beyond states and token ids", size - dump.nbytes - 8 * plan.long, "bytes", "at most", 8192),
    ]
    return figures, []


def ranks(ctx: Context) -> Found:
    """Compare every rank's digest of every state with the others', and with the digest of what lies on disk."""
    server, plan = ctx.fleet.get("deepseek"), ctx.plan
    names, total, equal, on_disk = [*map(str, plan.boundaries), "final"], 0, 0, 0
    with server.client() as client:
        for n in ctx.lengths:
            rid = f"hsnb-probe-{uuid.uuid4().hex}"
            dump = take(server, prompt_ids(n, DEEPSEEK_VOCAB, seed=n), client, rid)
            stem = xxhash.xxh3_128_hexdigest(rid.encode())
            paths = [server.spool / f"{stem}.rank-{r}.json" for r in range(plan.gpus)]
            end = time.monotonic() + 20
            while not all(p.exists() for p in paths) and time.monotonic() < end:
                time.sleep(0.02)
            said = [json.loads(p.read_text())["columns"] for p in paths]
            states = dump.states()
            for c, name in enumerate(names):
                total += 1
                equal += len({columns[name] for columns in said}) == 1
                mine = xxhash.xxh3_128_hexdigest(states[:, c].contiguous().view(torch.uint8).numpy())
                on_disk += mine == said[0][name]
    clear(server.spool)
    armed = read_armed(server.spool)
    figures = [
        figure("ranks armed", len(armed), "ranks", "equal to", plan.gpus),
        figure("states equal bit for bit on every rank", equal, "states", "equal to", total, n=len(ctx.lengths)),
        figure("states on disk equal to rank 0's", on_disk, "states", "equal to", total, n=len(ctx.lengths)),
    ]
    for name in (n for n in NO_MULTICAST if n.startswith("NCCL_") and plan.device == "cuda"):
        values = sorted({a.env.get(name, "(not set)") for a in armed})
        figures.append(figure(f"{name} in every scheduler", ", ".join(values), "variable", "equal to", NO_MULTICAST[name]))
    return figures, []
