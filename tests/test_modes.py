"""What capture is not proved in is refused by the name of the flag: before a start, and from inside a server started by hand.

And what the capture does with batches that real servers rarely make, on a body of two lines. No engine.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hsnb.errors import ParamsError, ServerError
from hsnb.params import Deployment
from hsnb.patch import modes
from hsnb.patch.armed import Armed, ArmedFile, read_armed
from hsnb.patch.bodies import Body
from hsnb.patch.capture import Capture
from hsnb.patch.settings import Settings
from hsnb.server import flags
from hsnb.server.preflight import preflight
from tests.conftest import tiny

OFFERED = {  # SGLang's own flags for what modes.py refuses: attribute, flag and a value that turns it on
    **{name: (flag, "EAGLE3" if "algorithm" in name else True) for name, flag in modes.ON.items()},
    **{name: (splits.split()[0], 2) for name, splits in modes.PARTS.items()},
    "moe_a2a_backend": ("--moe-a2a-backend", "deepep"),
    "disaggregation_mode": ("--disaggregation-mode", "prefill"),
    "cuda_graph_config": ("--cuda-graph-backend-prefill", "breakable"),
}


def args(**changed) -> SimpleNamespace:
    """Return SGLang's arguments as they are on a plain server, in any of the versions."""
    graph = SimpleNamespace(prefill=SimpleNamespace(backend="disabled"), decode=SimpleNamespace(backend="full"))
    return SimpleNamespace(
        **{"tp_size": 8, "pp_size": 1, "moe_a2a_backend": "none", "disaggregation_mode": "null", "cuda_graph_config": graph} | changed
    )


def test_a_plain_server_is_supported():
    fused = {"flashinfer_allreduce_fusion_backend": "auto", "enable_aiter_allreduce_fusion": True}  # the engine completes the sums itself
    assert modes.unsupported(args(**fused)) == ""
    flags.check_flags({"flashinfer_allreduce_fusion_backend": "auto", "enforce_disable_flashinfer_allreduce_fusion": True}, {})


def test_fused_all_reduce_where_the_engine_adds_in_the_loop(monkeypatch):
    """GLM-4 MoE and gpt-oss before 0.5.21: hidden + residual, and the last block's sum is still owed."""
    fused = args(flashinfer_allreduce_fusion_backend="auto")
    why = modes.partial_sums(fused, "Glm4MoeModel", "0.5.20")
    assert "leaves Glm4MoeModel's states un-reduced in SGLang 0.5.20: use --enforce-disable-flashinfer-allreduce-fusion" in why
    for fine in ((fused, "Glm4MoeModel", "0.5.23"), (fused, "DeepseekV2Model", "0.5.17"), (args(), "GptOssModel", "0.5.17")):
        assert modes.partial_sums(*fine) == ""
    assert modes.partial_sums(args(flashinfer_allreduce_fusion_backend="auto", tp_size=1), "GptOssModel", "0.5.17") == ""
    monkeypatch.setattr(flags.importlib.metadata, "version", lambda name: "0.5.21")
    assert flags.unfused_flags("GptOssForCausalLM", 8) == []
    monkeypatch.setattr(flags.importlib.metadata, "version", lambda name: "0.5.20")
    assert flags.unfused_flags("GptOssForCausalLM", 8) == ["--enforce-disable-flashinfer-allreduce-fusion"]
    assert flags.unfused_flags("GptOssForCausalLM", 1) == flags.unfused_flags("DeepseekV3ForCausalLM", 8) == []


@pytest.mark.parametrize("name", OFFERED)
def test_each_mode_is_refused_inside_by_flag_and_remedy(name):
    flag, value = OFFERED[name]
    value = SimpleNamespace(prefill=SimpleNamespace(backend=value)) if name == "cuda_graph_config" else value
    why = modes.unsupported(args(**{name: value}))
    assert re.search(r"start the server without --|use tensor parallelism alone|use --disable-prefill-cuda-graph", why)
    assert name in why or name == "cuda_graph_config"
    assert flag in why or name == "cuda_graph_config"


