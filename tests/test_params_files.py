"""The params files of large deployments: as far as they can be tested where neither the GPUs nor the weights are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import hsnb.weights
from hsnb.boundaries import from_boundaries, to_boundaries
from hsnb.errors import BoundaryError, ModelError, ServerError
from hsnb.limits import limits_of
from hsnb.params import Deployment, ShapeParams, shape_of
from hsnb.paths import project_root
from hsnb.server.command import build_command, build_env
from hsnb.server.preflight import preflight
from hsnb.weights import Head, layer_norms

PARAMS = project_root() / "params"
FILES = sorted(file.name for file in PARAMS.glob("*.yaml"))
# What of the checkpoints' own config.json hsnb reads.
TEXT = {"num_hidden_layers": 61, "hidden_size": 7168, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
CONFIGS = {
    "kimi-k2.5-tp8": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 163605,
        "text_config": {**TEXT, "vocab_size": 163840, "max_position_embeddings": 262144, "rope_scaling": YARN},
    },
    "deepseek-v3-tp8": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **TEXT, "vocab_size": 129280,
        "max_position_embeddings": 163840, "rope_scaling": {**YARN, "factor": 40},
    },
}  # fmt: skip


@pytest.fixture
def standing_in(tmp_path):
    """Return a deployment whose model is a folder with nothing but a config.json."""

    def of(name: str) -> Deployment:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        return Deployment.load(PARAMS / f"{name}.yaml", model=str(tmp_path))

    return of


@pytest.mark.parametrize("file", FILES)
def test_every_params_file_parses_and_says_why_on_each_line(file):
    Deployment.load(PARAMS / file)
    lines = [line for line in (PARAMS / file).read_text().splitlines() if line.strip()]
    assert lines[0].startswith("# ")
    bare = [
        line for line in lines if "#" not in line and not line.rstrip().endswith(":") and not line.startswith(("name:", "  source: demo"))
    ]
    assert bare == []


def argument(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1, flag
    return command[command.index(flag) + 1]


def test_kimi_is_started_with_the_settings_of_the_first_deployment(standing_in, tmp_path):
    deployment = standing_in("kimi-k2.5-tp8")
    command = build_command(deployment, 30000)
    expected = {
        "--model-path": str(tmp_path), "--host": "127.0.0.1", "--port": "30000", "--device": "cuda", "--tp-size": "8", "--dtype": "bfloat16",
        "--attention-backend": "flashinfer", "--num-continuous-decode-steps": "4",
    }  # fmt: skip
    assert {flag: argument(command, flag) for flag in expected} == expected
    bare = (
        "--disable-cuda-graph",
        "--disable-radix-cache",
        "--disable-custom-all-reduce",
        "--trust-remote-code",
        "--disable-prefill-cuda-graph",
    )
    assert [command.count(flag) for flag in bare] == [1] * 5
    assert "--context-length" not in command and "--max-total-tokens" not in command  # SGLang's own, from the model and the free memory
    env = build_env(deployment, "/dev/shm/hsnb/30000")
    assert {name: env[name] for name in ("NCCL_PROTO", "NCCL_ALGO", "NCCL_P2P_LEVEL")} == {
        "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS",
    }  # fmt: skip
    assert (env["SGLANG_HS_DUMP_BOUNDARIES"], env["SGLANG_HS_DUMP_FINAL"], env["SGLANG_HS_DUMP_FORMAT"]) == (
        "3,31,59",
        "pre",
        "safetensors",
    )
    assert "SGLANG_USE_CPU_ENGINE" not in env


def test_deepseek_is_started_on_eight_gpus(standing_in):
    deployment = standing_in("deepseek-v3-tp8")
    command = build_command(deployment, 30000)
    assert (argument(command, "--tp-size"), argument(command, "--chunked-prefill-size")) == ("8", "8192")
    assert build_env(deployment, "/x")["SGLANG_HS_DUMP_BOUNDARIES"] == "2,30,58"


@pytest.mark.parametrize("name", CONFIGS)
def test_their_shape_is_their_config(name, standing_in):
    deployment = standing_in(name)
    assert deployment.shape == shape_of(CONFIGS[name]) == deployment.model_shape()
    assert deployment.check_against_model() == tuple(deployment.capture.boundaries)
    assert limits_of(deployment).longest == deployment.shape.context_length - 7


def test_the_armed_triple_and_the_canonical_one_are_boundaries_of_61_layers():
    kimi = yaml.safe_load((PARAMS / "kimi-k2.5-tp8.yaml").read_text())
    assert kimi["capture"]["boundaries"] == [3, 31, 59]
    assert "# boundaries: [2, 30, 58]" in (PARAMS / "kimi-k2.5-tp8.yaml").read_text()
    # "The output of layer k" is B_{k+1}: what the first deployment meant by [2, 30, 58].
    assert to_boundaries([2, 30, 58], "deepspec", num_layers=61, family="deepseek") == (3, 31, 59)
    assert from_boundaries([3, 31, 59], "sglang-layers-to-capture", num_layers=61, family="deepseek") == [3, 31, 59]
    with pytest.raises(BoundaryError, match=r"each in 0\.\.61"):
        to_boundaries([3, 31, 62], "boundary", num_layers=61, family="deepseek")


def rows(deployment: Deployment) -> dict:
    return {row.check: row for row in preflight(deployment).rows}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_machine_without_gpus_is_refused_in_words(name, standing_in, monkeypatch):
    monkeypatch.setattr("hsnb.server.preflight.gpus", list)
    found = rows(standing_in(name))
    assert found["device"].value == "0 GPUs listed by nvidia-smi"
    assert found["device"].note == (
        "expected at least tp_size (8). Likely: no NVIDIA driver here. Next: server.device: cpu, or another machine"
    )
    assert found["flags"].ok and found["boundaries"].ok
    monkeypatch.setattr("hsnb.server.preflight.gpus", lambda: [("NVIDIA RTX PRO 6000", 97887)] * 4)
    with pytest.raises(ServerError, match=r"4 GPUs listed by nvidia-smi, expected at least tp_size \(8\)"):
        preflight(standing_in(name)).check()
    monkeypatch.setattr("hsnb.server.preflight.gpus", lambda: [("NVIDIA RTX PRO 6000", 97887)] * 8)
    assert rows(standing_in(name))["device"].ok


def test_a_machine_without_the_weights_is_refused_in_words(standing_in, tmp_path):
    missing = Deployment.load(PARAMS / "kimi-k2.5-tp8.yaml", model=str(tmp_path / "nothing"))
    found = rows(missing)
    assert "nothing/config.json: [Errno 2] No such file or directory" in found["model"].value
    assert "Likely: a wrong path, or a download that is not whole" in found["model"].note
    deployment = standing_in("kimi-k2.5-tp8")
    names = {f"t{n}": f"model-{n:05d}-of-000064.safetensors" for n in range(1, 65)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name in list(names.values())[:60]:
        (tmp_path / name).touch()
    error = rows(deployment)["model"].error
    assert isinstance(error, ModelError)
    assert error.got == f"4 of 64 weight files are not in {tmp_path}, the first is model-00061-of-000064.safetensors"
    for name in names.values():
        (tmp_path / name).touch()
    assert rows(deployment)["model"].value == str(tmp_path) and rows(deployment)["model"].note == "KimiK25ForConditionalGeneration"


def test_the_probe_reads_the_language_models_files_only(tmp_path, monkeypatch):
    """A checkpoint as Kimi-K2.5's is cut: a vision tower, experts, and few small tensors that the probe wants."""
    torch.manual_seed(0)
    width, vocab = 8, 12
    tensors = {
        "language_model.model.norm.weight": torch.rand(width),
        "language_model.lm_head.weight": torch.rand(vocab, width),
        **{f"language_model.model.layers.{j}.input_layernorm.weight": torch.rand(width) for j in range(4)},
        "vision_tower.norm.weight": torch.rand(width),
        "mm_projector.proj.weight": torch.rand(width, width),
        "language_model.model.embed_tokens.weight": torch.rand(vocab, width),
    }
    where = {
        "language_model.model.norm.weight": 3, "language_model.lm_head.weight": 3, "vision_tower.norm.weight": 4, "mm_projector.proj.weight": 4,
        "language_model.model.embed_tokens.weight": 1, **{f"language_model.model.layers.{j}.input_layernorm.weight": 1 + j % 2 for j in range(4)},
    }  # fmt: skip
    files = {n: f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)}
    for n, name in files.items():
        save_file({tensor: value for tensor, value in tensors.items() if where[tensor] == n}, tmp_path / name)
    index = {tensor: files[n] for tensor, n in where.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    text = {**TEXT, "num_hidden_layers": 4, "hidden_size": width, "vocab_size": vocab}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}))
    opened: list[tuple[str, list[str]]] = []
    real = hsnb.weights.safe_open

    class Spy:
        """Stand in for safe_open and write down which file is opened, and which tensors are read from it."""

        def __init__(self, path, framework):
            self.read: list[str] = []
            opened.append((Path(path).name, self.read))
            self.file = real(path, framework)

        def __enter__(self):
            self.inner = self.file.__enter__()
            return self

        def __exit__(self, *details):
            return self.file.__exit__(*details)

        def get_tensor(self, name):
            self.read.append(name)
            return self.inner.get_tensor(name)

    monkeypatch.setattr(hsnb.weights, "safe_open", Spy)
    head = Head.load(tmp_path)
    assert opened == [(files[3], ["language_model.model.norm.weight"]), (files[3], ["language_model.lm_head.weight"])]
    assert torch.equal(head.norm, tensors["language_model.model.norm.weight"]) and torch.equal(
        head.head, tensors["language_model.lm_head.weight"]
    )
    opened.clear()
    norms = layer_norms(tmp_path, [1, 3])
    assert {name for name, _ in opened} == {files[2]} and sorted(norms) == [1, 3]
    assert torch.equal(norms[3], tensors["language_model.model.layers.3.input_layernorm.weight"])


def test_a_context_is_computed_as_sglang_does():
    text = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9, "max_position_embeddings": 1000}
    assert shape_of(text) == ShapeParams(num_layers=2, hidden_size=8, vocab_size=9, context_length=1000)
    assert shape_of({**text, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}).context_length == 4000
    assert shape_of({**text, "rope_scaling": {"rope_type": "llama3", "factor": 4.0}}).context_length == 1000
    assert shape_of({**text, "rope_scaling": YARN}).context_length == 1000
