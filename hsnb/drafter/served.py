"""A server with a drafter: what the drafter is really fed, read back from inside, and what it really accepts, counted.

A config off by one loads, serves and answers correctly; only its accept length is lower. So the boundaries are read from the
target's own layers_to_capture in the serving process, and every weight of the drafter is compared with its file.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hsnb.checks import Check
from hsnb.drafter.accept import STEPS, Acceptance
from hsnb.drafter.config import read_drafter
from hsnb.drafter.convert import LAYER, read_tensors
from hsnb.drafter.inside import VARIABLE, WAIT
from hsnb.drafter.states import StatesFolder
from hsnb.errors import CaptureError, DataError, ServerError
from hsnb.params import Deployment
from hsnb.progress import Progress
from hsnb.server import Server

_STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
IN_FLIGHT = 6  # requests; a CPU server runs eight at once
_SUM_BAR = 1e-5  # relative: sums of |w| in float64 of the same numbers; another order of adding them


def serve_with(deployment: Deployment, flags: dict, report: Path, *, wait_s: float = 0.0, **options) -> Server:
    """Start a server with a drafter's `flags` (`Converted.flags`) that writes what it feeds the drafter to `report`.

    No states are captured by it. On a CPU it runs without the overlap scheduler, which speculation does not know there. `wait_s`:
    how long it may wait for the drafter's weights, whose config.json has to be there. Raises what Server.start does.
    """
    report.mkdir(parents=True, exist_ok=True)
    for old in report.glob("*-*.json"):
        old.unlink()
    more = {"disable-overlap-schedule": True} if deployment.server.device == "cpu" else {}
    merged = {**deployment.server.flags, **more, **flags, "decode-log-interval": 1}
    server = deployment.server.model_copy(update={"flags": merged})
    with_drafter = deployment.model_copy(update={"server": server})
    more_env = {VARIABLE: str(report), **({WAIT: str(wait_s)} if wait_s else {})}
    return Server.start(with_drafter, capture=False, extra_env=more_env, **options)


def read_back(report: Path) -> tuple[dict, dict]:
    """Return what rank 0 wrote about the target and about the draft. Raises CaptureError when it wrote nothing."""
    try:
        return tuple(json.loads((report / f"{what}-0.json").read_text()) for what in ("target", "draft"))
    except (OSError, ValueError) as error:
        raise CaptureError(
            got=f"{report}: {error}",
            expected="target-0.json and draft-0.json, written by the serving process",
            likely=f"a server started without {VARIABLE}, without hsnb's plug-in, or without a drafter",
            next=f"start it with {VARIABLE}={report}",
        ) from error


def check_served(report: Path, drafter: Path, boundaries: Sequence[int]) -> list[Check]:
    """Compare a running server with the drafter's folder and with the boundaries it was trained on.

    Checked: what the target captures, the draft's class and options, and the sum of |w| of each of its tensors. What it does not
    show: that the states themselves are right (the probe does), or that the drafter is any good.
    """
    target, draft = read_back(report)
    captured = sorted(target["layers_to_capture"])
    config = read_drafter(drafter)
    wanted = sorted(boundaries)
    near = f" ({', '.join(f'B_{c} for B_{w}' for c, w in zip(captured, wanted, strict=False) if c != w)})" if captured != wanted else ""
    source = "layers_to_capture of the serving process"
    checks = [
        Check("boundaries fed", f"{captured}{near}", str(wanted), captured == wanted and target["use_aux"], source=source),
        Check("aux states", str(draft["num_aux"]), str(len(wanted)), draft["num_aux"] == len(wanted)),
        Check("draft model", draft["model_class"], "LlamaForCausalLMEagle3", draft["model_class"] == "LlamaForCausalLMEagle3"),
    ]
    for option in ("norm_before_fc", "fc_norm", "norm_output"):
        asked = bool(config.raw.get(option, False))
        checks.append(Check(option, str(draft[option]), str(asked), draft[option] == asked))
    tensors = read_tensors(drafter)
    hot = len(tensors["d2t"]) if "d2t" in tensors else 0
    checks.append(Check("draft vocabulary", f"{draft['hot_tokens']:,}", f"{hot:,}", draft["hot_tokens"] == hot))
    return [*checks, _weights(tensors, draft)]


def require_served(report: Path, drafter: Path, boundaries: Sequence[int]) -> list[Check]:
    """Return `check_served`. Raises CaptureError naming the first check that failed."""
    checks = check_served(report, drafter, boundaries)
    for check in checks:
        if not check.ok:
            raise CaptureError(
                got=f"{check.name}: {check.value}",
                expected=check.threshold,
                likely="the drafter's config.json was written for another tool's numbering, or not by hsnb drafter convert",
                next=f"hsnb drafter convert {drafter} --boundaries {' '.join(map(str, boundaries))}, and start the server again",
            )
    return checks


def count(
    server: Server, states: StatesFolder, *, steps: int = STEPS, limit: int = 0, in_flight: int = IN_FLIGHT
) -> tuple[Acceptance, int]:
    """Send the prompts of `states` to a server with a drafter; return (what it accepted, answers that equal the stored ones).

    Each is asked for its stored answer's length less `steps` tokens: what `hsnb.drafter.accept` predicts for. `in_flight` of them at
    once: a CPU verifies some for little more than one. Raises ServerError when the server does not speculate, DataError for an
    empty folder.
    """
    rows, run = states.rows[: limit or None], uuid.uuid4().hex[:8]
    if not rows:
        raise DataError(
            got=f"{states.path}: no row with states",
            expected="at least one answer",
            likely="an empty folder",
            next="name another folder",
        )
    with server.client() as client, ThreadPoolExecutor(in_flight) as pool, Progress(len(rows), unit="answers", desc="served") as seen:

        def ask(row: int) -> tuple[list[int], bool, int]:
            ids, mask, _ = states.read(row)
            first = int(mask.argmax())
            answer = ids[first : len(ids) - steps].tolist()
            body = {"input_ids": ids[:first].tolist(), "rid": f"accept-{run}-{row}"}
            body["sampling_params"] = {"max_new_tokens": len(answer), "temperature": 0, "ignore_eos": True}
            got = client.request("POST", "/generate", body)
            counted = got["meta_info"].get("spec_correct_drafts_histogram")
            if counted is None:
                raise ServerError(
                    got=f"{server.url} answered without spec_correct_drafts_histogram",
                    expected="a server that drafts and verifies",
                    likely="it was started without a drafter, or with --speculative-algorithm EAGLE",
                    next="start it with the flags of hsnb drafter convert",
                )
            seen.advance()
            return counted, got["output_ids"] == answer, len(answer)

        answers = list(pool.map(ask, rows))
    histogram = [sum(counted[j] for counted, _, _ in answers if j < len(counted)) for j in range(steps + 1)]
    accepted = Acceptance(tuple(histogram), len(rows), sum(n for _, _, n in answers), served=True)
    return accepted, sum(same for _, same, _ in answers)


def _weights(tensors: dict[str, torch.Tensor], draft: dict) -> Check:
    """Compare the sum of |w| of each parameter in the server with that of the tensors it was stacked from."""
    expected: dict[str, float] = {}
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d", "embed_tokens.weight"):
            continue
        name = name.replace("midlayer.", LAYER)
        for part, stacked in _STACKED.items():
            name = name.replace(f".{part}.", f".{stacked}.")
        name = name if name.startswith("lm_head") else f"model.{name}"
        expected[name] = expected.get(name, 0.0) + float(tensor.double().abs().sum())
    held = {name: value for name, value in draft["sums"].items() if "embed_tokens" not in name}
    off = [n for n in {**expected, **held} if abs(held.get(n, 0.0) - expected.get(n, 0.0)) > _SUM_BAR * abs(expected.get(n, 0.0))]
    value = f"{len(expected) - len(off)} of {len(expected)} as in the file" + (f"; not {off[0]}" if off else "")
    return Check("weights loaded", value, f"{len(expected)} of {len(expected)}", not off, "signs and order within a tensor")