@pytest.mark.parametrize("name", OFFERED)
def test_each_mode_is_refused_before_a_start(name):
    flag, value = OFFERED[name]
    checked = preflight(Deployment.parse(tiny(flags={flags.normal(flag): value}), origin="test"))
    row = next(r for r in checked.rows if r.check == "flags")
    assert not row.ok and flags.normal(flag) in flags.normal(row.value)
    words = r"expected a server whose prefill can be captured.*Next: take .* out of server.flags"
    if name == "nnodes":  # a run on a cluster starts such a server, and gives the flag itself
        words = r"expected server.nnodes, which hsnb turns into --nnodes.*Next: set server.nnodes instead"
    with pytest.raises((ServerError, ParamsError), match=words):
        checked.check()


def test_every_other_spelling_of_a_refused_flag_is_refused():
    """Read from the installed SGLang: field name and aliases of one argument are one flag."""
    root = Path(__import__("importlib.util", fromlist=["util"]).find_spec("sglang").submodule_search_locations[0]) / "srt"
    spellings = []
    for file in (root / "server_args.py", *(root / "arg_groups" / "fields").glob("*.py")):  # 0.5.17 has the one file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lists = [k.value for k in ast.walk(node.annotation) if isinstance(k, ast.keyword) and k.arg == "aliases"]
                spellings.append({flags.normal(node.target.id), *(flags.normal(a) for v in lists for a in ast.literal_eval(v))})
    assert len(spellings) > 300 and sum(len(s) > 1 for s in spellings) > 10
    for names in spellings:
        refused = names & set(flags.REFUSED)
        assert refused in (set(), names), f"{refused} refused, {names - refused} not"


# -- the capture on a body of two layers


class TwoLayers(torch.nn.Module):
    """As SGLang's bodies: adds 1 and 10 to token id, and keeps what layers_to_capture asks for."""

    def __init__(self):
        super().__init__()
        self.layers_to_capture: list[int] = []
        self.norm = torch.nn.Identity()
        self.aux = True

    def forward(self, input_ids, positions, batch, embeds=None):
        x, kept = (batch.input_ids[:, None].float() if embeds is None else embeds), []
        for i, add in enumerate((1, 10)):
            if i in self.layers_to_capture:
                kept.append(x)
            x = x + add
        x = self.norm(x)
        return (x, kept) if kept and self.aux else x


class Req(SimpleNamespace):
    __hash__ = object.__hash__


def req(rid: str, n: int, **more) -> Req:
    return Req(rid=rid, origin_input_ids=list(range(n)), output_ids=[], to_finish=None, finished_reason=None, **more)


def batch(*parts: tuple[Req, int, int], mode: str = "EXTEND") -> SimpleNamespace:
    """Return a prefill batch of rows start..end of each request; token ids are row numbers."""
    ids = torch.cat([torch.arange(start, end) for _, start, end in parts])
    forward_mode = SimpleNamespace(name=mode, is_extend=lambda: True)
    lengths = {"extend_seq_lens_cpu": [end - start for _, start, end in parts], "extend_prefix_lens_cpu": [start for _, start, _ in parts]}
    return SimpleNamespace(rids=[r.rid for r, *_ in parts], input_ids=ids, forward_mode=forward_mode, **lengths)


@pytest.fixture
def capture(tmp_path):
    armed = Armed(state="armed", dtype="float32", num_layers=2, hidden_size=1)
    settings = Settings(tmp_path, (0, 1), "pre", "safetensors", "hsnb-")
    made = Capture(TwoLayers(), settings, ArmedFile(tmp_path, armed), writes=True, warmup=False, spec=Body(), images=frozenset({777}))
    made.body.forward = made
    yield made
    made.writer.close()


def run(capture, *parts, ids: bool = True, **more):
    made = batch(*parts, **more)
    capture.note_lengths([r for r, *_ in parts])
    result = capture(made.input_ids if ids else None, None, made, *([] if ids else [made.input_ids[:, None].float()]))
    capture.writer.settle()
    return result


