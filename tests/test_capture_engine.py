"""The capture on real servers: the right rows of the right request at the right boundary, against transformers in float32."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsnb.dumps import open_dump
from hsnb.patch.armed import read_armed
from tests.conftest import SETTINGS
from tests.helpers import prompt_ids, take
from tests.reference import boundaries, relative_l2

MODELS = {"smollm2": ("smollm2-fp32", 49152, 30), "tiny": ("tiny-deepseek", 500, 8)}  # demo name, vocabulary, layers
MODEL_OF = {demo: name for name, (demo, *_) in MODELS.items()}
BAR = 1e-5  # relative L2 per token in float32; measured 2.4e-6 at the worst row


def assert_equal_to_transformers(dump, name: str) -> None:
    """Every column of the dump equals transformers' boundary of the same index, at every token."""
    reference = boundaries(name, dump.token_ids)
    for k in dump.boundaries:
        worst = relative_l2(dump.state(k), reference[k]).max().item()
        assert worst < BAR, f"boundary {k}: relative L2 {worst:.2g}"
    final = relative_l2(dump.state("final"), reference[-1]).max().item()
    assert dump.final == "pre" and final < BAR, f"final: relative L2 {final:.2g}"


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.engine(name)) for name in MODELS])
def model(request, engine):
    return (engine(request.param), *MODELS[request.param])


def test_300_tokens_in_chunks_of_64_equal_transformers_at_every_boundary(model):
    server, name, vocab, layers = model
    dump = take(server, prompt_ids(300, vocab))
    chunks = json.loads(dump.metadata["chunks"])
    assert (dump.num_tokens, chunks[0], chunks[-1][1], len(chunks)) == (300, [0, 64], 300, 5)
    assert dump.boundaries == tuple(SETTINGS[MODEL_OF[name]]["capture"]["boundaries"])
    assert dump.boundaries[-1] == layers and len(dump.boundaries) in (layers, layers + 1)  # without B_0 of a Llama in an older SGLang
    assert_equal_to_transformers(dump, name)


def test_the_comparison_fails_when_ids_are_moved_by_one(model, tmp_path):
    """On the file: every column's content is that of the boundary before it, the labels stay."""
    server, name, vocab, _ = model
    dump = take(server, prompt_ids(40, vocab, seed=1))
    tensors = load_file(dump.path)
    states = tensors["hidden_states"].clone()
    states[:, 1:-1] = tensors["hidden_states"][:, :-2]
    save_file({**tensors, "hidden_states": states}, tmp_path / "moved.safetensors", dump.metadata)
    assert_equal_to_transformers(dump, name)
    with pytest.raises(AssertionError, match=f"boundary {dump.boundaries[1]}: relative L2"):
        assert_equal_to_transformers(open_dump(tmp_path / "moved.safetensors"), name)
    reference = boundaries(name, dump.token_ids)
    margins = [relative_l2(reference[k], reference[k + 1])[1:].median().item() for k in dump.boundaries[:-1]]
    assert min(margins) > 1000 * BAR  # how far the nearest wrong boundary is away; token 0 is left out, it hides this


def test_eight_at_once_with_health_between_give_their_own_rows(model):
    server, name, vocab, _ = model
    prompts = [prompt_ids(n, vocab, seed=n) for n in (1, 7, 33, 64, 65, 100, 128, 250)]
    with server.client() as client:
        alone = [take(server, p, client) for p in prompts]
        before = read_armed(server.spool)[0].counts
        with ThreadPoolExecutor(9) as pool:
            together = [pool.submit(take, server, p, client) for p in prompts]
            health = pool.submit(httpx.get, f"{server.url}/health", timeout=120, trust_env=False)
            together = [f.result() for f in together]
        assert health.result().status_code == 200
    for prompt, one, many in zip(prompts, alone, together, strict=True):
        assert many.token_ids.tolist() == prompt
        assert relative_l2(many.states(), one.states()).max().item() < BAR
        assert many.request_id != one.request_id
    assert_equal_to_transformers(together[-1], name)
    after = read_armed(server.spool)[0].counts
    assert after["captured"] - before.get("captured", 0) == len(prompts)
    assert after.get("health", 0) - before.get("health", 0) in (0, 1)  # a busy server answers /health without running a token


def test_what_is_not_ours_is_counted_and_kept_out(model):
    server, _, vocab, _ = model
    counts = read_armed(server.spool)[0].counts
    files = set(server.spool.iterdir())
    with server.client() as client:
        client.generate(prompt_ids(5, vocab), rid="somebody-elses")
        time.sleep(1.5)  # /health runs a token only on a server that has been idle for a second
        assert httpx.get(f"{server.url}/health", timeout=60, trust_env=False).status_code == 200
    after = read_armed(server.spool)[0].counts
    assert counts["warmup"] == after["warmup"] == 1
    assert after["health"] == counts.get("health", 0) + 1
    assert after["other"] == counts.get("other", 0) + 1
    assert after["captured"] == counts.get("captured", 0)
    assert set(server.spool.iterdir()) == files


def test_the_same_request_twice_gives_the_same_file(model):
    server, _, vocab, _ = model
    first, second = (take(server, prompt_ids(50, vocab, seed=5)) for _ in range(2))
    assert torch.equal(first.states(), second.states())


def test_failures_of_the_spool_are_told_and_the_server_lives_on(model):
    """The spool is taken away under a running server, then put back."""
    from hsnb.errors import CaptureError

    server, _, vocab, _ = model
    away = server.spool.with_name(server.spool.name + "-away")
    server.spool.rename(away)
    try:
        with server.client() as client:
            client.generate(prompt_ids(5, vocab), rid="hsnb-test-gone")
    finally:
        away.rename(server.spool)
    from hsnb.collect import collect

    with pytest.raises(CaptureError, match=r"hsnb-test-gone was answered and not captured: FileNotFoundError.*the spool was removed"):
        collect(server.spool, "hsnb-test-gone")
    assert take(server, prompt_ids(5, vocab)).num_tokens == 5
    shutil.rmtree(away, ignore_errors=True)
