"""Start vLLM once, capture the states of many prompts, and write one file a prompt. Run by path inside vLLM's environment:

    python driver.py REQUEST.json

The request is `hsnb.vllm.request.Request` as JSON; what is written is described in `hsnb.vllm.run.capture`. Lines that begin
with "hsnb:" say how far it is; a failure is written to failure.json, with its traceback on stderr, and ends with exit code 1.
"""

import json
import os
import platform
import shutil
import sys
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WORKER = "hsnb_vllm_worker.HiddenStatesWorker"


def say(line: str) -> None:
    print(f"hsnb: {line}", flush=True)


def write_json(path: Path, tree: dict) -> None:
    """Write `tree` whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(tree, indent=1))
    os.replace(temporary, path)


def engine_args(request: dict, raw: Path, on_cpu: bool) -> dict:
    """Return vLLM's arguments for this capture."""
    args = {
        "model": request["model"],
        "dtype": request["dtype"],
        "tensor_parallel_size": request["tensor_parallel_size"],
        "max_model_len": request["max_model_len"],
        "max_num_batched_tokens": max(request["max_model_len"], 256),  # a prompt in one piece
        "max_num_seqs": 1,  # a batch changes the last bits, and mixes the rows that hooks see
        "enforce_eager": True,
        "enable_prefix_caching": False,  # cached tokens would give no rows
        "skip_tokenizer_init": not request["max_new_tokens"],
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
        "seed": 0,
    }
    if on_cpu:
        # vLLM 0.32's rotary kernel for the CPU is silently wrong for DeepSeek's plain rope (2.5-17 % off); yarn has a path of its own
        # and would not need this, and for Llama it changes nothing.
        args["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        args["kv_cache_memory_bytes"] = request["cpu_cache_bytes"]  # otherwise a share of all the memory there is
    if request["way"] == "connector":
        args["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": request["ids"]}},
        }
        args["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(raw)},
        }
        if on_cpu:
            args["kv_transfer_config"] |= {
                "kv_connector": "CPUHiddenStatesConnector",
                "kv_connector_module_path": "hsnb_vllm_connector",
            }
    return args


def collect(raw: Path, request_path: str) -> dict:
    """Return the tensors that the connector wrote; waits for its lock, which the writing thread holds."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    if Path(request_path).parent != raw:
        raise RuntimeError(f"the connector wrote to {request_path}, expected a file in {raw}")
    return load_hidden_states(request_path)


def next_logprobs(prompt_logprobs: list, token_ids: list) -> list:
    """Return log p of each next token of the prompt, S - 1 numbers, out of vLLM's list of S entries (the first is None)."""
    return [float(entry[token].logprob) for entry, token in zip(prompt_logprobs[1:], token_ids[1:], strict=True)]


