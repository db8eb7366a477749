"""Judge the evidence: every dump against what was asked, and the sentence against every witness there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hsnb import reference as hf
from hsnb.checks import Asked, Check, dump_checks
from hsnb.dumps import Dump, open_dump
from hsnb.errors import DumpError
from hsnb.probe import norm, same
from hsnb.probe.identity import Fit, Tap, reference_checks, tap_checks, tap_fits
from hsnb.probe.result import ProbeResult
from hsnb.probe.witness import Evidence, Witness
from hsnb.weights import Head


def judge(evidence: Evidence, model: Path, *, reference: bool = True) -> ProbeResult:
    """Return the verdict. A dump that cannot be read or compared is a failed check, not an exception.

    `model`: the checkpoint's folder. `reference` False leaves transformers out (a model that does not fit leaves it out anyway).
    """
    armed, head = evidence.armed[0], Head.load(model)
    checks: list[Check] = []
    drawn: dict[str, tuple[float, ...]] = {}

    def guarded(name: str, made: Callable[[], list[Check] | Check]) -> None:
        try:
            found = made()
        except (DumpError, OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
            what = error.got if isinstance(error, DumpError) else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            found = [Check("readable and comparable", what, "files of the layout, with the rows asked for", False)]
        for c in found if isinstance(found, list) else [found]:
            checks.append(Check(f"{name}: {c.name}", c.value, c.threshold, c.ok, c.blind_to, c.source, c.not_proved))

    def single(witness: Witness) -> list[Check]:
        dump = open_dump(witness.dump)
        found = dump_checks(dump, _asked(witness, armed))
        if witness.prompt.text:
            errors = torch.empty(0)
            if dump.num_tokens == len(witness.prompt.token_ids):
                errors = norm.logprob_errors(dump.state("final"), witness.next_ids, witness.logprobs, head, armed.final)
            drawn[witness.prompt.name] = tuple(errors.tolist())
            found += norm.logprob_checks(errors, armed.dtype)
        return found

    for witness in evidence.witnesses:
        guarded(witness.prompt.name, lambda witness=witness: single(witness))
    for witness in (evidence.greedy, evidence.batched, *([evidence.long] if evidence.long else [])):
        where = f"{witness.prompt.name}, in a batch" if witness is evidence.batched else witness.prompt.name
        guarded(where, lambda witness=witness: dump_checks(open_dump(witness.dump), _asked(witness, armed)))

    sentence = evidence.sentence
    noise: dict[str, float] = {}
    fits: dict[str, Fit] = {}
    distance: dict[str, float] = {}

    def measured() -> list[Check]:
        long = [open_dump(evidence.long.dump)] if evidence.long else []
        noise.update(same.noise_of([_whole(sentence), _whole(evidence.batched), *long]))
        if sentence.tap is not None:
            fits.update(tap_fits(_whole(sentence), Tap.load(sentence.tap), head, model, armed.num_layers))
            distance.update({name: fit.distance for name, fit in fits.items()})
        return []

    def teacher() -> Check:
        states, start = _whole(evidence.greedy).state("final"), len(sentence.prompt.token_ids)
        answer = torch.tensor(sentence.output_ids)
        blurred = armed.dtype != "float32" and noise.get("final", 0.0) > distance.get("final", 0.0) / 3
        return norm.teacher_check(states[start - 1 : start - 1 + len(answer)], answer, head, armed.final, armed.dtype, blurred=blurred)

    def tapped() -> list[Check]:
        if sentence.tap is None:
            return [Check("second tap", "not written", "one beside the dump", False, not_proved=True)]
        return tap_checks(fits, _whole(sentence), armed.num_layers, armed.dtype)

    guarded("same", measured)
    guarded("same", lambda: same.batch_check(_whole(sentence), _whole(evidence.batched), noise, distance, armed.dtype))
    guarded("same", lambda: same.chunk_check(evidence, _whole(sentence), noise, distance, armed.dtype))
    guarded("same", lambda: same.rank_check(evidence))
    guarded("same", lambda: same.unchanged_check(evidence))
    guarded("norm", lambda: norm.norm_check(_whole(sentence).state("final"), sentence.next_ids, sentence.logprobs, head, armed.final))
    guarded("norm", teacher)
    guarded("layer", tapped)
    witnesses = ["the second tap"]
    if reference and hf.fits(model):
        states, _ = hf.states(hf.load(model), torch.tensor(sentence.prompt.token_ids))
        guarded("layer", lambda: reference_checks(_whole(sentence), states, head, noise, armed.dtype))
        witnesses.append("transformers")
    return ProbeResult(
        tuple(checks), armed.model_path, armed.sglang_version, tuple(armed.boundaries), armed.final, armed.dtype, armed.pid, armed.started,
        tuple(witnesses), drawn,
    )  # fmt: skip


def _asked(witness: Witness, armed) -> Asked:
    return Asked(torch.tensor(witness.prompt.token_ids), tuple(armed.boundaries), armed.final, armed.hidden_size, armed.dtype)


def _whole(witness: Witness) -> Dump:
    """Open a witness's dump. Raises ValueError when it has not the rows that were asked for: nothing can be compared then."""
    dump = open_dump(witness.dump)
    if dump.num_tokens != len(witness.prompt.token_ids):
        raise ValueError(f"{witness.prompt.name} has {dump.num_tokens} rows, {len(witness.prompt.token_ids)} were asked for")
    return dump
