"""A vLLM that answers a turn for each line it reads. Run by path inside vLLM's environment by benchmarks/others.py:

    python others_vllm.py REQUEST.json    # {"model", "prompts": [[ids]], "ids": [layer ids], or [] for plain, "raw": folder}

Each turn sends every prompt at once, waits until the last file is whole, and prints {"answered_s", "seconds"}.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(request: dict) -> None:
    """Start the engine and answer turns until stdin ends."""
    from vllm import LLM, SamplingParams

    raw, ids = Path(request["raw"]), request["ids"]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hsnb" / "vllm" / "inside"))
    from driver import collect, engine_args

    common = {"dtype": "float32", "tensor_parallel_size": 1, "max_new_tokens": 0, "cpu_cache_bytes": 1 << 30, "max_model_len": 1024}
    args = engine_args({**common, "model": request["model"], "way": "connector" if ids else "", "ids": ids}, raw, True)
    llm = LLM(**{**args, "max_num_seqs": 64})
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    prompts = [{"prompt_token_ids": p} for p in request["prompts"]]
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        outs = llm.generate(prompts, sampling, use_tqdm=False)
        answered = time.perf_counter() - began
        found = [collect(raw, out.kv_transfer_params["hidden_states_path"]) for out in outs] if ids else []
        seconds = time.perf_counter() - began
        for tensors, prompt in zip(found, request["prompts"], strict=bool(ids)):
            if tensors["token_ids"].tolist() != prompt or len(tensors["hidden_states"]) != len(prompt):
                raise RuntimeError("states of another prompt")
        for path in raw.iterdir():
            path.unlink()
        print(json.dumps({"answered_s": answered, "seconds": seconds}), flush=True)


if __name__ == "__main__":  # vLLM starts its own processes by spawn, which imports this file again
    main(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)
