"""Each model family on a real server: its own body's states against transformers in float32, at every boundary.

docs/models.md has the table.
"""

import json
import uuid

import pytest
import torch
from safetensors import safe_open

from hsnb.collect import collect
from hsnb.demo import model_folder
from hsnb.dumps import open_dump
from hsnb.errors import CaptureError
from hsnb.images import image_tokens
from hsnb.params import Deployment
from hsnb.patch import bodies
from hsnb.patch.armed import read_armed
from hsnb.patch.spool import file_stem
from hsnb.server import Server
from tests.conftest import EVERYTHING, first_boundary
from tests.helpers import prompt_ids
from tests.reference import boundaries, model, relative_l2

BAR = 1e-5  # relative L2 per token in float32; measured 8.9e-7 at the worst row of the worst family
CHUNK, TOKENS, VOCABULARY = 16, 40, 500
# Kimi-K2.5's class is a wrapper with a vision tower, which calls its body with embeddings and without ids.
KIMI_FLAGS = {"trust-remote-code": True, "skip-tokenizer-init": True}
BODY = {  # demo model: its body's class in SGLang
    "tiny-kimi-k25": "DeepseekV2Model",
    "tiny-qwen3-moe": "Qwen3MoeModel",
    "tiny-glm4-moe": "Glm4MoeModel",
    "tiny-minimax-m2": "MiniMaxM2Model",
}
UNSUPPORTED = {"tiny-olmo2": "it has no module with layers_to_capture"}
if EVERYTHING:  # a server start each
    BODY |= {"tiny-qwen3": "Qwen3Model", "tiny-glm4": "Glm4Model"}
    BODY |= {"tiny-qwen2": "Qwen2Model", "tiny-qwen2-moe": "Qwen2MoeModel", "tiny-mistral": "LlamaModel"}
    UNSUPPORTED |= {"tiny-gemma3": "Gemma3TextModel: its aux states are the blocks' outputs without the residual"}


def deployment(name: str, chosen: list[int]) -> Deployment:
    flags = KIMI_FLAGS if name == "tiny-kimi-k25" else {}
    server = {"device": "cpu", "dtype": "float32", "chunked_prefill_size": CHUNK, "flags": flags}
    return Deployment.parse(
        {"name": name, "model": f"demo:{name}", "server": server, "capture": {"boundaries": chosen}, "data": {"source": "demo"}},
        origin=name,
    )


def depth(name: str) -> int:
    config = json.loads((model_folder(name) / "config.json").read_text())
    return config.get("text_config", config)["num_hidden_layers"]


@pytest.mark.engine("models")
@pytest.mark.parametrize("name", BODY)
def test_every_boundary_equals_transformers(name, engine, engine_starts, tmp_path):
    """The final state, the second tap and the margin over the neighbours too, on one prompt that arrives in three chunks."""
    first, layers = first_boundary(BODY[name]), depth(name)
    engine.stop()
    with Server.start(deployment(name, list(range(first, layers + 1))), log_dir=tmp_path) as server:
        engine_starts.note(name, server.sglang_version)
        rid = f"hsnb-probe-models-{uuid.uuid4().hex}"  # a probe's request has the second tap, too
        with server.client() as client:
            if name == "tiny-kimi-k25":
                an_image_placeholder_is_refused(server, client)
            client.generate(prompt_ids(TOKENS, VOCABULARY), rid=rid)
        dump = open_dump(collect(server.spool, rid))
        states, token_ids = {k: dump.state(k).clone() for k in (*dump.boundaries, "final")}, dump.token_ids
        tap, layers_tapped = second_tap(server.spool, rid)
        armed = server.armed[0]
    assert (armed.model_class, armed.num_layers, dump.final) == (BODY[name], layers, "pre")
    assert armed.layers_to_capture == list(range(first, layers))  # read back from what this body's loop reads
    assert token_ids.tolist() == prompt_ids(TOKENS, VOCABULARY)
    assert json.loads(dump.metadata["chunks"]) == [[0, 16], [16, 32], [32, 40]]

    reference = boundaries("tiny-deepseek" if name == "tiny-kimi-k25" else name, token_ids)
    errors = {k: relative_l2(states[k], reference[k]).max().item() for k in dump.boundaries}
    print(f"{name}: {max(errors.values()):.2g} at the worst row")
    for k, worst in errors.items():
        assert worst < BAR, f"boundary {k}: relative L2 {worst:.2g}"
        near = [relative_l2(states[k], reference[j])[1:].min().item() for j in (k - 1, k + 1) if 0 <= j <= layers]
        assert min(near) > 1000 * BAR, f"boundary {k}: a neighbour is only {min(near):.2g} away"
    assert torch.equal(states["final"], states[layers])

    net = model("tiny-deepseek" if name == "tiny-kimi-k25" else name).model
    for column, j in enumerate(layers_tapped):
        norm = net.norm if j == layers else net.layers[j].input_layernorm
        with torch.no_grad():
            worst = relative_l2(tap[:, column], norm(reference[j])).max().item()
        assert worst < BAR, f"second tap of layer {j}: relative L2 {worst:.2g}"


