"""States to train a drafter on and to judge it by: a server's own greedy answers, their dumps, and copies with chosen columns.

A folder of states is what the trainer reads (speculators' layout): an Arrow data set with input_ids and loss_mask, and
hidden_states/hs_{row}.safetensors. One capture with many boundaries serves every comparison: `choose` writes the columns of one.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hsnb.boundaries import check_boundaries
from hsnb.checks import Asked, dump_checks, require
from hsnb.collect import collect, free
from hsnb.dumps import open_dump
from hsnb.errors import DataError, DumpError
from hsnb.extract.output import Output
from hsnb.paths import write_json
from hsnb.progress import Progress
from hsnb.trainers import layout
from hsnb.weights import Head

SPECULATORS = layout("speculators")
IN_FLIGHT = 32  # requests; more of them make a batch of decoding cheaper, and take room in the spool


@dataclass(frozen=True)
class Sample:
    """Token ids of one sample: what was asked, and what is trained on (or, held out, what the target answered greedily)."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    row: int = -1  # of the data set that it was taken from

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.answer]


@dataclass(frozen=True)
class StatesFolder:
    """A folder of states in speculators' layout. `boundaries`: of its columns, ascending; `final`: "pre" or "post", the last column."""

    path: Path
    boundaries: tuple[int, ...]
    final: str
    num_layers: int
    model: Path

    @cached_property
    def table(self) -> Any:
        """Return the datasets.Dataset (torch format): input_ids, loss_mask, seq_len."""
        from datasets import load_from_disk

        return load_from_disk(str(self.path))

    @cached_property
    def rows(self) -> list[int]:
        """Return the rows whose states are there: of an extraction that is not done, those of its shards that are."""
        return [row for row in range(len(self.table)) if (self.path / SPECULATORS.sample_file(row)).is_file()]

    def read(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (token ids int64 [S], loss mask int64 [S], states [S, K + 1, H]) of one row.

        Raises DumpError when its file is not of this row, or has another number of columns.
        """
        dump, entry = open_dump(self.path / SPECULATORS.sample_file(row)), self.table[row]
        if dump.columns != len(self.boundaries) + 1 or not torch.equal(dump.token_ids, entry["input_ids"]):
            raise DumpError(
                got=f"row {row}: {dump.columns} columns, token ids {'equal' if dump.columns == len(self.boundaries) + 1 else 'not compared'}",
                expected=f"{len(self.boundaries) + 1} columns ({list(self.boundaries)} and the final) of the row's own token ids",
                likely="files of another extraction in this folder",
                next="extract the row again",
            )
        return entry["input_ids"], entry["loss_mask"], dump.states()

    @property
    def tokens(self) -> int:
        """Tokens of the rows whose states are there."""
        return sum(int(self.table[row]["seq_len"]) for row in self.rows)

    def target_config(self) -> dict:
        """Return the target model's config.json."""
        return json.loads((self.model / "config.json").read_text())


def open_states(path: str | Path, *, boundaries: Sequence[int] = (), model: str | Path = "") -> StatesFolder:
    """Open a folder of states; what its hsnb.json says is not asked for, and must not be contradicted.

    A folder of another engine (vLLM's connector, speculators' own generator) has no hsnb.json: give `boundaries` and `model`.
    Raises DataError when it is no such folder, or what it holds is not known.
    """
    path = Path(path)
    about = json.loads((path / "hsnb.json").read_text()) if (path / "hsnb.json").is_file() else {}
    model = Path(model or about.get("model", ""))
    if not (path / "dataset_info.json").is_file() or not (path / "hidden_states").is_dir():
        raise _bad(path, "no Arrow data set with hidden_states/", "a folder that 03_extract did not write", "give outputs/{run}/data")
    if not about and not boundaries:
        raise _bad(path, "no hsnb.json, and no boundaries given", "states of another engine", "say which boundaries its columns are")
    if about and boundaries and list(about["boundaries"]) != sorted(boundaries):
        raise _bad(path, f"boundaries {sorted(boundaries)} given", f"hsnb.json says {about['boundaries']}", "leave them out")
    if not (model / "config.json").is_file():
        raise _bad(path, f"no model at {model}", "the target's folder was moved", "say which folder the target model is in")
    from hsnb.params import num_layers, read_config

    layers = num_layers(read_config(model))
    return StatesFolder(path, check_boundaries(boundaries or about["boundaries"], layers), about.get("final", "pre"), layers, model)


def greedy_answers(server, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, min_new_tokens: int = 8) -> list[Sample]:
    """Ask the served model for its greedy answers; prompts that it answers with less than `min_new_tokens` are left out.

    The states of these requests are not captured (their ids do not begin with hsnb-): decoding gives no prefill rows.
    """
    run = uuid.uuid4().hex[:8]
    with server.client() as client, ThreadPoolExecutor(IN_FLIGHT) as pool, Progress(len(prompts), unit="answers", desc="greedy") as seen:

        def ask(job: tuple[int, Sequence[int]]) -> Sample:
            n, prompt = job
            got = client.generate(list(prompt), rid=f"answer-{run}-{n}", max_new_tokens=max_new_tokens)
            seen.advance()
            return Sample(tuple(prompt), tuple(got.output_ids))

        return [s for s in pool.map(ask, enumerate(prompts)) if len(s.answer) >= min_new_tokens]


def take(server, samples: Sequence[Sample], out: Path) -> StatesFolder:
    """Send the samples through the server's prefill and write their states to `out` (made anew), bfloat16, every boundary captured.

    The loss mask is 1 on the answers. Raises DumpError for a dump that is not what was asked.
    """
    armed, run = server.armed[0], uuid.uuid4().hex[:8]
    shutil.rmtree(out, ignore_errors=True)
    write_table(out, samples)
    SPECULATORS.begin(out, range(len(samples)))
    with server.client() as client, ThreadPoolExecutor(IN_FLIGHT) as pool, Progress(len(samples), unit="samples", desc="states") as seen:

        def one(row: int) -> None:
            rid, ids = f"hsnb-{run}-{row}", torch.tensor(samples[row].ids)
            client.generate(ids.tolist(), rid=rid)
            dump_path = collect(server.spool, rid, armed.format)
            dump = open_dump(dump_path)
            asked = Asked(ids, tuple(armed.boundaries), armed.final, armed.hidden_size, armed.dtype)
            require(dump_checks(dump, asked), f"sample {row}", "probe the server with hsnb probe")
            SPECULATORS.publish(out, row, dump)
            free(dump_path)
            seen.advance()

        list(pool.map(one, range(len(samples))))
    Output(out, "states", "speculators").describe(server, "speculators", {})
    return open_states(out)


def choose(
    source: StatesFolder,
    out: Path,
    aux: Sequence[int],
    *,
    normed: bool = False,
    rows: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> StatesFolder:
    """Write a copy of `source` with the aux columns `aux` (boundaries) and its final state, all rows or `rows`, numbered anew.

    `lengths` cuts row by row: the states of a text's beginning are the beginning of its states. `normed` stores norm(B_L) where
    the trainer expects B_L: the mistake whose cost is measured, and labelled "post". Raises DataError for a boundary that `source`
    does not have.
    """
    aux = check_boundaries(aux, source.num_layers)
    if missing := sorted(set(aux) - set(source.boundaries)):
        raise _bad(source.path, f"no boundary {missing[0]}", f"it holds {list(source.boundaries)}", "capture that boundary, too")
    columns = [source.boundaries.index(b) for b in aux]
    head = Head.load(source.model) if normed else None
    shutil.rmtree(out, ignore_errors=True)
    rows = source.rows if rows is None else list(rows)
    samples = []
    (out / "hidden_states").mkdir(parents=True)
    for n, row in enumerate(rows):
        ids, mask, states = (tensor[: lengths[n]] if lengths else tensor for tensor in source.read(row))
        final = head.normed(states[:, -1]).to(states.dtype) if head else states[:, -1]
        kept = torch.cat([states[:, columns], final[:, None]], 1).contiguous()
        write_states(out, n, kept, ids, aux, "post" if normed else source.final)
        samples.append((ids, mask))
    _write_rows(out, samples)
    final = "post" if normed else source.final
    write_about(out, aux, final, source.model, source.num_layers, chosen_from=str(source.path))
    return open_states(out)


def write_states(out: Path, row: int, states: torch.Tensor, token_ids: torch.Tensor, aux: Sequence[int], final: str) -> None:
    """Write [S, K + 1, H] and int64 [S] of one row as speculators reads them; `aux`: the boundaries of the first K columns."""
    meta = SPECULATORS.meta({}, tuple(aux), final)
    save_file(
        {"hidden_states": states.contiguous(), "token_ids": token_ids.contiguous()}, out / SPECULATORS.sample_file(row), metadata=meta
    )


def write_about(out: Path, aux: Sequence[int], final: str, model: Path, num_layers: int, **more: str) -> None:
    """Write hsnb.json beside such rows; `more`: where they come from."""
    about = {"hsnb_format": 1, "layout": "speculators", "boundaries": list(aux), "final": final}
    write_json(out / "hsnb.json", {**about, "model": str(model), "num_layers": num_layers, **more})


def write_table(out: Path, samples: Sequence[Sample]) -> None:
    """Write the Arrow data set and token_freq.pt of `samples` to `out`, which must not exist: the answers are under the mask."""
    out.mkdir(parents=True)
    rows = [(torch.tensor(s.ids), torch.tensor([0] * len(s.prompt) + [1] * len(s.answer))) for s in samples]
    _write_rows(out, rows)


def _write_rows(out: Path, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the Arrow data set and token_freq.pt ({token: count under the mask}) as speculators 0.9 reads them."""
    import datasets

    table = [{"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)} for ids, mask in rows]
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_list(table).with_format("torch").save_to_disk(str(out))
    finally:
        if not bars:
            datasets.enable_progress_bars()
    under = torch.cat([ids[mask == 1] for ids, mask in rows]).unique(return_counts=True)
    torch.save(dict(zip(under[0].tolist(), under[1].tolist(), strict=True)), out / "token_freq.pt")


def _bad(path: Path, got: str, likely: str, next: str) -> DataError:
    return DataError(got=f"{path}: {got}", expected="a folder of states that a drafter can be trained on", likely=likely, next=next)