def said(capture) -> tuple[dict, list[str]]:
    armed = read_armed(capture.settings.spool)[0]
    return {what: n for what, n in armed.counts.items() if n}, [f"{f['request_id']}: {f['error']}" for f in armed.failures]


def dumps(capture) -> int:
    return len(list(capture.settings.spool.glob("*.safetensors")))


def test_a_body_called_with_embeddings_and_no_ids(capture):
    """Kimi-K2.5 and every model with a vision tower: general_mm_embed_routine passes input_ids=None."""
    from safetensors.torch import load_file

    assert run(capture, (req("hsnb-a", 3), 0, 3), ids=False).flatten().tolist() == [11, 12, 13]
    tensors = load_file(next(capture.settings.spool.glob("*.safetensors")))
    assert tensors["token_ids"].tolist() == [0, 1, 2]
    assert tensors["hidden_states"][:, :, 0].tolist() == [[0, 1, 11], [1, 2, 12], [2, 3, 13]]


def test_a_batch_of_sglangs_own_has_no_request_ids(capture):
    made = batch((req("hsnb-a", 3), 0, 3))
    made.rids = None
    assert capture(made.input_ids, None, made).flatten().tolist() == [11, 12, 13] and said(capture) == ({}, [])


def test_retracted_before_its_first_token_is_known_and_captured_once(capture):
    """With overlapped scheduling a request may run again before the first answer is there: output_ids are empty both times."""
    one = req("hsnb-a", 4)
    run(capture, (one, 0, 4))
    run(capture, (one, 0, 4))
    assert said(capture) == ({"captured": 1}, [])
    run(capture, (req("hsnb-a", 4), 0, 4))  # another request with the id of one that is over
    assert said(capture)[0] == {"captured": 2} and dumps(capture) == 1


def test_half_a_prompt_goes_when_its_request_does(capture):
    aborted, retracted, going = (req(f"hsnb-{n}", 6) for n in range(3))
    run(capture, (aborted, 0, 2), (retracted, 0, 3), (going, 0, 4))
    aborted.finished_reason = "abort"
    capture.let_go({"hsnb-2"})
    capture.writer.settle()
    assert said(capture) == ({"failed": 1}, ["hsnb-0: aborted at row 2 of 6: its client gave it up or went away"])
    assert len(list(capture.settings.spool.glob(".*.tmp"))) == len(capture.open) == 1
    run(capture, (retracted, 0, 6), (going, 4, 6))
    assert said(capture)[0] == {"failed": 1, "captured": 2} and list(capture.settings.spool.glob(".*.tmp")) == []


def test_a_failure_is_told_once_for_all_chunks(capture):
    cached = req("hsnb-a", 9)
    for start in (3, 5, 7):
        run(capture, (cached, start, start + 2))
    counts, failures = said(capture)
    assert counts == {"failed": 1} and "rows 0..2 did not run: they came from the radix cache" in failures[0]


def test_a_request_that_sglang_gave_up_is_not_taken_for_its_stand_in(capture):
    given_up = req("hsnb-a", 1)
    given_up.to_finish = "too long"
    run(capture, (given_up, 0, 1))
    assert said(capture)[0] == {"failed": 1} and dumps(capture) == 0


@pytest.mark.parametrize("mode", ["MIXED", "SPLIT_PREFILL", "TARGET_VERIFY", "DLLM_EXTEND"])
def test_other_kinds_of_batches_fail_by_name(capture, mode):
    assert run(capture, (req("hsnb-a", 3), 0, 3), mode=mode).shape == (3, 1)
    assert f"a {mode} batch is not captured: start the server without" in said(capture)[1][0]


def test_a_model_that_keeps_nothing_is_told_and_its_answer_given_back(capture):
    capture.body.aux = False
    assert run(capture, (req("hsnb-a", 3), 0, 3)).flatten().tolist() == [11, 12, 13]
    assert "the model gave no states" in said(capture)[1][0] and capture.body.layers_to_capture == []


