"""The real vLLM on a CPU: what its own setting gives, boundary by boundary, against transformers, and by a second way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hsnb import vllm
from hsnb.demo import model_folder
from hsnb.dumps import UNKNOWN, list_dumps, open_dump
from hsnb.errors import HsnbError
from tests import reference
from tests.helpers import prompt_ids

pytestmark = pytest.mark.engine("vllm")
BAR = 1e-5  # relative L2 of every token, in float32
FOX = "The quick brown fox jumps over the lazy dog. This is a test sentence with multiple tokens to verify hidden state extraction."
STARTS = {
    # The ids in no order: vLLM hands the columns back ascending all the same.
    "smollm2": ("smollm2-fp32", "connector", [30, 2, 15, *(k for k in range(30) if k not in (2, 15))]),
    "tiny": ("tiny-deepseek", "connector", [8, 3, 1, 2, 4, 5, 6, 7]),
    "tiny by hooks": ("tiny-deepseek", "worker", list(range(9))),
}


def prompts(model: str) -> list[list[int]]:
    if model == "tiny-deepseek":
        return [prompt_ids(24, 500), prompt_ids(150, 500, seed=1)]
    from transformers import AutoTokenizer

    return [AutoTokenizer.from_pretrained(model_folder(model))(FOX).input_ids, prompt_ids(150, 40_000, seed=1)]


@pytest.fixture(scope="module")
def captured(tmp_path_factory, engine, engine_starts):
    """Return captured(name) of STARTS, started once; a running server would take the cores."""
    done, failed = {}, {}

    def get(name: str) -> vllm.Captured:
        if name in failed:  # asked again, it would only fail again, a minute later
            raise failed[name]
        if name not in done:
            engine.stop()
            model, way, ids = STARTS[name]
            told, out = [], tmp_path_factory.mktemp(name.replace(" ", "-"))
            try:
                done[name] = vllm.capture(
                    model_folder(model), prompts(model), ids, out=out, way=way, max_new_tokens=4, keep_raw=True, timeout_s=600,
                    progress=lambda seconds, line: told.append(line),
                )  # fmt: skip
            except HsnbError as error:
                failed[name] = error
                raise
            engine_starts.note(name, done[name].vllm_version, engine="vLLM")
            assert any(line.startswith("starting vLLM 0.32") for line in told), told
        return done[name]

    return get


def worst(dump, model: str) -> dict[int, float]:
    """Return {boundary: largest relative L2 of a token} between what a dump calls B_k and transformers' B_k."""
    truth = reference.boundaries(model, dump.token_ids)
    held = [*dump.boundaries, *([dump.num_layers] if dump.final == "pre" else [])]
    return {k: reference.relative_l2(dump.state(k).float(), truth[k]).max().item() for k in held}


@pytest.mark.parametrize("name", STARTS)
def test_every_boundary_is_transformers(name, captured):
    model, way, ids = STARTS[name]
    got = captured(name)
    assert got.boundaries == tuple(sorted(ids)) and got.ids == tuple(ids) and got.way == way and got.dtype == "float32"
    assert got.ids_read_back is None if way == "worker" else sorted(got.ids_read_back) == sorted(ids)
    assert got.model_class == ("LlamaForCausalLM" if model.startswith("smol") else "DeepseekV3ForCausalLM")
    for dump, sent in zip(got.dumps, prompts(model), strict=True):
        assert dump.token_ids.tolist() == sent and dump.num_tokens == len(sent) and dump.final == "pre"
        found = worst(dump, model)
        assert sorted(found) == sorted(ids)
        assert max(found.values()) < BAR, found


@pytest.mark.parametrize("name", STARTS)
def test_logprobs_and_answers_are_transformers(name, captured):
    model, got = STARTS[name][0], captured(name)
    for prompt in got.prompts:
        whole = torch.tensor([*prompt.token_ids, *prompt.output_ids])
        with torch.no_grad():
            logits = reference.model(model)(whole[None]).logits[0]
        start = len(prompt.token_ids)
        truth = logits.double().log_softmax(-1)[: start - 1].gather(1, whole[1:start, None])[:, 0]
        assert (truth - torch.tensor(prompt.logprobs, dtype=torch.float64)).abs().max().item() < 1e-4
        assert logits[start - 1 : -1].argmax(-1).tolist() == list(prompt.output_ids), "the greedy answer, token by token"
        assert len(prompt.output_ids) == 4 and len(prompt.logprobs) == start - 1


