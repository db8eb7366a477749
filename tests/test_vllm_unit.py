"""Captures by vLLM without vLLM: what is refused before it starts, and what is said when it fails. The stand-ins below write what
vLLM and its driver write; that vLLM does so is shown in tests/test_vllm_engine.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import hsnb.vllm
from hsnb.dumps import NO_FINAL, UNKNOWN, open_dump
from hsnb.errors import BoundaryError, DataError, DumpError, ModelError, ParamsError, ServerError
from hsnb.vllm import Captured
from hsnb.vllm.causes import find_cause
from hsnb.vllm.run import DRIVER, clear

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "max_position_embeddings": 64, "vocab_size": 100}
DEEPSEEK = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip


def folder(path: Path, config: dict) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def llama(tmp_path) -> Path:
    return folder(tmp_path / "llama", LLAMA)


@pytest.fixture
def capture(tmp_path, llama, monkeypatch):
    """Return capture(**changes): of two prompts at ids [2, 4], into tmp_path/out; no GPU, whatever the machine has."""
    monkeypatch.setattr("hsnb.vllm.run.gpus", list)

    def call(**changes):
        options = {"model": llama, "prompts": [[1, 2, 3], [4, 5]], "ids": [2, 4], "out": tmp_path / "out"} | changes
        return hsnb.vllm.capture(options.pop("model"), options.pop("prompts"), options.pop("ids"), **options)

    return call


@pytest.fixture
def never_started(monkeypatch, tmp_path):
    """A Python that tells when it is started."""
    mark = tmp_path / "started"
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ntouch {mark}\n")
    script.chmod(0o755)
    monkeypatch.setenv("HSNB_VLLM_PYTHON", str(script))
    yield
    assert not mark.exists()


# -- refused before anything starts


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"ids": [2, 2, 4]}, BoundaryError, r"boundaries \[2, 2, 4\], expected each boundary once"),
        ({"ids": [2, 9]}, BoundaryError, r"boundaries \[2, 9\], expected at least one, each in 0\.\.8"),
        ({"ids": [-1]}, BoundaryError, r"each in 0\.\.8"),
        ({"ids": []}, BoundaryError, "expected at least one"),
        ({"way": "hooks"}, ParamsError, "way is 'hooks', expected one of connector, worker"),
        ({"dtype": "fp32"}, ParamsError, "dtype is 'fp32', expected one of float32, bfloat16, float16"),
        ({"prompts": []}, DataError, "no prompts"),
        ({"prompts": [[1], []]}, DataError, "prompt 1 is empty"),
        ({"prompts": [[1, 100]]}, DataError, "prompt 0 has token id 100, expected one or more token ids below 100"),
        ({"prompts": [[1] * 60], "max_new_tokens": 5}, DataError, "prompt 0 has 60 tokens and 5 to come, expected at most 64"),
        ({"max_new_tokens": -1}, ParamsError, "max_new_tokens is -1"),
        ({"model": Path("/nowhere")}, ModelError, r"/nowhere/config\.json"),
    ],
)
def test_what_vllm_would_choke_on_is_refused_first(changes, kind, words, capture, never_started):
    with pytest.raises(kind, match=words):
        capture(**changes)


def test_id_0_of_a_deepseek_crashes_vllms_own_way(tmp_path, capture, never_started):
    with pytest.raises(BoundaryError, match=r'id 0 in \[0, 4\] for a DeepSeek, expected ids in 1\.\.8.*use way="worker"'):
        capture(model=folder(tmp_path / "deepseek", DEEPSEEK), ids=[0, 4])


def test_an_mla_of_another_size_is_refused_on_a_cpu(tmp_path, capture, never_started):
    with pytest.raises(ModelError, match=r"kv_lora_rank 32 and qk_rope_head_dim 64, expected 512 and 64 on a CPU"):
        capture(model=folder(tmp_path / "deepseek", {**DEEPSEEK, "kv_lora_rank": 32}))


def test_a_folder_with_other_files_is_left_alone(tmp_path, capture, never_started):
    (tmp_path / "out").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "out" / "hs_0.safetensors")
    with pytest.raises(DataError, match=r"out holds hs_0\.safetensors, expected a new folder"):
        capture()
    assert (tmp_path / "out" / "hs_0.safetensors").exists()


def test_an_earlier_capture_is_replaced(tmp_path):
    for name in ("capture.json", "request.json", "prompt-00001.safetensors", "vllm.log"):
        (tmp_path / name).write_text("{}")
    clear(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["vllm.log"]


# -- the environment


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    for name in ("params", "notebooks"):
        (tmp_path / "project" / name).mkdir(parents=True)
    monkeypatch.setenv("HSNB_ROOT", str(tmp_path / "project"))
    monkeypatch.delenv("HSNB_VLLM_PYTHON", raising=False)
    return tmp_path / "project"


def test_without_vllm_one_line_says_how_to_get_it(project, capture):
    with pytest.raises(ServerError) as error:
        capture()
    said = str(error.value)
    assert said.startswith(f"ServerError: no vLLM environment at {project}/.venv-vllm, expected a Python with vLLM")
    assert said.endswith("Next: make setup-vllm") and "\n" not in said
    assert not (project.parent / "out").exists()


def test_a_half_made_environment_is_not_used(project, monkeypatch, capture):
    (project / ".venv-vllm" / "bin").mkdir(parents=True)
    (project / ".venv-vllm" / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(ServerError, match=r"is not whole.*Likely: make setup-vllm was interrupted\. Next: make setup-vllm$"):
        capture()
    (project / ".venv-vllm" / ".ready").touch()
    assert hsnb.vllm.vllm_python() == project / ".venv-vllm" / "bin" / "python"
    monkeypatch.setenv("HSNB_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(ServerError, match=r"HSNB_VLLM_PYTHON=/nowhere/python: no Python there.*Next: make setup-vllm$"):
        capture()


def test_a_python_without_vllm_says_so(monkeypatch, capture):
    """The real driver in this environment, which has torch and no vLLM."""
    monkeypatch.setenv("HSNB_VLLM_PYTHON", sys.executable)
    with pytest.raises(ServerError, match=r"vLLM ended \(exit code 1\).*that Python has no vllm.*Next: make setup-vllm"):
        capture()


def test_importing_hsnb_vllm_is_light_and_the_driver_needs_nothing_of_hsnb():
    code = "import sys, hsnb.vllm; print(sorted({'torch', 'vllm', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    for file in DRIVER.parent.glob("*.py"):
        assert "import hsnb" not in file.read_text() and "from hsnb." not in file.read_text()


# -- a run, with a stand-in for the driver


def stand_in(tmp_path, monkeypatch, body: str) -> None:
    """Let the engine's Python be one that runs `body` with `request` and `out`, instead of the driver."""
    script = tmp_path / "driver.py"
    script.write_text("import json, os, sys, time\nrequest = json.load(open(sys.argv[2]))\nout = request['out']\n" + textwrap.dedent(body))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("HSNB_VLLM_PYTHON", str(python))


