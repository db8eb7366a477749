"""A quantised checkpoint on a real server: a GGUF file in Q8_0, read by SGLang's GGUF loader and run by its GGUF layers.

On a CPU the kernels are the plain torch of cpu_shims. The witness is transformers with the same file's dequantised weights.
"""

import json
import uuid

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from hsnb.collect import collect
from hsnb.demo import model_folder
from hsnb.dumps import open_dump
from hsnb.patch.armed import read_armed
from hsnb.server import Server
from tests.by_hand import by_hand
from tests.conftest import first_boundary
from tests.gguf_file import write_gguf
from tests.helpers import prompt_ids
from tests.reference import boundaries, relative_l2
from tests.test_capture_engine import BAR


@pytest.mark.engine("gguf")
def test_every_boundary_of_a_gguf_file_equals_its_dequantised_weights(engine, engine_starts, tmp_path):
    """Started by hand: SGLang takes the file's path for the model's, and hsnb's deployments name folders."""
    engine.stop()
    folder, file = model_folder("tiny-qwen2"), tmp_path / "tiny.gguf"
    write_gguf(folder, file, gguf.GGMLQuantizationType.Q8_0)
    chosen, prompt, rid = list(range(first_boundary("Qwen2Model"), 7)), prompt_ids(40, 500), f"hsnb-test-{uuid.uuid4().hex}"
    add = ("--model-path", str(file), "--tokenizer-path", str(folder))
    with by_hand(tmp_path, add=add, boundaries=chosen, chunked_prefill_size=16) as (url, spool, info):
        engine_starts.note("a GGUF file", info["version"])
        with Server(url, "127.0.0.1", 0, spool, 0, None, {}, "", 0.0, None).client() as client:
            client.generate(prompt, rid=rid)
        dump = open_dump(collect(spool, rid))
        armed = read_armed(spool)[0]
        states = {k: dump.state(k).clone() for k in dump.boundaries}
    assert (armed.model_class, armed.server_args["quantization"]) == ("Qwen2Model", "gguf")
    assert (dump.token_ids.tolist(), dump.dtype, list(states)) == (prompt, torch.float32, chosen)
    assert json.loads(dump.metadata["chunks"]) == [[0, 16], [16, 32], [32, 40]]
    dequantised = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager")
    reference, unquantised = boundaries(dequantised.eval(), dump.token_ids), boundaries("tiny-qwen2", dump.token_ids)
    for k, state in states.items():
        worst = relative_l2(state, reference[k]).max().item()
        assert worst < BAR, f"boundary {k}: relative L2 {worst:.2g}"
        assert relative_l2(state, unquantised[k]).min().item() > 100 * BAR  # 5e-3 a weight: these are the quantised ones