def test_both_ways_give_the_same_states(captured):
    one, other = captured("tiny"), captured("tiny by hooks")
    for a, b in zip(one.dumps, other.dumps, strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        for k in one.boundaries:
            assert reference.relative_l2(a.state(k), b.state(k)).max().item() < 1e-6, k
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert one.outputs == other.outputs


def test_the_connectors_own_files_are_read(captured):
    got = captured("tiny")
    files = list_dumps(got.folder / "raw")
    assert len(files) == len(got.prompts)
    for dump in got.dumps:
        raw = next(open_dump(f) for f in files if f.name.startswith(f"{dump.request_id}-"))
        assert (raw.boundaries, raw.final, raw.metadata) == (UNKNOWN, UNKNOWN, {})
        assert torch.equal(raw.states(), dump.states()) and torch.equal(raw.token_ids, dump.token_ids)


def test_the_files_say_what_they_are(captured):
    got = captured("smollm2")
    with safe_open(got.prompts[0].path, "pt") as file:
        meta = file.metadata()
    assert json.loads(meta["ids"]) == STARTS["smollm2"][2] and json.loads(meta["boundaries"]) == list(range(30))
    assert {k: meta[k] for k in ("engine", "vllm_version", "way", "dtype", "final", "num_layers", "model_class")} == {
        "engine": "vllm", "vllm_version": "0.32.0", "way": "connector", "dtype": "float32", "final": "pre", "num_layers": "30",
        "model_class": "LlamaForCausalLM",
    }  # fmt: skip


@pytest.mark.parametrize("fault", ["one layer off", "columns swapped", "rows moved", "another prompt", "norm applied"])
@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_a_broken_integration_would_be_seen(name, fault, captured, tmp_path):
    """Each fault that was met elsewhere, put into a real file, goes far over the bar."""
    model, dump = STARTS[name][0], captured(name).dumps[0]
    tensors, labels = load_file(dump.path), dict(dump.metadata)
    states = tensors["hidden_states"]
    match fault:
        case "one layer off":
            tensors["hidden_states"] = states[:, [*range(1, states.shape[1]), 0]].contiguous()
        case "columns swapped":
            tensors["hidden_states"] = states[:, [1, 0, *range(2, states.shape[1])]].contiguous()
        case "rows moved":
            tensors["hidden_states"] = states.roll(1, 0)
        case "another prompt":
            tensors["token_ids"] = tensors["token_ids"].flip(0)
        case "norm applied":
            tensors["hidden_states"][:, -1] = reference.model(model).model.norm(states[:, -1]).detach()
    save_file(tensors, tmp_path / "broken.safetensors", labels)
    assert max(worst(open_dump(tmp_path / "broken.safetensors"), model).values()) > 1000 * BAR


def test_a_killed_driver_leaves_nothing_running(tmp_path, engine):
    """Killed by SIGKILL while its engine and worker load: the worst moment, and what calls it says why."""
    engine.stop()
    out = tmp_path / "out"
    code = (
        "import sys; from hsnb import vllm; from hsnb.errors import ServerError\n"
        f"try: vllm.capture({str(model_folder('tiny-deepseek'))!r}, [[5, 6]], [2], out={str(out)!r})\n"
        "except ServerError as error: print(error)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        log = out / "vllm.log"
        wait_until(lambda: log.exists() and "Initializing a V1 LLM engine" in log.read_text(), 240)
        driver = next(
            p for p in psutil.process_iter(["cmdline"]) if str(out / "request.json") in (p.info["cmdline"] or []) and is_driver(p)
        )
        family = [driver, *driver.children(recursive=True)]
        assert len(family) >= 2, "the driver and its engine"
        driver.kill()
        said, _ = caller.communicate(timeout=60)
    finally:
        caller.kill()
        caller.wait()
    assert "vLLM ended (SIGKILL) at 'starting vLLM 0.32.0 on the CPU'" in said
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == [], [p.cmdline() for p in alive]
    assert not (out / "capture.json").exists() and not list(Path("/dev/shm").glob(f"*{driver.pid}*"))


def is_driver(process: psutil.Process) -> bool:
    return any(word.endswith("driver.py") for word in process.cmdline())


def wait_until(true, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.1)


def test_hsnb_is_not_installed_beside_vllm():
    code = "import importlib.util as u; print([n for n in ('hsnb', 'torchvision', 'torchaudio', 'torchcodec', 'sglang') if u.find_spec(n)])"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([vllm.vllm_python(), "-c", code], capture_output=True, text=True, check=True, env=env, cwd="/")
    assert done.stdout.strip() == "[]"