GOOD = """
import torch
from safetensors.torch import save_file
print("hsnb: prompt 0 of 2, 3 tokens", flush=True)
time.sleep(1.5)
entries = []
for n, ids in enumerate(request["prompts"]):
    states = torch.arange(len(ids) * len(request["ids"]) * 4.0).reshape(len(ids), len(request["ids"]), 4)
    save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, f"{out}/prompt-{n:05d}.safetensors", request["labels"])
    entries.append({"request_id": str(n), "logprobs": [-1.5] * (len(ids) - 1), "output_ids": [7], "text": "x", "file": f"prompt-{n:05d}.safetensors"})
about = {"vllm_version": "0.32.0", "model_class": "M", "num_layers": 8, "dtype": "float32", "ids_read_back": sorted(request["ids"])}
json.dump({**about, "hidden_size": 4, "device": "cpu", "startup_seconds": 1, "capture_seconds": 2, "prompts": entries}, open(f"{out}/capture.json", "w"))
"""


def test_a_capture_is_read_back(tmp_path, monkeypatch, capture):
    stand_in(tmp_path, monkeypatch, GOOD)
    told = []
    got = capture(ids=[8, 2], max_new_tokens=1, progress=lambda seconds, line: told.append(line))
    assert (got.ids, got.boundaries, got.ids_read_back, got.way, got.engine) == ((8, 2), (2, 8), (2, 8), "connector", "vllm")
    assert got.token_ids == ((1, 2, 3), (4, 5)) and got.logprobs == ((-1.5, -1.5), (-1.5,)) and got.outputs == ((7,), (7,))
    first = got.dumps[0]
    assert (first.boundaries, first.final, first.num_layers, first.columns) == ((2,), "pre", 8, 2)
    assert torch.equal(first.state(8), first.state("final")) and torch.equal(first.state(2), first.column(0))
    assert "prompt 0 of 2, 3 tokens" in told
    assert Captured.load(tmp_path / "out") == got
    assert list(got.frame()["tokens"]) == [3, 2] and "vLLM 0.32.0 on cpu" in got._repr_html_()
    assert json.dumps(got.as_dict())
    assert capture(ids=[2]).dumps[0].final == NO_FINAL, "a second capture replaces the first"