def test_padded_rows_and_unknown_requests_fail_and_the_answer_is_given_back(capture):
    one = req("hsnb-a", 3)
    made = batch((one, 0, 3))
    assert capture(made.input_ids, None, made).shape == (3, 1)  # init_new never saw it
    capture.note_lengths([one])
    made.input_ids = torch.arange(4)
    assert capture(made.input_ids, None, made).shape == (4, 1)
    failures = said(capture)[1]
    assert "the batch was not understood: KeyError" in failures[0] and "4 rows in a batch of 3 tokens: padded batches" in failures[1]


def test_a_spool_removed_between_chunks_is_named_as_the_reason(capture):
    one, gone = req("hsnb-a", 4), capture.settings.spool.with_name("gone")
    run(capture, (one, 0, 2))
    capture.settings.spool.rename(gone)
    assert run(capture, (one, 2, 4)).shape == (2, 1)
    gone.rename(capture.settings.spool)
    assert "FileNotFoundError" in said(capture)[1][0] and capture.open == {}


def test_what_is_not_ours_is_counted_once(capture):
    other = req("somebody", 4)
    for start in (0, 2, 0):
        run(capture, (other, start, start + 2))
    assert said(capture) == ({"other": 1}, []) and dumps(capture) == 0


def test_a_prompt_with_an_image_fails_by_name_and_its_neighbour_does_not(capture):
    placeholder, image = req("hsnb-a", 5), req("hsnb-b", 3, multimodal_inputs=object())
    placeholder.origin_input_ids[4] = 777
    for start in (0, 2):  # the first chunk has no placeholder, and is refused all the same
        run(capture, (placeholder, start, start + 2), (image, 0, 3), (req(f"hsnb-{start}", 2), 0, 2))
    counts, failures = said(capture)
    assert counts == {"failed": 2, "captured": 2} and dumps(capture) == 2
    assert failures[0].startswith("hsnb-a: token id 777 at row 4 is the placeholder of an image: only text is captured")
    assert failures[1] == "hsnb-b: the prompt has an image: only text is captured"


class Flagged(TwoLayers):
    """As SGLang's Qwen2-MoE and Qwen3-MoE: its loop looks at an attribute of each layer, and never at layers_to_capture."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))

    def forward(self, input_ids, positions, batch, embeds=None):
        own, self.layers_to_capture = self.layers_to_capture, [i for i, x in enumerate(self.layers) if getattr(x, "asked_for", False)]
        result = super().forward(input_ids, positions, batch, embeds)
        self.layers_to_capture = own
        return result


def test_a_loop_that_looks_at_a_flag_of_each_layer(capture, caplog):
    """The flags are there for the one call, those that were not there before are gone after it, and others keep their value."""
    spec, body = Body(flag="asked_for"), Flagged()
    body.layers[1].asked_for = False
    capture.spec, capture.body, capture.forward = spec, body, body.forward
    run(capture, (req("hsnb-a", 3), 0, 3))
    assert said(capture) == ({"captured": 1}, [])
    assert spec.asked(body) == [] and body.layers_to_capture == []
    assert [vars(x).get("asked_for") for x in body.layers] == [None, False]
    capture.spec = Body()  # without the flag nothing comes out, and the client is told
    run(capture, (req("hsnb-b", 3), 0, 3))
    assert "the model gave no states: ValueError('none for [0, 1]')" in said(capture)[1][0]
    long = req("hsnb-c", 6)
    caplog.clear()
    run(capture, (long, 0, 3))
    run(capture, (long, 3, 6))
    assert len([r for r in caplog.records if r.exc_info]) == 1 and len(said(capture)[1]) == 2, "each chunk is told anew"
    with pytest.raises(RuntimeError), spec.asking(body, [1]):
        assert spec.asked(body) == [1]
        raise RuntimeError("the model's own")
    assert spec.asked(body) == []
