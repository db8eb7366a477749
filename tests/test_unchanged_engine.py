"""One request at a time, the server's answers are the same to the last bit with the capture on, off, and without hsnb."""

import pytest

from hsnb.params import Deployment
from hsnb.server import Server
from tests.conftest import SETTINGS
from tests.helpers import prompt_ids

pytestmark = pytest.mark.engine("smollm2")


def answers(server) -> list[tuple]:
    """Return text, output ids and every logprob (as the server's own floats) of three prompts, one after the other."""
    given = []
    with server.client() as client:
        for n, size in enumerate((5, 40, 130)):  # one chunk, one chunk, three chunks
            reply = client.generate(prompt_ids(size, 49152, seed=n), rid=f"hsnb-same-{n}", max_new_tokens=8, logprobs=True)
            given.append((reply.text, tuple(reply.output_ids), tuple(reply.input_logprobs), tuple(reply.output_logprobs)))
    return given


def test_answers_are_identical_to_the_last_bit(engine, engine_starts, tmp_path):
    armed = engine("smollm2")
    expected = answers(armed)
    assert armed.armed[0].boundaries == list(range(31))
    assert "Applied 1 hook(s) to sglang.srt.model_executor.model_runner.ModelRunner.load_model (from: plugin=hsnb" in armed.log.read_text()
    assert answers(armed) == expected  # from run to run, else nothing below means anything
    assert len(expected[2][2]) == 130 and expected[2][2][5] < 0
    engine.stop()

    deployment = Deployment.parse(SETTINGS["smollm2"], origin="test")
    with Server.start(deployment, log_dir=tmp_path, capture=False) as server:
        engine_starts.note("smollm2, variable unset", server.sglang_version)
        log = server.log.read_text()
        assert "Executed general plugin: hsnb\n" in log and "plugin=hsnb," not in log  # loaded, and not a trace
        assert answers(server) == expected

    with Server.start(deployment, log_dir=tmp_path, capture=False, extra_env={"SGLANG_PLUGINS": "hsnb_cpu_shims"}) as server:
        engine_starts.note("smollm2, without hsnb", server.sglang_version)
        assert "Skipping plugin hsnb (not in SGLANG_PLUGINS)" in server.log.read_text()
        assert answers(server) == expected
