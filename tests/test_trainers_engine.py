"""Extracted straight into a trainer's layout on real servers: what the real SpecForge and speculators read predicts the server's own text."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hsnb import extract, probe
from hsnb.chat import load_tokenizer
from hsnb.data import prepare
from hsnb.params import Deployment
from hsnb.server import Server
from hsnb.trainers import open_folder
from hsnb.trainers.source import training
from hsnb.weights import Head, final_norm, rms_norm
from tests.conftest import tiny
from tests.helpers import prompt_ids, take
from tests.reference import relative_l2
from tests.test_export import real, ulps

QUESTIONS = ["What does the function os.path.join do?", "How is a list sorted?", "What is a generator?", "Name three kinds of numbers.",
             "What is a context manager?", "How does one read a file line by line?"]  # fmt: skip


def data_of(server, tmp_path, rows):
    """Prepare [(ids, mask)] as the data set of `server`."""
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n" for ids, mask in rows))
    deployment = server.deployment.model_copy(update={"data": server.deployment.data.model_copy(update={"source": str(file)})})
    return prepare(deployment, tmp_path / "data", max_length=400)


@pytest.fixture(scope="module")
def answers(engine):
    """The server's own greedy answers: [(prompt + answer, mask on the answer)]."""
    server = engine("smollm2")
    probe.ensure(server)
    tokenizer, rows = load_tokenizer(server.deployment), []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    with server.client() as client, ThreadPoolExecutor(len(rows)) as pool:  # in one batch: a step costs the same
        asked = [pool.submit(client.generate, ids, rid=f"test-answer-{n}", max_new_tokens=24) for n, ids in enumerate(rows)]
        made = [one.result().output_ids for one in asked]
    return [(ids + new, [0] * len(ids) + [1] * len(new)) for ids, new in zip(rows, made, strict=True)]


def top1(folder, head, state, column=-1, final=None):
    """The share of tokens under the mask that the head puts first, from the row before each."""
    right = total = 0
    for sample in open_folder(folder):
        states = sample.columns[column] if final is None else final(sample)
        at = (sample.loss_mask[1:] == 1).nonzero()[:, 0]
        right += (head.top1(states[at].float(), state) == sample.token_ids[1:][at]).sum().item()
        total += len(at)
    return right / total, total


@pytest.mark.engine("smollm2")
def test_specforges_bare_head_gives_the_servers_own_text(engine, answers, tmp_path):
    server = engine("smollm2")
    data = data_of(server, tmp_path, answers)
    result = extract.run(server, data, shard=0, num_shards=1, layout="specforge")
    assert result.ok and result.samples == len(answers)
    head = Head.load(server.deployment.model_path())
    share, tokens = top1(data.path, head, "post")
    assert tokens >= 120 and share > 0.99, (share, tokens)
    folder = open_folder(data.path)
    assert (folder.layout, folder.claims["boundaries"], folder.claims["final"]) == ("specforge", tuple(range(31)), "post")
    item = folder.sample(1)
    alone = take(server, item.token_ids.tolist())
    assert (item.token_ids.tolist(), item.loss_mask.tolist()) == answers[1]
    assert relative_l2(item.columns[-1], head.normed(alone.state("final"))).max() < 2**-7
    assert relative_l2(item.columns[15], alone.state(15)).max() < 2**-7
    alone.path.unlink()


@pytest.mark.engine("smollm2")
def test_the_teacher_sees_a_wrong_final_in_what_speculators_reads(engine, answers, tmp_path):
    """Right: above 0.99. B_L stored normed, so that speculators norms it twice, or B_{L-1} in its place: below 0.6."""
    server = engine("smollm2")
    data = data_of(server, tmp_path, answers)
    assert extract.run(server, data, shard=0, num_shards=1, layout="speculators").ok
    head = Head.load(server.deployment.model_path())
    right, tokens = top1(data.path, head, "pre")
    assert tokens >= 120 and right > 0.99, (right, tokens)
    twice, _ = top1(data.path, head, "pre", final=lambda s: head.normed(s.columns[-1]))
    early, _ = top1(data.path, head, "pre", column=29)
    assert twice < 0.6 and early < 0.6, (twice, early)


@pytest.mark.engine("tiny")
def test_the_real_readers_take_what_was_extracted_and_drop_nothing(engine, tmp_path):
    server = engine("tiny")
    probe.ensure(server)
    rows = [(prompt_ids(n, 500, seed=n), [0, 0] + [1] * (n - 2)) for n in (5, 30, 64)]
    for layout in ("speculators", "specforge"):
        (tmp_path / layout).mkdir()
        data = data_of(server, tmp_path / layout, rows)
        assert extract.run(server, data, shard=0, num_shards=1, layout=layout).ok
        how, about, _ = training(data.path)  # the model is the one that the folder names
        assert about["boundaries"] == tuple(range(9)) and str(data.path) in how.command
        got = real(layout, data.path, tmp_path)
        width = server.armed[0].hidden_size
        assert [item["input_ids"].flatten().tolist() for item in got["items"]] == [ids for ids, _ in rows]
        if layout == "speculators":
            assert got["dropped"] == 0 and " --target-layer-ids 0 1 2 3 4 5 6 7 8 " in how.command
            assert [tuple(i["hidden_states"].shape) for i in got["items"]] == [(n, 9 * width) for n in (5, 30, 64)]
            final = got["items"][1]["verifier_last_hidden_states"]
        else:
            assert torch.equal(got["items"][1]["hidden_state"][0], torch.cat(open_folder(data.path).sample(1).columns[:-1], -1))
            weight, eps = final_norm(server.deployment.model_path())
            assert ulps(got["items"][1]["target"][0], rms_norm(final, weight, eps).to(torch.bfloat16)) <= 16  # that one was rounded before
            assert relative_l2(got["items"][1]["target"][0], rms_norm(final, weight, eps)).max() < 2**-7


@pytest.mark.engine("tiny")
def test_the_norm_is_the_engines_own(engine, engine_starts, tmp_path):
    """norm(B_L) computed from the checkpoint's weight in float32 against the state that the engine itself normed: another server."""
    ids = prompt_ids(50, 500, seed=2)
    before = take(engine("tiny"), ids)
    weight, eps = final_norm(engine("tiny").deployment.model_path())
    ours = rms_norm(before.state("final"), weight, eps)
    engine.stop()
    setting = {**tiny(chunked_prefill_size=64), "capture": {"boundaries": list(range(9)), "final": "post"}}
    with Server.start(Deployment.parse(setting, origin="post"), log_dir=tmp_path) as server:
        engine_starts.note("tiny, final post", server.sglang_version)
        its = take(server, ids).state("final")
        assert relative_l2(its, ours).max() < 1e-6
        assert ulps(its.to(torch.bfloat16), ours.to(torch.bfloat16)) <= 1
        data = data_of(server, tmp_path, [(ids, [0, 0] + [1] * 48)])
        probe.ensure(server)
        assert extract.run(server, data, shard=0, num_shards=1, layout="specforge").ok
        assert ulps(open_folder(data.path).sample(0).columns[-1], ours.to(torch.bfloat16)) <= 1
