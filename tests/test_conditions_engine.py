"""The capture in the conditions of a production server: right, or refused by a named error. Real servers, the tiny DeepSeek in float32.

What is refused before a server starts, and by the name of which flag, is in test_modes.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from hsnb.collect import collect, failure
from hsnb.dumps import dump_path, open_dump
from hsnb.errors import CaptureError, ServerError
from hsnb.params import Deployment
from hsnb.patch.armed import read_armed
from hsnb.patch.spool import file_stem
from hsnb.server import Server, attach
from hsnb.server.flags import known_flags, normal
from tests.by_hand import by_hand
from tests.conftest import EVERYTHING, tiny
from tests.helpers import prompt_ids, take
from tests.reference import relative_l2
from tests.test_capture_engine import BAR, assert_equal_to_transformers

CONTEXT = 4096
LONGEST = CONTEXT - 7  # SGLang 0.5.17 to 0.5.23: 1 for the answer, 5 in reserve, and the limit itself is too long (tp_worker.py)
VOCAB = 500


def conditions(**flags) -> dict:
    """Return the deployment: chunks of 512 (torch_native runs a chunk's whole prefix again), 4608 tokens of KV pool, all boundaries."""
    server = {
        "chunked_prefill_size": 512,
        "max_total_tokens": 4608,
        "flags": {"schedule_conservativeness": 0.01, **flags},  # takes more requests in than the pool has room for
        "env": {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"},  # seconds until SGLang looks whether a client is still there
    }
    return {**tiny(**server), "capture": {"boundaries": list(range(9))}}


ORDER = {"overlapped": False} | ({"one_by_one": True} if EVERYTHING else {})  # --disable-overlap-schedule


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.engine(f"conditions {name}")) for name in ORDER])
def server(request, engine, engine_starts, tmp_path_factory):
    engine.stop()
    deployment = Deployment.parse(conditions(disable_overlap_schedule=ORDER[request.param]), origin="test")
    with Server.start(deployment, log_dir=tmp_path_factory.mktemp("conditions")) as server:
        engine_starts.note(f"tiny, {request.param}", server.sglang_version)
        assert server.info["disable_overlap_schedule"] is ORDER[request.param]
        yield server


def counts(server) -> dict[str, int]:
    return {"captured": 0, "failed": 0, "other": 0, **read_armed(server.spool)[0].counts}


def grown(server, before: dict[str, int]) -> dict[str, int]:
    """Return what was counted since `before`, health requests aside."""
    return {k: n - before.get(k, 0) for k, n in counts(server).items() if k != "health" and n != before.get(k, 0)}