def take(llm, request: dict, number: int, raw: Path) -> tuple[dict, dict]:
    """Run one prompt; return its tensors and its entry for capture.json."""
    from vllm import SamplingParams

    ids, wanted = request["prompts"][number], request["max_new_tokens"]
    sampling = SamplingParams(max_tokens=max(wanted, 1), temperature=0.0, prompt_logprobs=0, detokenize=False)
    hooked = request["way"] == "worker"
    if hooked:
        llm.collective_rpc("hsnb_forget")
    (out,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    if list(out.prompt_token_ids) != ids:
        raise RuntimeError(f"prompt {number}: vLLM ran other token ids than it was sent")
    if hooked:
        file = raw / f"{number}.safetensors"
        llm.collective_rpc("hsnb_write", args=(str(file), len(ids)))
        tensors = {**load_file(file), "token_ids": torch.tensor(ids, dtype=torch.int64)}
    else:
        tensors = collect(raw, out.kv_transfer_params["hidden_states_path"])
    answer = [int(t) for t in out.outputs[0].token_ids][:wanted]
    entry = {
        "request_id": out.request_id,
        "logprobs": next_logprobs(out.prompt_logprobs, ids),
        "output_ids": answer,
        # vLLM's own text begins with the prompt's where a prompt's bytes are no valid UTF-8 (seen in 0.32.0)
        "text": llm.get_tokenizer().decode(answer, skip_special_tokens=True) if wanted else "",
    }
    return tensors, entry


def check(tensors: dict, ids: list, columns: int, dtype: str, hidden_size: int) -> None:
    """Raise when the states are not [S, columns, H] of this prompt. An id past L gives one column fewer, and no error of vLLM's."""
    states, echo = tensors["hidden_states"], tensors["token_ids"].tolist()
    if tuple(states.shape) != (len(ids), columns, hidden_size):
        raise RuntimeError(f"hidden_states {list(states.shape)}, expected [{len(ids)}, {columns}, {hidden_size}]: tokens, ids, width")
    if echo != ids:
        raise RuntimeError(f"token_ids {echo[:8]}..., expected {ids[:8]}...: states of another prompt")
    if str(states.dtype).removeprefix("torch.") != dtype:
        raise RuntimeError(f"states in {states.dtype}, expected {dtype}")


def run(request: dict, out: Path) -> dict:
    """Capture every prompt of the request; return what goes into capture.json."""
    say("importing vLLM")
    import vllm
    from vllm import LLM
    from vllm.platforms import current_platform

    started = time.monotonic()
    raw = out / "raw"
    raw.mkdir(exist_ok=True)
    on_cpu = current_platform.is_cpu()
    say(f"starting vLLM {vllm.__version__} on {'the CPU' if on_cpu else current_platform.get_device_name()}")
    llm = LLM(**engine_args(request, raw, on_cpu))
    startup = time.monotonic() - started
    about = llm.collective_rpc("hsnb_describe")[0]
    asked = sorted(request["ids"])
    if request["way"] == "connector" and sorted(about["ids_read_back"] or []) != asked:
        raise RuntimeError(f"the model is armed with ids {about['ids_read_back']}, expected {asked}")
    if request["way"] == "worker":
        llm.collective_rpc("hsnb_hook", args=(asked,))
    labels = {
        **request["labels"],
        "vllm_version": vllm.__version__,
        "model_class": about["model_class"],
        "dtype": about["dtype"],
        "kind": "data",
    }
    entries, before = [], time.monotonic()
    for number, ids in enumerate(request["prompts"]):
        say(f"prompt {number} of {len(request['prompts'])}, {len(ids)} tokens")
        tensors, entry = take(llm, request, number, raw)
        check(tensors, ids, len(asked), about["dtype"], about["hidden_size"])
        entry["file"] = f"prompt-{number:05d}.safetensors"
        tensors = {"hidden_states": tensors["hidden_states"].contiguous(), "token_ids": tensors["token_ids"].to(torch.int64)}
        temporary = out / f".{entry['file']}.tmp"
        save_file(tensors, temporary, {**labels, "request_id": entry["request_id"]})
        os.replace(temporary, out / entry["file"])
        entries.append(entry)
    seconds = time.monotonic() - before
    if not request["keep_raw"]:
        shutil.rmtree(raw)
    say(f"captured {len(entries)} prompts in {seconds:.1f} s")
    versions = {"vllm_version": vllm.__version__, "torch_version": torch.__version__, "python_version": platform.python_version()}
    device = "cpu" if on_cpu else current_platform.get_device_name()
    return {
        **versions, **about, "device": device, "startup_seconds": round(startup, 2), "capture_seconds": round(seconds, 2), "prompts": entries,
    }  # fmt: skip


def main() -> int:
    request = json.loads(Path(sys.argv[1]).read_text())
    out = Path(request["out"])
    try:
        write_json(out / "capture.json", run(request, out))
        return 0
    except BaseException as error:
        traceback.print_exc()
        write_json(out / "failure.json", {"type": type(error).__name__, "message": str(error)})
        return 1


if __name__ == "__main__":  # vLLM starts its own processes by spawn, which imports this file again
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's own shutdown takes 5-8 s and then kills its engine; the supervisor ends the whole group at once
