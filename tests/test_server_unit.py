"""The server's bring-up without a server. The process trees here are stand-ins: they show how the supervisor ends and clears
after processes that behave like SGLang's, not that SGLang behaves so; tests/test_server_engine.py shows that."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

import hsnb
from hsnb import paths
from hsnb.errors import BoundaryError, CaptureError, ModelError, ParamsError, ServerError
from hsnb.params import Deployment
from hsnb.patch.armed import Armed, ArmedFile
from hsnb.server import causes, command, commands, flags, ready, state
from hsnb.server.armed_check import check_armed, check_info, read_or_refuse
from hsnb.server.attached import attach, is_local
from hsnb.server.client import Client, Generated, generate_body
from hsnb.server.launch import owners
from hsnb.server.leftovers import MARKER, claim_spool, clear_spool
from hsnb.server.preflight import pick_port, preflight
from hsnb.server.supervisor import Job, create_time, is_alive, write_json

SHM = Path("/dev/shm")
HTTPX_CLIENT = httpx.Client


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def deployment(model: Path, *, boundaries=(2, 4, 6), capture=None, **server) -> Deployment:
    tree = {"name": "t", "model": str(model), "capture": {"boundaries": list(boundaries), **(capture or {})}}
    return Deployment.parse({**tree, "server": {"device": "cpu", "dtype": "float32", **server}}, origin="t")


# -- flags


def test_the_installed_arguments_are_read_without_importing_sglang():
    code = "import sys; from hsnb.server.flags import known_flags as k, sglang_version; n = k(); v = sglang_version();"
    code += "print(v, len(n) > 300, 'disable-radix-cache' in n, 'sglang' in sys.modules, 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said[0].startswith("0.5.") and said[1:] == ["True", "True", "False", "False"]


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"speculative_algorithm": "EAGLE3"}, ServerError, "speculative decoding verifies drafts"),
        ({"pp_size": 2}, ServerError, "pipeline parallelism gives each rank a part"),
        ({"--dp-size": 2}, ServerError, "data parallelism splits the requests"),
        ({"enable_dp_attention": True}, ServerError, "DP attention splits the requests"),
        ({"disable_radix_cache": False}, ServerError, "cached already give no rows"),
        ({"disable_prefill_cuda_graph": False}, ServerError, "a prefill CUDA graph skips the Python code"),
        ({"cuda_graph_backend_prefill": "full"}, ServerError, "a prefill CUDA graph skips the Python code"),
        ({"enable_torch_compile": True}, ServerError, "a compiled forward skips the Python code"),
        ({"tp_size": 2}, ParamsError, "Next: set server.tp_size instead"),
        ({"model_path": "x"}, ParamsError, "Next: set model instead"),
        ({"attention_backend": "triton", "attention-backend": "triton"}, ParamsError, "--attention-backend is given twice"),
        ({"atention_backend": "triton"}, ParamsError, "expected a flag of sglang.launch_server: attention-backend"),
    ],
)
def test_a_flag_that_would_break_a_capture_is_refused_by_name(given, kind, words):
    with pytest.raises(kind, match=r"server.flags has|given twice") as error:
        flags.check_flags(given, {})
    assert words in str(error.value)
    assert flags.normal(next(iter(given))) in flags.normal(str(error.value))


def test_harmless_values_of_those_flags_pass():
    fine = {"pp_size": 1, "disable_radix_cache": True, "cuda_graph_backend_prefill": "disabled", "enable_torch_compile": False}
    kimi = {
        "attention_backend": "flashinfer",
        "num_continuous_decode_steps": 4,
        "disable_cuda_graph": True,
        "disable_custom_all_reduce": True,
    }
    flags.check_flags(fine | kimi, {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS"})


def test_the_capture_variables_are_hsnbs_to_set():
    with pytest.raises(ServerError, match=r"server.env has SGLANG_HS_DUMP_DIR.*name the folder with server.spool"):
        flags.check_flags({}, {"SGLANG_HS_DUMP_DIR": "/tmp/x"})


def test_an_old_sglang_is_refused_by_version():
    with pytest.raises(ServerError, match=r"SGLang 0\.5\.16.*expected SGLang 0\.5\.17 or newer.*Next: make setup"):
        flags.check_version("0.5.16.post1")
    flags.check_version("0.5.17")
    flags.check_version("0.6.0rc1")


# -- command and environment


def test_the_command_on_a_cpu(model):
    argv = command.build_command(deployment(model, flags={"log_level": "debug", "sleep-on-idle": False, "cuda_graph_bs": [1, 2]}), 30000)
    assert argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    text = " ".join(argv)
    for part in ("--device cpu", "--attention-backend torch_native", "--disable-radix-cache", "--dtype float32", "--port 30000"):
        assert part in text
    assert "--context-length 4096" in text, "the model's 8192 positions are cut to what a small machine holds"
    assert "--log-level debug" in text and "--cuda-graph-bs 1 2" in text and "sleep-on-idle" not in text


def test_the_command_on_cuda_turns_prefill_graphs_off(model):
    argv = command.build_command(deployment(model, device="cuda", tp_size=8), 1)
    assert "--disable-prefill-cuda-graph" in argv and "--disable-radix-cache" in argv
    assert not {"--context-length", "--max-total-tokens", "--attention-backend", "--disable-cuda-graph"} & set(argv)


def test_capture_variables_come_and_go_with_capture(model, monkeypatch):
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", "/left/from/the/shell")
    asked = deployment(model, boundaries=(6, 2), capture={"final": "post", "format": "pt"}, env={"NCCL_PROTO": "LL"})
    env = command.build_env(asked, "/dev/shm/hsnb/1")
    values = [env[name] for name in command.CAPTURE_VARIABLES]
    assert values == ["/dev/shm/hsnb/1", "2,6", "post", "pt", "hsnb-", "1"] and env["NCCL_PROTO"] == "LL"
    assert env["SGLANG_USE_CPU_ENGINE"] == env["TORCHDYNAMO_DISABLE"] == env["HF_HUB_OFFLINE"] == "1"
    off = command.build_env(asked, None, {"SGLANG_HS_DUMP_DIR": "/x", "A": "b"})
    assert not set(command.CAPTURE_VARIABLES) & set(off) and off["A"] == "b"


def test_no_secret_in_the_head_of_the_log(model):
    argv = ["python", "-m", "sglang.launch_server", "--api-key", "abc", "--max-total-tokens", "8192"]
    text = command.masked(argv, {"SGLANG_API_KEY": "abc", "NCCL_PROTO": "LL", "HF_TOKEN": "abc"})
    assert "abc" not in text and "NCCL_PROTO=LL" in text and "--max-total-tokens 8192" in text


def test_cpu_ranks_get_cores_of_their_own():
    assert command.thread_binding(2).count("|") == 1


# -- preflight


def test_preflight_names_a_boundary_beyond_the_model(model):
    found = preflight(deployment(model, boundaries=(2, 9)))
    assert not found.ok and "FAILED" in found._repr_html_()
    assert list(found.frame().columns) == ["check", "value", "ok", "note"]
    with pytest.raises(BoundaryError, match=r"boundaries \[2, 9\].*0\.\.8"):
        found.check()


def test_preflight_passes_and_displays_itself(model, tmp_path):
    found = preflight(deployment(model, spool=str(tmp_path / "spool")))
    assert found.ok and found.check() is found, found.frame()
    assert not (tmp_path / "spool").exists(), "a preflight leaves nothing behind"


def test_preflight_refuses_a_spool_with_other_files(model, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    with pytest.raises(ServerError, match="holds files that are not a server's of hsnb"):
        preflight(deployment(model, spool=str(tmp_path / "data"))).check()


def test_preflight_refuses_a_port_in_use(model):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerError, match=r"port \d+ on 127.0.0.1 is in use"):
            preflight(deployment(model, port=taken.getsockname()[1])).check()


def test_preflight_refuses_an_environment_without_the_plugin(model, monkeypatch):
    with pytest.raises(ServerError, match=r"SGLANG_PLUGINS=other.*Next: SGLANG_PLUGINS=other,hsnb"):
        preflight(deployment(model, env={"SGLANG_PLUGINS": "other"})).check()
    assert preflight(deployment(model, env={"SGLANG_PLUGINS": "other"}), capture=False).ok
    monkeypatch.setattr("hsnb.server.preflight.importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(ServerError, match="no plug-in hsnb among the entry points"):
        preflight(deployment(model)).check()


def test_preflight_refuses_a_cpu_without_the_shims(model, monkeypatch):
    monkeypatch.setattr("hsnb.server.preflight.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match="no sgl_kernel in this environment"):
        preflight(deployment(model)).check()


def test_preflight_refuses_a_model_without_config(tmp_path):
    with pytest.raises(ModelError, match="a model folder with a config"):
        preflight(deployment(tmp_path)).check()


def test_preflight_says_when_there_are_too_few_gpus(model, monkeypatch):
    monkeypatch.setattr("hsnb.server.preflight.gpus", lambda: [("NVIDIA H200", 143771)])
    with pytest.raises(ServerError, match=r"1 GPUs listed.*tp_size \(8\)"):
        preflight(deployment(model, device="cuda", tp_size=8)).check()
    assert "NVIDIA H200, 140 GiB" in preflight(deployment(model, device="auto")).frame().to_string()


# -- causes


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("launch_server.py: error: unrecognized arguments: --wrong-flag 1", "a wrong flag: --wrong-flag 1"),
        ("launch_server.py: error: argument --dtype: invalid choice: 'x'", "a wrong flag: --dtype: invalid choice: 'x'"),
        ("OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use", "the port is in use"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "the GPU's memory is too small"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "too little memory is left for the KV cache"),
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", "an unknown architecture"),
        ("RuntimeError: Cannot find any model weights with `/m`", "the model's weights are missing or not whole"),
        ("OSError: [Errno 28] No space left on device", "a disk or /dev/shm is full"),
        ("OSError: /m does not appear to have a file named config.json", "the model folder has no usable config or tokenizer"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp", "NCCL failed between the GPUs"),
        ("PermissionError: [Errno 13] Permission denied: '/x'", "may not be read or written"),
        ("ModuleNotFoundError: No module named 'flashinfer'", "a package is missing or broken: No module named 'flashinfer'"),
        ("AssertionError: strange", "the server raised AssertionError: strange"),
    ],
)
def test_the_log_gives_the_cause_in_words(line, words):
    noise = ["# hsnb 0.1: python --api-key config.json", "[2026] server_args={'config.json': ...}", "Traceback (most recent call last):"]
    cause = causes.find_cause([*noise, f"[2026-01-01 00:00:00] {line}", "Killed"], code=1)
    assert words in cause.words and cause.next and cause.line == line


def test_a_kill_by_the_kernel_is_told_from_the_exit_code():
    assert "signal 9" in causes.find_cause(["loading"], code=-9).words
    assert causes.find_cause([], code=1).words == "nothing was written to the log"


@pytest.mark.parametrize("small", [True, False])
def test_a_spool_that_has_small_pages_only_is_told_where_a_gpu_fills_it(monkeypatch, model, small):
    """What the kernel gives is in test_large_pages.py."""
    monkeypatch.setattr("hsnb.server.preflight.has_small_pages_only", lambda folder: small)
    for device, told in (("cuda", small), ("cpu", False)):
        (row,) = [r for r in preflight(deployment(model, device=device)).rows if r.check == "spool"]
        assert ("pages of 4 kB" in f"{row.value} {row.note}") is told and row.ok


def test_a_new_spool_is_tried_and_leaves_no_folder(model):
    spool = SHM / f"hsnb-test-{os.getpid()}"
    (row,) = [r for r in preflight(deployment(model, device="cuda", spool=str(spool))).rows if r.check == "spool"]
    assert row.ok and not spool.exists()


def test_why_the_plugin_did_not_load():
    lines = ["[2026] Failed to load plugin hsnb from group sglang.srt.plugins", "Traceback ...", "AttributeError: no attribute 'register'"]
    assert causes.plugin_failure(lines) == "AttributeError: no attribute 'register'"
    assert causes.plugin_failure(["all is well"]) == ""


def test_the_line_shown_while_it_starts(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("[2026-01-01 00:00:00 TP0] Load weight begin.\n  warnings.warn(\nx.py:1: UserWarning: no\n\n")
    assert causes.last_meaningful(log) == "Load weight begin."
    log.write_bytes(b"a\n" * 2_000_000 + b"the end\n")
    assert causes.tail(log, 1) == "the end"


# -- readiness


def handler_of(answers: dict[str, int]):
    return httpx.MockTransport(lambda request: httpx.Response(answers.get(request.url.path, 404), json={"version": "0.5.23"}))


def wait(monkeypatch, tmp_path, answers: dict[str, int], log: str, limit: float = 1.0):
    monkeypatch.setattr(ready.httpx, "Client", lambda **k: HTTPX_CLIENT(transport=handler_of(answers), base_url=k["base_url"]))
    (tmp_path / "a.log").write_text(log)
    progress = ready.Progress(tmp_path / "a.log", None, limit)
    return ready.wait_ready("http://x:37569", progress, is_alive=lambda: True, exit_record=tmp_path / "none")


def test_a_hang_in_warm_up_is_told_from_a_slow_load(monkeypatch, tmp_path):
    with pytest.raises(ServerError, match="a hang in the warm-up: the weights are loaded"):
        wait(monkeypatch, tmp_path, {"/model_info": 200, "/server_info": 200, "/health": 503}, "Load weight end.\n")
    with pytest.raises(ServerError, match=r"still loading \(Load weight begin.\).*raise server.ready_timeout_s"):
        wait(monkeypatch, tmp_path, {}, "Load weight begin.\n")


def test_a_port_that_was_taken_while_the_server_loaded_is_told_at_once(monkeypatch, tmp_path):
    """uvicorn gives up, and SGLang waits for its scheduler for ever."""
    line = "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 37569): address already in use"
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"the port was taken while the server loaded: ERROR: .*37569.*start it again"):
        wait(
            monkeypatch, tmp_path, {}, f"Load weight end.\n[2026-11-30 18:44:34] {line}\nINFO:     Waiting for application shutdown.\n", 60
        )
    assert time.monotonic() - began < 10
    another = {"/model_info": 200, "/server_info": 200, "/health": 200}  # what took the port is a server itself
    with pytest.raises(ServerError, match="the port was taken"):
        wait(monkeypatch, tmp_path, another, f"{line}\n{causes.FIRED_UP}\n")
    for other in (line.replace("37569", "8998"), line.replace("address already in use", "permission denied")):
        with pytest.raises(ServerError, match="still loading"):
            wait(monkeypatch, tmp_path, {}, f"Load weight begin.\n{other}\n")


@pytest.mark.parametrize("port", [0, 30000])
@pytest.mark.parametrize("host", ["10.255.1.2", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machine_is_refused_and_not_looked_for(model, host, port):
    with pytest.raises(ServerError, match=rf"server.host is {host}: .*expected an address of this machine"):
        preflight(deployment(model, host=host, port=port)).check()
    if not port:
        with pytest.raises(ServerError, match="expected an address of this machine"):
            pick_port(deployment(model, host=host))


def test_ready_by_http_and_the_line_alone_is_not_enough(monkeypatch, tmp_path):
    fired = causes.FIRED_UP + "!\n"
    assert wait(monkeypatch, tmp_path, {"/get_model_info": 200, "/get_server_info": 200}, fired) == {"version": "0.5.23"}
    with pytest.raises(ServerError, match="still loading"):
        wait(monkeypatch, tmp_path, {}, fired)


# -- armed


def armed(spool: Path, **fields) -> Armed:
    pid = os.getpid()
    common = {"state": "armed", "pid": pid, "pid_created": create_time(pid), "patch_version": hsnb.__version__, "only": "hsnb-", "port": 1}
    entry = Armed(**{**common, "boundaries": [2, 4, 6], "final": "pre", "format": "safetensors", **fields})
    spool.mkdir(exist_ok=True)
    ArmedFile(spool, entry)
    return entry


def test_no_armed_file_is_a_server_without_the_plugin(tmp_path):
    with pytest.raises(CaptureError, match=r"runs without the plug-in.*SGLANG_PLUGINS leaves it out"):
        read_or_refuse(tmp_path, url="http://x")
    with pytest.raises(CaptureError, match="the plug-in failed to load: TypeError: x"):
        read_or_refuse(tmp_path, url="http://x", plugin_failure="TypeError: x")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": "refused", "error": "radix cache"}, "rank 0 is refused: radix cache"),
        ({"boundaries": [2, 4, 8]}, "rank 0 captures boundaries [2, 4, 8], expected [2, 4, 6], as t asks"),
        ({"final": "post"}, "rank 0 captures final post, expected pre"),
        ({"format": "pt"}, "rank 0 captures format pt, expected safetensors"),
        ({"only": ""}, "rank 0 captures requests of every id"),
        ({"patch_version": "0.0.1"}, "rank 0 runs the plug-in of hsnb 0.0.1"),
        ({"pid": 2**22 + 1}, "which does not run on this host"),
        ({"pid_created": 1.0}, "which does not run on this host"),
        ({"rank": 1}, "armed ranks [1], expected ranks 0..0"),
        ({"port": 2}, "rank 0 belongs to port 2, expected port 1"),
    ],
)
def test_what_is_armed_otherwise_is_named(tmp_path, model, fields, words):
    armed(tmp_path / "spool", **fields)
    with pytest.raises(CaptureError) as error:
        check_armed(read_or_refuse(tmp_path / "spool", url="u"), ranks=1, expect=deployment(model), port=1)
    assert words in str(error.value)


def test_armed_as_asked_passes_and_two_ranks_must_agree(tmp_path, model):
    armed(tmp_path / "spool", boundaries=[6, 4, 2])
    check_armed(read_or_refuse(tmp_path / "spool", url="u"), ranks=1, expect=deployment(model))
    armed(tmp_path / "spool", rank=1, config_hash="other")
    with pytest.raises(CaptureError, match=r"boundaries|config_hash"):
        check_armed(read_or_refuse(tmp_path / "spool", url="u"), ranks=2, expect=deployment(model))


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"disable_radix_cache": False}, "the radix cache on"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, r"a prefill CUDA graph \(full\)"),
        ({"speculative_algorithm": "EAGLE3"}, "--speculative-algorithm EAGLE3"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"attn_dp_size": 2}, "DP attention"),
    ],
)
def test_a_running_server_in_another_mode_is_refused(info, words):
    check_info({"disable_radix_cache": True, "pp_size": 1, "cuda_graph_config": {"prefill": {"backend": "disabled"}}})
    with pytest.raises(ServerError, match=words):
        check_info(info)


def test_attach_refuses_another_host_and_a_bad_url():
    assert is_local("127.0.0.1") and is_local("localhost") and not is_local("192.0.2.1")
    with pytest.raises(ServerError, match="is on another host"):
        attach("http://192.0.2.1:30000")
    with pytest.raises(ParamsError, match="expected http://HOST:PORT"):
        attach("http://")
    with pytest.raises(ServerError, match="a server that listens there"):
        attach(f"http://127.0.0.1:{free_port()}")


# -- client


def test_the_body_and_the_answer_of_generate():
    body = generate_body([1, 2], rid="hsnb-1", logprobs=True)
    assert body["input_ids"] == [1, 2] and body["return_logprob"] and body["logprob_start_len"] == 0
    assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 0.0}
    meta = {"id": "hsnb-1", "prompt_tokens": 2, "cached_tokens": 0}
    meta |= {"input_token_logprobs": [[None, 1, None], [-2.5, 2, None]], "output_token_logprobs": [[-0.5, 7, None]]}
    got = Generated.of({"text": "a", "meta_info": meta})
    assert (got.rid, got.input_logprobs, got.input_ids, got.output_ids, got.output_logprobs) == (
        "hsnb-1",
        [None, -2.5],
        [1, 2],
        [7],
        [-0.5],
    )
    with pytest.raises(ServerError, match="neither input_ids nor text"):
        generate_body(rid="x")


def test_the_servers_own_message_and_no_second_try_after_an_answer():
    calls = []

    def answer(request):
        calls.append(request.url.path)
        return httpx.Response(400, json={"error": {"message": "The input (9 tokens) is longer than the context"}})

    client = Client("http://x")
    client._options = {"base_url": "http://x", "transport": httpx.MockTransport(answer)}
    with pytest.raises(ServerError, match=r"answered 400: The input \(9 tokens\) is longer"):
        client.generate([1], rid="a")
    assert calls == ["/generate"]


def test_connections_are_tried_again():
    calls = []

    def answer(request):
        calls.append(1)
        if len(calls) < 3:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"version": "0.5.23"})

    client = Client("http://x")
    client._options = {"base_url": "http://x", "transport": httpx.MockTransport(answer)}
    assert client.server_info() == {"version": "0.5.23"} and len(calls) == 3


# -- state and stop


def test_owners_count_a_parent_only_when_it_runs_the_kernel(monkeypatch):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert [o[0] for o in owners()] == [os.getpid()]
    monkeypatch.setenv("JPY_PARENT_PID", "1" if os.getppid() != 1 else "2")
    assert [o[0] for o in owners()] == [os.getpid()], "inherited from a kernel further up"
    monkeypatch.setenv("JPY_PARENT_PID", str(os.getppid()))
    assert [o[0] for o in owners()] == [os.getpid(), os.getppid()]


def test_a_port_is_reserved_while_its_server_loads(monkeypatch, tmp_path, model):
    monkeypatch.setattr(paths, "SPOOL_ROOT", tmp_path / "root")
    about = {
        "url": "http://127.0.0.1:7",
        "port": 7,
        "model": "m",
        "started": "now",
        "log": "",
        "exit_record": "",
        "spool": "",
        "detached": False,
    }
    path = state.reserve(7, about)
    assert [s.port for s in state.running_servers()] == [7] and path.stat().st_mode & 0o777 == 0o600
    for refuse in (lambda: state.reserve(7, about), lambda: preflight(deployment(model, port=7), capture=False).check()):
        with pytest.raises(ServerError, match=r"port 7 is taken by a server of hsnb \(m, started now\).*Next: hsnb stop 7"):
            refuse()
    write_json(path, {**json.loads(path.read_text()), "supervisor_created": 1.0})
    assert state.running_servers() == [], "a recycled pid is not the supervisor"
    state.reserve(7, about)


def test_stop_takes_nobodys_server_unless_it_is_named(monkeypatch):
    owned, kept = (
        SimpleNamespace(url=f"http://127.0.0.1:{p}", port=p, model="m", detached=d, log="l") for p, d in ((5001, False), (5002, True))
    )
    ended = []
    monkeypatch.setattr(commands, "stop_server", lambda server: ended.append(server.port) or 0.1)
    parser = argparse.ArgumentParser()
    commands.add_stop(parser)

    def stop(running, *words):
        monkeypatch.setattr(commands, "running_servers", lambda: running)
        ended.clear()
        commands.stop(parser.parse_args(words))
        return list(ended)

    assert stop([owned, kept]) == stop([owned, kept], "--all") == [5002]
    assert stop([owned, kept], "5001") == [5001]
    assert stop([owned], "--all") == []
    with pytest.raises(
        ServerError, match=r"no server running detached; with an owner that still runs: http://127.0.0.1:5001 .*Next: hsnb stop 5001"
    ):
        stop([owned])


def test_stop_refuses_politely_when_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "SPOOL_ROOT", tmp_path)
    parser = argparse.ArgumentParser()
    commands.add_stop(parser)
    with pytest.raises(ServerError, match="no server running detached"):
        commands.stop(parser.parse_args([]))
    with pytest.raises(ServerError, match=r"no server of this user on port 30000.*one of those running: none"):
        commands.stop(parser.parse_args(["http://127.0.0.1:30000/"]))
    assert commands.stop(parser.parse_args(["--all"])) == {"ok": True, "stopped": []}
    with pytest.raises(ParamsError, match="expected a URL or a port"):
        commands.port_of("nonsense")


def test_only_a_spool_that_hsnb_marked_is_removed(tmp_path):
    for name, owner in (("mine", "a"), ("other", "b"), ("data", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
        if owner:
            claim_spool(tmp_path / name, owner)
    assert clear_spool(tmp_path / "mine", "a") and not (tmp_path / "mine").exists()
    assert not clear_spool(tmp_path / "other", "a") and not clear_spool(tmp_path / "data") and not clear_spool(tmp_path / "none", "a")
    assert (tmp_path / "other" / MARKER).exists() and (tmp_path / "data" / "x").exists()


# -- the supervisor, on a stand-in for SGLang's process tree

STAND_IN = """
import mmap, os, signal, socket, sys, time
mark, port, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def shm(name):
    fd = os.open("/dev/shm/" + name, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(fd, 4096)
    keep = mmap.mmap(fd, 4096)
    os.close(fd)  # as SGLang does: only the mapping is left
    return keep
def title(name):  # as setproctitle does
    import setproctitle
    setproctitle.setproctitle(name)
kept = shm("sglang_loads_" + mark + ".shm")
if os.fork() == 0:  # a scheduler in a session of its own that will not hear SIGTERM
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:  # its child, orphaned when it ends
        more = shm("tmp-" + mark)
        os.link("/dev/shm/tmp-" + mark, "/dev/shm/sem.mp-" + mark)  # as sem_open does
        os.unlink("/dev/shm/tmp-" + mark)
        title("sglang::detokenizer-" + mark)
        open("/dev/shm/torch_%d_%s" % (os.getpid(), mark), "w").close()  # named by pid, not mapped
        if what == "dies":
            os.setsid()
        time.sleep(300)
    title("sglang::scheduler-" + mark)
    time.sleep(2 if what == "dies" else 300)
    os._exit(0)
if what == "ready":
    listening = socket.create_server(("127.0.0.1", port))
if what == "dies":
    time.sleep(3)
    print("launch_server.py: error: unrecognized arguments: --nonsense", flush=True)
    sys.exit(2)
time.sleep(300)
"""


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def titled(mark: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if any(mark in word for word in p.info["cmdline"] or [])]


def shm_files(mark: str) -> list[str]:
    return sorted(p.name for p in SHM.iterdir() if mark in p.name)


@pytest.fixture
def tree(tmp_path):
    """Return start(what, owner) -> (supervisor, mark, job); whatever a failed test leaves is ended by pid."""
    started = []

    def start(what: str, owner: subprocess.Popen | None = None):
        mark = f"hsnbtest{os.getpid()}x{len(started)}"
        spool = tmp_path / "spool"
        spool.mkdir()
        claim_spool(spool, mark)
        port = free_port()
        script = tmp_path / "stand_in.py"
        script.write_text(textwrap.dedent(STAND_IN))
        job = Job(
            command=[sys.executable, str(script), mark, str(port), what],
            log=str(tmp_path / "a.log"),
            exit_record=str(tmp_path / "a.exit.json"),
            state=str(tmp_path / "state.json"),
            spool=str(spool),
            port=port,
            owner=mark,
            owners=[[owner.pid, create_time(owner.pid)]] if owner else [],
        )
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "hsnb.server.supervisor"], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append((supervisor, mark))
        with supervisor.stdin as pipe:
            json.dump(asdict(job), pipe)
        wait_until(lambda: len(shm_files(mark)) == 3, "the stand-in's files")
        return supervisor, mark, job

    yield start
    for supervisor, mark in started:
        supervisor.kill()
        supervisor.wait()
        for pid in titled(mark):
            os.kill(pid, signal.SIGKILL)
        for name in shm_files(mark):
            (SHM / name).unlink()


def wait_until(true, what: str, seconds: float = 10.0) -> float:
    before = time.monotonic()
    while not true():
        assert time.monotonic() - before < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - before


def exit_of(job: Job) -> dict:
    return json.loads(Path(job.exit_record).read_text())


@pytest.mark.parametrize("what", ["loading", "ready"])
def test_nothing_outlives_an_owner_that_is_killed(tree, what):
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    supervisor, mark, job = tree(what, owner)
    foreign = SHM / f"sglang_loads_other-{os.getpid()}.shm"
    foreign.write_text("another server's")
    try:
        assert len(titled(mark)) == 3
        owner.kill()  # and not waited for: a dead owner that nobody reaped counts as dead
        wait_until(lambda: supervisor.poll() is not None, "the supervisor's end", 15)
        owner.wait()
        assert titled(mark) == [] and shm_files(mark) == [] and foreign.exists()
    finally:
        foreign.unlink()
    record = exit_of(job)
    assert record["reason"] == f"owner {owner.pid} ended" and record["left"] == [] and not Path(job.spool).exists()
    assert not Path(job.state).exists()


def test_asked_to_stop_it_ends_quickly_what_does_not_listen_to_sigterm(tree):
    supervisor, mark, job = tree("loading")
    state_now = json.loads(Path(job.state).read_text())
    assert (
        state_now["supervisor"] == supervisor.pid
        and state_now["detached"]
        and is_alive(state_now["launcher"], create_time(state_now["launcher"]))
    )
    supervisor.terminate()
    assert wait_until(lambda: supervisor.poll() is not None, "the end", 15) < 5, "a server that still loads gets 1 s"
    assert titled(mark) == [] and shm_files(mark) == [] and exit_of(job)["reason"] == "asked to stop"


def test_a_launcher_that_ends_by_itself_takes_its_orphans_along(tree):
    supervisor, mark, job = tree("dies")
    wait_until(lambda: supervisor.poll() is not None, "the end", 15)
    record = exit_of(job)
    assert (record["code"], record["signal"], record["reason"]) == (2, "", "the server ended by itself")
    assert titled(mark) == [] and shm_files(mark) == []
    assert causes.find_cause(causes.read_lines(Path(job.log)), code=2).words == "a wrong flag: --nonsense"


def test_a_burst_of_signals_does_not_stop_it_for_ever(tree):
    """Children that stop and go on send SIGCHLD in bursts; a handler that interrupts another one must not wait for its lock."""
    supervisor, mark, job = tree("loading")
    end = time.monotonic() + 3
    while time.monotonic() < end:
        os.kill(supervisor.pid, signal.SIGCHLD)
    supervisor.terminate()
    wait_until(lambda: supervisor.poll() is not None, "the end", 15)
    assert titled(mark) == [] and exit_of(job)["reason"] == "asked to stop"


def test_the_launcher_does_not_outlive_a_killed_supervisor(tree):
    supervisor, _, job = tree("loading")
    launcher = json.loads(Path(job.state).read_text())["launcher"]
    supervisor.kill()
    supervisor.wait()
    wait_until(lambda: create_time(launcher) is None, "the launcher's end", 5)


def test_the_supervisor_is_light():
    code = "import sys, hsnb.server.supervisor; print([m for m in ('torch', 'numpy', 'pandas', 'pydantic', 'httpx', 'sglang') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_pick_port_gives_one_that_is_free(model):
    assert pick_port(deployment(model, port=4)) == 4
    random.seed(42)
    picked = [pick_port(deployment(model)) for _ in range(50)]
    assert all(20_000 <= port < 30_000 for port in picked), "one that nobody connects from meanwhile"
    random.seed(42)
    assert [pick_port(deployment(model)) for _ in range(50)] != picked, "notebooks seed alike"