def ask(client, token_ids: list[int], rid: str, max_new_tokens: int = 1) -> dict:
    """Return the meta_info of an answer."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0}
    return client.request("POST", "/generate", {"rid": rid, "input_ids": token_ids, "sampling_params": sampling})["meta_info"]


@contextlib.contextmanager
def paused(client, mode: str = "in_place"):
    """Hold the scheduler still (it goes on taking requests in), so that what is sent meanwhile is there at the same moment."""
    client.request("POST", "/pause_generation", {"mode": mode})
    try:
        yield
    finally:
        client.request("POST", "/continue_generation", {})


def until(true, what: str, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.005)


def half_made(server) -> list[str]:
    return [p.name for p in server.spool.glob(".*.tmp")]


def begun(server, rid: str) -> bool:
    return any(name.startswith(f".{file_stem(rid)}.") for name in half_made(server))


def test_others_in_the_same_batch_as_ours(server):
    prompts = {f"{'hsnb-mixed' if n % 2 else 'other'}-{n}": prompt_ids(size, VOCAB, seed=n) for n, size in enumerate((9, 20, 1, 30) * 4)}
    before, log = counts(server), len(server.log.read_text())
    with server.client() as client, ThreadPoolExecutor(len(prompts)) as pool:
        with paused(client):
            answers = []
            for rid, prompt in prompts.items():
                answers.append(pool.submit(ask, client, prompt, rid))
                time.sleep(0.02)  # so that they queue in this order: every batch has some of both
        for answer in answers:
            answer.result()
    batches = [int(n) for n in re.findall(r"Prefill batch.*?#new-seq: (\d+)", server.log.read_text()[log:])]
    assert max(batches) >= 4 and len(batches) < len(prompts)
    for rid, prompt in prompts.items():
        if rid.startswith("hsnb-"):
            dump = open_dump(collect(server.spool, rid))
            assert dump.token_ids.tolist() == prompt
            assert_equal_to_transformers(dump, "tiny-deepseek")
        else:
            assert dump_path(server.spool, rid, "safetensors") is None
    assert grown(server, before) == {"captured": 8, "other": 8}


@pytest.mark.parametrize("size", ["shortest", "longest"])
def test_the_shortest_and_the_longest_prompt(server, size):
    """The longest runs once, not in both orders: it takes half a minute."""
    n = 1 if size == "shortest" else 1025 if server.info["disable_overlap_schedule"] else LONGEST
    dump = take(server, prompt_ids(n, VOCAB, seed=n))
    assert dump.num_tokens == n
    assert_equal_to_transformers(dump, "tiny-deepseek")


def test_a_prompt_that_sglang_refuses_late_leaves_no_dump(server):
    """It passes the front, and the scheduler then runs one token, id 0, in its place: a dump of that would look whole."""
    before = counts(server)
    with server.client() as client, pytest.raises(ServerError, match="answered 400"):
        ask(client, prompt_ids(CONTEXT - 1, VOCAB), "hsnb-too-long")
    with pytest.raises(CaptureError, match="SGLang gave the request up before it ran"):
        collect(server.spool, "hsnb-too-long")
    assert grown(server, before) == {"failed": 1}


def test_retracted_requests_are_captured_once(server):
    """Four answers that grow past the KV pool: SGLang takes some back and runs prompt and answer so far again."""
    prompts = [prompt_ids(1100, VOCAB, seed=n) for n in range(4)]
    before = counts(server)
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, client, prompt, f"hsnb-retracted-{n}", 80) for n, prompt in enumerate(prompts)]
        times = [answer.result()["num_retractions"] for answer in asked]
    assert max(times) >= 1
    for n, prompt in enumerate(prompts):
        dump = open_dump(collect(server.spool, f"hsnb-retracted-{n}"))
        assert dump.token_ids.tolist() == prompt
        assert_equal_to_transformers(dump, "tiny-deepseek")
    assert grown(server, before) == {"captured": 4} and half_made(server) == []


def test_a_prompt_retracted_between_its_chunks_starts_again(server):
    prompt, rid, before = prompt_ids(2000, VOCAB, seed=7), "hsnb-again", counts(server)
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client, prompt, rid)
        until(lambda: begun(server, rid), "the first chunk")
        with paused(client, "retract"):
            assert dump_path(server.spool, rid, "safetensors") is None
        assert answer.result()["num_retractions"] == 1
    dump = open_dump(collect(server.spool, rid))
    chunks = json.loads(dump.metadata["chunks"])
    assert chunks[0] == [0, 512] and [end for _, end in chunks[:-1]] == [start for start, _ in chunks[1:]]
    assert_equal_to_transformers(dump, "tiny-deepseek")
    assert grown(server, before) == {"captured": 1} and half_made(server) == []


@pytest.mark.parametrize("how", ["abort_request", "the client goes away"])
def test_a_prompt_given_up_between_its_chunks_leaves_nothing(server, how):
    """Half a prompt is thrown away as soon as SGLang drops it, without waiting for another request."""
    before, files = counts(server), set(server.spool.iterdir())
    neighbour = prompt_ids(90, VOCAB, seed=3)
    with server.client() as client, ThreadPoolExecutor(2) as pool:
        for n in range(3):
            rid, body = f"hsnb-{how[:5]}-{n}", {"input_ids": prompt_ids(4000, VOCAB, seed=n), "sampling_params": {"max_new_tokens": 1}}
            going = HTTPConnection(server.host, server.port, timeout=120)
            going.request("POST", "/generate", json.dumps({"rid": rid, **body}), {"Content-Type": "application/json"})  # and no answer read
            until(lambda rid=rid: begun(server, rid), "the first chunk")
            with paused(client):
                beside = pool.submit(ask, client, neighbour, f"hsnb-beside-{how[:5]}-{n}")
                if how == "abort_request":
                    client.request("POST", "/abort_request", {"rid": rid})
                else:
                    going.close()
                    time.sleep(2.5)  # SGLang notices after a second, and tells its scheduler
            until(lambda: half_made(server) == [], "the half-made file is gone")
            if how == "abort_request":
                going.getresponse().read()
                going.close()
            until(lambda rid=rid: failure(server.spool, rid), "the reason")
            assert re.fullmatch(r"aborted at row \d+ of 4000: its client gave it up or went away", failure(server.spool, rid))
            assert dump_path(server.spool, rid, "safetensors") is None
            beside.result()
            dump = open_dump(collect(server.spool, f"hsnb-beside-{how[:5]}-{n}"))
            assert_equal_to_transformers(dump, "tiny-deepseek")
            dump.path.unlink()
    assert grown(server, before) == {"captured": 3, "failed": 3}
    assert set(server.spool.iterdir()) == files
    assert_equal_to_transformers(take(server, prompt_ids(150, VOCAB, seed=5)), "tiny-deepseek")


@pytest.mark.engine("tiny tp 2")
def test_two_ranks_give_what_one_gives_and_agree_bit_for_bit(engine, engine_starts, tmp_path):
    prompts = {f"hsnb-probe-tp-{n}": prompt_ids(n, VOCAB, seed=n) for n in (1, 63, 64, 65, 300)}
    one = engine("tiny")
    alone = {rid: take(one, prompt).states().clone() for rid, prompt in prompts.items()}
    engine.stop()
    deployment = Deployment.parse({**tiny(chunked_prefill_size=64, tp_size=2), "capture": {"boundaries": list(range(9))}}, origin="test")
    with Server.start(deployment, log_dir=tmp_path) as server:
        engine_starts.note("tiny, tp 2", server.sglang_version)
        assert [(a.rank, a.tp_size) for a in server.armed] == [(0, 2), (1, 2)]
        with server.client() as client, ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda rid: ask(client, prompts[rid], rid), prompts))
        for rid, prompt in prompts.items():
            dump = open_dump(collect(server.spool, rid))
            assert dump.token_ids.tolist() == prompt
            assert relative_l2(dump.states(), alone[rid]).max().item() < BAR
            assert_equal_to_transformers(dump, "tiny-deepseek")
            said = [server.spool / f"{file_stem(rid)}.rank-{r}.json" for r in (0, 1)]
            until(lambda said=said: all(p.exists() for p in said), "both ranks' digests")
            first, second = (json.loads(p.read_text()) for p in said)
            assert first["rows"] == second["rows"] == len(prompt)
            assert first["columns"] == second["columns"] and len(set(first["columns"].values())) == 9  # final is B_8, being pre
        assert {k: v for k, v in counts(server).items() if v} == {"captured": 5, "warmup": 1}


@pytest.mark.engine("by hand")
def test_with_the_radix_cache_a_request_is_whole_or_fails_by_name(engine, engine_starts, tmp_path):
    engine.stop()
    prompt = prompt_ids(150, VOCAB)
    with by_hand(tmp_path, drop=("--disable-radix-cache",), chunked_prefill_size=64) as (url, spool, info):
        engine_starts.note("tiny, radix cache on", info["version"])
        with pytest.raises(ServerError, match=r"the radix cache on: cached tokens give no rows.*--disable-radix-cache"):
            attach(url, spool=str(spool))
        with Server(url, "127.0.0.1", 0, spool, 0, None, {}, "", 0.0, None).client() as client:
            ask(client, prompt, "hsnb-first")
            assert_equal_to_transformers_at(spool, "hsnb-first", prompt)
            assert ask(client, prompt, "hsnb-repeated")["cached_tokens"] > 0
            ask(client, prompt[:70] + prompt_ids(200, VOCAB, seed=9), "hsnb-same-start")  # its other rows come in three chunks
            for rid, first in (("hsnb-repeated", 149), ("hsnb-same-start", 70)):
                with pytest.raises(CaptureError, match=rf"rows 0..{first - 1} did not run: they came from the radix cache"):
                    collect(spool, rid)
            other = prompt_ids(150, VOCAB, seed=11)
            ask(client, other, "hsnb-new")
            assert_equal_to_transformers_at(spool, "hsnb-new", other)
    armed = read_armed(spool)[0]
    assert (armed.counts["captured"], armed.counts["failed"]) == (2, 2)
    assert len(list(spool.glob("*.safetensors"))) == 2 and list(spool.glob(".*.tmp")) == []


def assert_equal_to_transformers_at(spool, rid: str, prompt: list[int]) -> None:
    dump = open_dump(collect(spool, rid))
    assert dump.token_ids.tolist() == prompt
    assert_equal_to_transformers(dump, "tiny-deepseek")


REFUSED_INSIDE = {
    "mixed": (("--enable-mixed-chunk",), "enable_mixed_chunk is True: start the server without --enable-mixed-chunk"),
    "aux": (
        ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"),
        "enable_return_aux_hidden_states is True: start the server without --enable-return-aux-hidden-states",
    ),
}


@pytest.mark.engine("by hand")
@pytest.mark.parametrize("mode", REFUSED_INSIDE)
def test_a_server_started_by_hand_in_such_a_mode_says_why_it_is_not_armed(engine, engine_starts, tmp_path, mode):
    flags, words = REFUSED_INSIDE[mode]
    if normal(flags[0]) not in known_flags():
        pytest.skip(f"this SGLang has no {flags[0]}")
    engine.stop()
    with by_hand(tmp_path, add=flags) as (url, spool, info):
        engine_starts.note(f"tiny, {flags[0]}", info["version"])
        with pytest.raises(CaptureError, match=rf"rank 0 is refused: ValueError: {words}, expected armed"):
            attach(url, spool=str(spool))
        with Server(url, "127.0.0.1", 0, spool, 0, None, {}, "", 0.0, None).client() as client:
            assert client.generate(prompt_ids(5, VOCAB), rid="hsnb-served-all-the-same").prompt_tokens == 5
    assert [p.name for p in spool.iterdir()] == ["armed-0.json"]
