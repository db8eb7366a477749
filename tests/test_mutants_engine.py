"""The checks of the capture go red when a protection is switched off: each mutant on a real server, against the same helpers.

A check that passes on a broken capture proves nothing. All mutants run on one server, which is sane before and after.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hsnb.collect import collect, failure, free
from hsnb.dumps import dump_path, open_dump
from hsnb.errors import CaptureError, ServerError
from hsnb.params import Deployment
from hsnb.server import Server
from tests import mutants
from tests.conftest import tiny
from tests.helpers import prompt_ids, take
from tests.test_capture_engine import assert_equal_to_transformers
from tests.test_conditions_engine import ask, begun, counts, grown, half_made, paused, until

VOCAB = 500
WRITTEN_S = 1.5  # for a dump that must not be there to appear: it is written beside the answer
pytestmark = pytest.mark.engine("mutants")


@pytest.fixture(scope="module")
def server(engine, engine_starts, tmp_path_factory):
    engine.stop()
    folder = tmp_path_factory.mktemp("mutants")
    # The boundaries begin at 1, where the setter of SGLang's DeepSeek shifts; none is next to the last layer, where "late" ends.
    deployment = Deployment.parse({**tiny(chunked_prefill_size=64), "capture": {"boundaries": [1, 2, 4]}}, origin="mutants")
    with Server.start(deployment, log_dir=folder, extra_env=mutants.environment(folder)) as server:
        engine_starts.note("tiny, mutants", server.sglang_version)
        server.folder = folder
        yield server


def rows_equal_transformers(server) -> None:
    """One prompt in three chunks, alone."""
    prompt = prompt_ids(150, VOCAB, seed=1)
    dump = take(server, prompt)
    assert dump.token_ids.tolist() == prompt
    assert_equal_to_transformers(dump, "tiny-deepseek")
    free(dump.path)


def own_rows_in_a_batch(server) -> None:
    """Six prompts of ten tokens in one batch."""
    prompts = {f"hsnb-batch-{n}-{time.time_ns()}": prompt_ids(10, VOCAB, seed=n) for n in range(6)}
    with server.client() as client, ThreadPoolExecutor(6) as pool:
        with paused(client):
            asked = [pool.submit(ask, client, prompt, rid) for rid, prompt in prompts.items()]
            time.sleep(0.2)
        for answer in asked:
            answer.result()
    for rid, prompt in prompts.items():
        dump = open_dump(collect(server.spool, rid))
        assert dump.token_ids.tolist() == prompt
        assert_equal_to_transformers(dump, "tiny-deepseek")
        free(dump.path)


def others_are_kept_out(server) -> None:
    before, files = counts(server), set(server.spool.iterdir())
    with server.client() as client:
        ask(client, prompt_ids(9, VOCAB), "somebody-elses")
    time.sleep(WRITTEN_S)
    appeared = set(server.spool.iterdir()) - files
    for path in appeared:
        free(path)
    assert not appeared, "a dump of somebody else's request"
    assert grown(server, before) == {"other": 1}


def whole_as_soon_as_it_is_there(server) -> None:
    """Look for the file while the prompt runs, and read it at first sight."""
    prompt, rid = prompt_ids(500, VOCAB, seed=2), f"hsnb-seen-{time.time_ns()}"
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client, prompt, rid)
        until(lambda: dump_path(server.spool, rid, "safetensors") is not None, "the file")
        dump = open_dump(dump_path(server.spool, rid, "safetensors"))
        seen = [dump.state(k).clone() for k in dump.boundaries]
        answer.result()
    dump = open_dump(collect(server.spool, rid))
    assert all((a == dump.state(k)).all() for k, a in zip(dump.boundaries, seen, strict=True)), "read before it was whole"
    assert_equal_to_transformers(dump, "tiny-deepseek")
    free(dump.path)


def answers_are_the_models_own(server) -> None:
    """The same prompt, captured and not: the same tokens and logprobs, to the last bit."""
    prompt, given = prompt_ids(40, VOCAB, seed=4), []
    for rid in ("somebody-elses-answer", f"hsnb-answer-{time.time_ns()}"):
        with server.client() as client:
            reply = client.generate(prompt, rid=rid, max_new_tokens=6, logprobs=True)
        given.append((reply.output_ids, reply.output_logprobs, reply.input_logprobs))
    free(collect(server.spool, rid))
    assert given[0] == given[1], "the answer changed"


def nothing_is_left_of_an_aborted_prompt(server) -> None:
    rid = f"hsnb-aborted-{time.time_ns()}"
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client, prompt_ids(3000, VOCAB), rid)
        until(lambda: begun(server, rid), "the first chunk")
        with paused(client):
            client.request("POST", "/abort_request", {"rid": rid})
        answer.exception()
    until(lambda: half_made(server) == [], "the half-made file is gone", 3)
    until(lambda: failure(server.spool, rid), "the reason")
    assert re.match(r"aborted at row \d+ of 3000", failure(server.spool, rid))


def a_retracted_request_is_captured_once(server) -> None:
    """Taken back while it answers, so that its prompt runs again."""
    before, rid = counts(server), f"hsnb-retracted-{time.time_ns()}"
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client, prompt_ids(40, VOCAB, seed=6), rid, 100)
        until(lambda: dump_path(server.spool, rid, "safetensors"), "the dump")
        with paused(client, "retract"):
            pass
        assert answer.result()["num_retractions"] == 1
    free(collect(server.spool, rid))
    assert grown(server, before) == {"captured": 1}


def a_refused_prompt_leaves_no_dump(server) -> None:
    rid = f"hsnb-refused-{time.time_ns()}"
    with server.client() as client, pytest.raises(ServerError, match="answered 400"):
        ask(client, prompt_ids(4095, VOCAB), rid)
    time.sleep(WRITTEN_S)
    if path := dump_path(server.spool, rid, "safetensors"):
        free(path)
        raise AssertionError("a dump of a prompt that never ran")
    assert failure(server.spool, rid)


CHECKS = (
    rows_equal_transformers,
    own_rows_in_a_batch,
    others_are_kept_out,
    whole_as_soon_as_it_is_there,
    answers_are_the_models_own,
    a_retracted_request_is_captured_once,
    a_refused_prompt_leaves_no_dump,
    nothing_is_left_of_an_aborted_prompt,
)
STATES = r"boundary 1: relative L2"
RED = {  # mutant: the check that must fail, and its words
    "one layer late": (rows_equal_transformers, STATES),
    "one layer early": (rows_equal_transformers, STATES),
    "through the setter": (rows_equal_transformers, STATES),
    "normed as pre": (rows_equal_transformers, r"final: relative L2"),
    "result changed": (answers_are_the_models_own, r"the answer changed"),
    "other dtype": (rows_equal_transformers, STATES),
    "rows shifted by one": (rows_equal_transformers, STATES),
    "states exchanged": (own_rows_in_a_batch, STATES),
    "rows exchanged": (own_rows_in_a_batch, r"^assert \["),  # by the echo of the token ids
    "retracted, taken again": (a_retracted_request_is_captured_once, r"'failed': 1"),
    "stand-in taken": (a_refused_prompt_leaves_no_dump, r"a dump of a prompt that never ran"),
    "not kept out": (others_are_kept_out, r"a dump of somebody else's request"),
    "one token short": (rows_equal_transformers, r"rows 128..149 arrived, expected row 128 of 149 next"),
    "a chunk lost": (rows_equal_transformers, r"^assert|relative L2"),  # its ids are lost with it
    "a chunk twice": (rows_equal_transformers, STATES),
    "by reference": (rows_equal_transformers, STATES),
    "published too soon": (whole_as_soon_as_it_is_there, r"read before it was whole"),
    "half made for ever": (nothing_is_left_of_an_aborted_prompt, r"not within 3 s: the half-made file is gone"),
}


def test_every_mutant_has_its_check():
    assert set(RED) == set(mutants.MUTANTS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_sane_capture_passes(server, check):
    check(server)


@pytest.mark.parametrize("name", RED)
def test_the_check_goes_red(server, name):
    check, words = RED[name]
    mutants.be(server.folder, name)
    try:
        with pytest.raises((AssertionError, CaptureError), match=words):
            check(server)
    finally:
        mutants.be(server.folder, "")


def test_the_server_is_sane_again(server):
    for check in CHECKS[:-1]:
        check(server)
    for name in half_made(server):  # the mutant's own
        free(server.spool / name)
    CHECKS[-1](server)