def test_a_folder_that_is_no_capture(tmp_path):
    with pytest.raises(DumpError, match=r"expected capture\.json and request\.json.*did not come to its end"):
        Captured.load(tmp_path)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os.kill(os.getpid(), 9)", r"vLLM ended \(SIGKILL\).*killed by signal 9.*memory runs out"),
        ("print('hsnb: importing vLLM'); sys.exit(3)", r"vLLM ended \(exit code 3\) at 'importing vLLM': the log does not say why.*read .*vllm\.log"),
        (
            "json.dump({'type': 'RuntimeError', 'message': 'hidden_states [3, 1, 4], expected [3, 2, 4]: tokens, ids, width'},"
            "open(out + '/failure.json', 'w')); sys.exit(1)",
            "vLLM gave other states than it was asked for",
        ),
    ],
)  # fmt: skip
def test_a_failure_is_told_in_words_with_the_logs_end(body, words, tmp_path, monkeypatch, capture):
    stand_in(tmp_path, monkeypatch, body)
    with pytest.raises(ServerError, match=words) as error:
        capture()
    assert error.value.log == tmp_path / "out" / "vllm.log" and error.value.log_tail


def test_too_slow_is_ended(tmp_path, monkeypatch, capture):
    mark = tmp_path / "pids"
    stand_in(
        tmp_path, monkeypatch, f"open({str(mark)!r}, 'w').write(str(os.getpid())); print('hsnb: starting vLLM', flush=True); time.sleep(60)"
    )
    with pytest.raises(ServerError, match=r"vLLM has not finished after 6 s \(starting vLLM\)"):
        capture(timeout_s=6)
    assert not psutil.pid_exists(int(mark.read_text()))


def test_nothing_outlives_a_killed_owner(tmp_path, llama):
    """The owner is killed by SIGKILL; the engine, and a child of it in a session of its own, end."""
    mark = tmp_path / "pids"
    script = tmp_path / "driver.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)'], start_new_session=True)\n"
        f"open({str(mark)!r} + '.tmp', 'w').write(f'{{os.getpid()}} {{child.pid}}'); os.rename({str(mark)!r} + '.tmp', {str(mark)!r})\n"
        "time.sleep(99)\n"
    )
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    python.chmod(0o755)
    code = f"import hsnb.vllm; hsnb.vllm.capture({str(llama)!r}, [[1, 2]], [2], out={str(tmp_path / 'out')!r})"
    owner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "HSNB_VLLM_PYTHON": str(python)})
    try:
        limit = time.monotonic() + 30
        while not mark.exists() and time.monotonic() < limit:
            time.sleep(0.05)
        pids = [int(p) for p in mark.read_text().split()]
        assert all(map(psutil.pid_exists, pids))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    limit = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))


# -- causes, on lines as vLLM 0.32 writes them

CORE = "(EngineCore pid=1) ERROR 11-29 23:26:45 [core.py:1]"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported", "does not know this model ['FooForCausalLM']"),
        (f"{CORE} ValueError: To serve at least one request, 3.2 GiB KV cache is needed, which is larger than the available", "too little memory is left"),
        (f"{CORE} RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "the host's memory is too small"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "the GPU's memory is too small"),
        (f"{CORE} RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested", "cannot extract hidden states"),
        (f"{CORE} RuntimeError: operator torchvision::nms does not exist", "torchvision, torchaudio or torchcodec is in"),
        (f"{CORE} KeyError: 'q_proj'", "KeyError: 'q_proj'"),
    ],
)  # fmt: skip
def test_causes(line, words):
    end = {"type": "RuntimeError", "message": "Engine core initialization failed. See root cause above."}
    cause = find_cause(
        ["INFO torchvision is not here", line, "RuntimeError: Engine core initialization failed. See root cause above."], end
    )
    assert words in cause.words


def test_the_connectors_raw_file_is_read_and_stays_unknown(tmp_path):
    file = tmp_path / "0-bb86852d.safetensors"  # as vLLM 0.32 writes it: two tensors, no metadata
    save_file({"hidden_states": torch.ones(3, 2, 4), "token_ids": torch.arange(3)}, file)
    dump = open_dump(file)
    assert (dump.boundaries, dump.final, dump.num_layers, dump.columns) == (UNKNOWN, UNKNOWN, None, 2)
    assert torch.equal(dump.states(), load_file(file)["hidden_states"])