def an_image_placeholder_is_refused(server, client) -> None:
    """The server answers as for any token, and the client is told that nothing was captured and why; others are captured."""
    (placeholder,) = image_tokens(json.loads((model_folder("tiny-kimi-k25") / "config.json").read_text()))
    prompt, rid = prompt_ids(TOKENS, VOCABULARY), f"hsnb-test-image-{uuid.uuid4().hex}"
    prompt[20] = placeholder  # in the second chunk: the first is not begun either
    assert client.generate(prompt, rid=rid).prompt_tokens == TOKENS
    with pytest.raises(CaptureError, match=f"token id {placeholder} at row 20 is the placeholder of an image: only text is captured"):
        collect(server.spool, rid)
    assert [p.name for p in server.spool.glob("*.safetensors")] == []
    counts = read_armed(server.spool)[0].counts
    assert counts.get("captured", 0) == 0 and counts["failed"] == 1


def second_tap(spool, rid: str) -> tuple[torch.Tensor, list[int]]:
    """Return what the attention of each tapped layer took in [S, J, H], and the layers; the last entry is the final norm's output."""
    with safe_open(spool / f"{file_stem(rid)}.tap", "pt") as file:
        return file.get_tensor("attention_inputs"), json.loads(file.metadata()["layers"])


@pytest.mark.engine("models")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_family_that_is_not_proved_is_refused_by_name(name, engine, tmp_path):
    """Served for real: the client is told, and no server is left behind."""
    engine.stop()
    wanted = deployment(name, [1, 2])
    with pytest.raises(CaptureError) as error:
        Server.start(wanted, log_dir=tmp_path)
    kind = json.loads((wanted.model_path() / "config.json").read_text())["architectures"][0]
    assert f"rank 0 is refused: LookupError: no capture for {kind}: {UNSUPPORTED[name]}" in str(error.value)
    assert "hsnb/patch/bodies.py" in str(error.value)


# -- without an engine ------------------------------------------------------------------------------------------------------


def make(name: str, **attributes) -> torch.nn.Module:
    module = type(name, (torch.nn.Module,), {})()
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


def body_of(name: str, layers: int = 3, **attributes) -> torch.nn.Module:
    return make(name, layers=torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(layers)), layers_to_capture=[], **attributes)


def test_the_body_of_kimi_k25_is_found_two_modules_down():
    config = {"num_hidden_layers": 3}
    body = body_of("DeepseekV2Model", config=config)
    language = make("DeepseekV3ForCausalLM", model=body, config=config)
    wrapper = make("KimiK25ForConditionalGeneration", vision_tower=torch.nn.Linear(1, 1), language_model=language, config={"other": 0})
    found, _ = bodies.find_body(wrapper)
    assert found is body


def test_a_body_without_a_config_has_its_owners():
    """MiniMax-M2 keeps none; around DeepSeek, Kimi-K2.5's own config is another one."""
    body, own = body_of("MiniMaxM2Model"), body_of("DeepseekV2Model", config="the body's")
    assert (
        bodies.body_config(make("Wrapper", language_model=make("Owner", model=body, config="the owner's"), config="other"), body)
        == "the owner's"
    )
    assert bodies.body_config(make("Owner", model=own, config="other"), own) == "the body's"
    with pytest.raises(LookupError, match="no config for MiniMaxM2Model"):
        bodies.body_config(make("Owner", model=body), body)


def test_two_unproved_bodies_are_refused_by_name():
    with pytest.raises(LookupError, match=r"no capture for Owner: Gemma3TextModel: its aux states are .* without the residual"):
        bodies.find_body(make("Owner", model=body_of("Gemma3TextModel")))
    with pytest.raises(LookupError, match=r"no capture for Owner: NewModel has layers_to_capture, and is not proved; hsnb/patch/bodies.py"):
        bodies.find_body(make("Owner", model=body_of("NewModel")))


def test_the_ids_that_stand_for_images_are_read_from_the_config():
    assert image_tokens({"media_placeholder_token_id": 163605, "bos_token_id": 1, "text_config": {"image_token_id": 7}}) == {163605}
    assert image_tokens({"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 4, "audio_token_id": None}) == {5, 6}
    assert image_tokens({"model_type": "llama", "vocab_size": 32000}) == set()


def test_boundary_0_is_refused_before_the_engine_copies_it():
    bodies.check_boundaries((0, 2), 3, bodies.BODIES["Qwen3Model"], "0.5.23")
    bodies.check_boundaries((0, 2), 3, bodies.BODIES["DeepseekV2Model"], "0.5.17")
    with pytest.raises(ValueError, match=r"boundary 0 needs SGLang 0\.5\.21 for this model, this is 0\.5\.20"):
        bodies.check_boundaries((0, 2), 3, bodies.BODIES["Qwen3Model"], "0.5.20")
