"""Acceptance predicted from a dump, against a plain emulation of chain drafting that goes token by token."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hsnb.drafter.accept import Acceptance, _walk, accept
from hsnb.drafter.convert import convert
from hsnb.drafter.model import load_drafter
from hsnb.drafter.states import choose, open_states
from hsnb.drafter.teacher import teacher_top1
from hsnb.errors import DataError, DumpError, ModelError
from tests.drafter_files import HEADS, KV, LAYERS, VOCAB, H, make_speculators, make_target, rand

BOUNDARIES = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target")


def texts() -> list[tuple[torch.Tensor, int]]:
    """Return three texts: token ids and the length of the prompt."""
    made = [(40, 7), (25, 12), (33, 3)]
    return [(torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(row)), p) for row, (n, p) in enumerate(made)]


def hidden(row: int, n: int) -> torch.Tensor:
    """Return random states [n, 7, H] of text `row`: B_1 to B_6 and the final."""
    return (rand(n, len(BOUNDARIES) + 1, H, seed=100 + row) * 5).bfloat16()


def write_states(folder, target, samples):
    """Write random states of `samples` over all boundaries: enough to compare code, and no accept length worth having."""
    import datasets

    table = []
    (folder / "hidden_states").mkdir(parents=True)
    for row, (ids, prompt) in enumerate(samples):
        save_file({"hidden_states": hidden(row, len(ids)), "token_ids": ids}, folder / "hidden_states" / f"hs_{row}.safetensors")
        table.append({"input_ids": ids.tolist(), "loss_mask": [0] * prompt + [1] * (len(ids) - prompt), "seq_len": len(ids)})
    datasets.Dataset.from_list(table).with_format("torch").save_to_disk(str(folder))
    (folder / "hsnb.json").write_text(json.dumps({"boundaries": BOUNDARIES, "final": "pre", "model": str(target)}))
    return open_states(folder)


@pytest.fixture
def states(tmp_path, target):
    return write_states(tmp_path / "states", target, texts())


def chain(drafter, ids: list[int], aux: torch.Tensor, steps: int) -> list[int]:
    """Draft `steps` tokens behind `ids` [n] with the states of its first n - 1 tokens, one token after the other, as a server does."""
    w, layer = drafter.weights, drafter.config.layer
    size, theta = H // HEADS, layer["rope_parameters"]["rope_theta"]

    def rms(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + layer["rms_norm_eps"]) * w[f"{name}.weight"]

    def rope(x, positions):  # [n, heads, size]; complex numbers, unlike the code under test
        turn = torch.polar(torch.ones(1), positions[:, None] * theta ** (-torch.arange(0, size, 2) / size))[:, None]
        y = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
        return torch.cat([y.real, y.imag], -1)

    def layer_forward(tokens, state, positions, cache):
        x = torch.cat([rms(drafter.embedding[tokens], "layers.0.input_layernorm"), rms(state, "layers.0.hidden_norm")], -1)
        q, k, v = ((x @ w[f"layers.0.self_attn.{n}_proj.weight"].T).view(len(x), -1, size) for n in "qkv")
        cache.append((rope(k, positions), v))
        keys, values = (torch.cat([c[i] for c in cache]).repeat_interleave(HEADS // KV, 1) for i in (0, 1))
        scores = torch.einsum("nhd,mhd->hnm", rope(q, positions), keys) / size**0.5
        seen = torch.ones(scores.shape[1:]).tril(scores.shape[2] - scores.shape[1]) > 0
        out = torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -1e30).softmax(-1), values).reshape(len(x), -1)
        x = state + out @ w["layers.0.self_attn.o_proj.weight"].T
        y = rms(x, "layers.0.post_attention_layernorm")
        up = torch.nn.functional.silu(y @ w["layers.0.mlp.gate_proj.weight"].T) * (y @ w["layers.0.mlp.up_proj.weight"].T)
        return x + up @ w["layers.0.mlp.down_proj.weight"].T

    cache, drafted = [], []
    x = aux.flatten(1)
    if drafter.config.raw["norm_before_fc"]:
        x = rms(x, "input_norm")
    state = x @ w["fc.weight"].T
    state = layer_forward(torch.tensor(ids[1:]), state, torch.arange(1.0, len(ids)), cache)
    for step in range(steps):
        last = rms(state[-1:], "norm")
        token = int(drafter.tokens[(last @ w["lm_head.weight"].T).argmax()])
        drafted.append(token)
        fed_back = last if drafter.config.raw["norm_output"] else state[-1:]
        state = layer_forward(torch.tensor([token]), fed_back, torch.tensor([len(ids) + 0.0 + step]), cache)
    return drafted


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "norm_output": True}], ids=["plain", "norms"])
def test_the_walk_is_a_servers_walk(tmp_path, target, flags):
    """Emulate serving on the text: draft with the model's own drafts, accept those that are the text's, go on; and compare."""
    make_speculators(tmp_path / "drafter", target, **flags)
    drafter, steps, samples = load_drafter(tmp_path / "drafter", target), 3, texts()
    for row, (ids, prompt) in enumerate(samples):  # write the chain's own drafts into the texts, so that some are accepted
        for n, root in enumerate(range(prompt, len(ids) - 4, 5)):
            length = 1 + n % 3
            drafted = chain(drafter, ids[: root + 2].tolist(), hidden(row, len(ids))[: root + 1, [1, 3, 4]].float(), length)
            ids[root + 2 : root + 2 + length] = torch.tensor(drafted)
    histogram = [0] * (steps + 1)
    for row, (ids, prompt) in enumerate(samples):
        aux, known = hidden(row, len(ids))[:, [1, 3, 4]].float(), prompt + 1  # the prefill gives the answer's first token
        while known < len(ids) - steps:
            drafted = chain(drafter, ids[:known].tolist(), aux[: known - 1], steps)
            n = 0
            while n < steps and drafted[n] == int(ids[known + n]):
                n += 1
            histogram[n] += 1
            known += n + 1
    got = accept(tmp_path / "drafter", write_states(tmp_path / "states", target, samples))
    assert got.histogram == tuple(histogram)
    assert all(histogram), histogram
    answers = torch.cat([ids[prompt:] for ids, prompt in samples])
    assert got.boundaries == (2, 4, 5) and got.samples == 3 and got.tokens == len(answers) == 76
    assert got.coverage == pytest.approx(float(torch.isin(answers, drafter.tokens).float().mean()))
    assert got.at_position[0] >= got.at_position[1] >= got.at_position[2] > 0


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True, "norm_output": True}], ids=["plain", "norms"])
def test_every_root_drafts_what_a_chain_drafts_there(tmp_path, target, states, flags):
    """Draft 0 everywhere, and later drafts wherever the chain's own drafts happen to be the text's."""
    drafter = load_drafter(make_speculators(tmp_path / "drafter", target, **flags), target)
    ids, _, columns = states.read(0)
    aux = columns[:, [1, 3, 4]].float()
    ids = ids.clone()
    for root in range(3, 36, 4):  # write the chain's own drafts into the text, so that there is something to accept
        ids[root + 2 : root + 4] = torch.tensor(chain(drafter, ids[: root + 2].tolist(), aux[: root + 1], 2))
    drafts = drafter.drafts(ids, aux, 3)
    assert drafts.shape == (len(ids) - 1, 3)
    full = 0
    for root in range(1, 35):
        own = chain(drafter, ids[: root + 2].tolist(), aux[: root + 1], 3)
        assert own[0] == int(drafts[root, 0])
        for k in (1, 2):
            if own[:k] == ids[root + 2 : root + 2 + k].tolist():
                assert own[k] == int(drafts[root, k])
                full += k == 2
    assert full >= 5


def test_a_converted_drafter_is_the_same_drafter(tmp_path, target, states):
    source = make_speculators(tmp_path / "trained", target, norm_before_fc=True, norm_output=True)
    convert(source, tmp_path / "out", target=target, dtype="float32")
    trained, converted = accept(source, states), accept(tmp_path / "out", states)
    assert converted.histogram == trained.histogram and converted.boundaries == (2, 4, 5)


def test_a_config_off_by_one_is_evaluated_on_what_it_would_be_fed(tmp_path, target, states):
    convert(make_speculators(tmp_path / "trained", target), tmp_path / "out", target=target, dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]  # boundaries where SGLang wants its setter's ids
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert accept(tmp_path / "out", states).boundaries == (3, 5, 6)
    assert accept(tmp_path / "out", states).histogram == accept(tmp_path / "trained", states, boundaries=[3, 5, 6]).histogram


def test_numbers_of_a_hand_made_walk():
    hits = torch.tensor([0, 3, 0, 0, 0, 1, 0, 0, 2, 0])
    assert _walk(hits, 1, 8) == [3, 1, 0]  # roots 1, 5, 7
    result = Acceptance((4, 3, 2, 1), samples=2, tokens=20)
    assert result.verifications == 10 and result.accept_length == pytest.approx(1 + 10 / 10)
    assert result.per_position == pytest.approx((0.6, 0.3, 0.1))
    assert list(result.frame()["draft"]) == [1, 2, 3]
    assert "accept length 2.000" in result.text() and "<table" in result._repr_html_()
    assert result.as_dict()["accept_length"] == pytest.approx(2.0)


def test_what_cannot_be_judged(tmp_path, target, states):
    drafter = make_speculators(tmp_path / "drafter", target)
    with pytest.raises(DataError, match="boundary 7 was not captured"):
        accept(drafter, states, boundaries=[2, 4, 7])
    with pytest.raises(DataError, match="another number of boundaries"):
        accept(drafter, states, boundaries=[2, 4])
    scaled = make_speculators(tmp_path / "scaled", target)
    config = json.loads((scaled / "config.json").read_text())
    config["transformer_layer_config"]["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5000.0}
    (scaled / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="a plain rope"):
        accept(scaled, states)


def test_choosing_columns(tmp_path, target, states):
    chosen = choose(states, tmp_path / "late", [3, 5, 6], rows=[2, 0])
    assert (chosen.boundaries, chosen.rows, chosen.num_layers) == ((3, 5, 6), [0, 1], LAYERS)
    ids, mask, columns = chosen.read(0)
    want_ids, want_mask, want = states.read(2)
    assert torch.equal(ids, want_ids) and torch.equal(mask, want_mask)
    assert torch.equal(columns, want[:, [2, 4, 5, 6]])
    normed = choose(states, tmp_path / "normed", [2, 4, 5], normed=True)
    last = normed.read(0)[2][:, -1].float()
    raw = states.read(0)[2][:, -1].float()
    assert normed.final == "post" and torch.allclose(last, raw * torch.rsqrt(raw.pow(2).mean(-1, keepdim=True) + 1e-5), rtol=0.01)
    freq = torch.load(tmp_path / "late" / "token_freq.pt", weights_only=True)
    assert sum(freq.values()) == int(chosen.read(0)[1].sum() + chosen.read(1)[1].sum())
    with pytest.raises(DataError, match="no boundary 7"):
        choose(states, tmp_path / "x", [2, 4, 7])


def test_opening_states(tmp_path, target, states):
    with pytest.raises(DataError, match=r"hsnb\.json says"):
        open_states(states.path, boundaries=[1, 2, 3])
    (states.path / "hsnb.json").unlink()
    with pytest.raises(DataError, match="states of another engine"):
        open_states(states.path)
    opened = open_states(states.path, boundaries=BOUNDARIES, model=target)
    assert opened.boundaries == tuple(BOUNDARIES) and opened.final == "pre"
    wrong = open_states(states.path, boundaries=[1, 2], model=target)
    with pytest.raises(DumpError, match="expected 3 columns"):
        wrong.read(0)


def test_teacher_top1(tmp_path, target, states):
    """The share is counted under the mask, of the token that follows; here made right by hand."""
    from safetensors.torch import load_file

    head = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    path = states.path / "hidden_states" / "hs_0.safetensors"
    stored = load_file(path)
    ids = stored["token_ids"]
    best = (head / head.norm(dim=1, keepdim=True))[ids.roll(-1)] * 10  # points at the next token's own embedding
    stored["hidden_states"][:, -1] = best.bfloat16()
    save_file(stored, path)
    got = teacher_top1(states, limit=1, wrong=True)
    assert got.total == 33 and list(got.shares) == ["B_8", "norm(B_8)", "B_6"]
    assert got.right > 0.9 and got.shares["B_6"] < 0.3
    assert teacher_top1(states, limit=1).shares == {"B_8": got.right}
    good, *others = got.checks()
    assert good.ok == (got.right > 0.99) and [c.ok for c in others] == [share < 0.6 for share in list(got.shares.values())[1:]]
