"""One request at a time, the server's answers are the same to the last bit with the capture on, off, and without hsnb."""

import os
import subprocess
import sys

import pytest

from hsnb.params import Deployment
from hsnb.server import Server
from tests.conftest import SETTINGS
from tests.helpers import prompt_ids

pytestmark = pytest.mark.engine("smollm2")

PLUGINS = """
import sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
mine = sorted(name for name in HookRegistry._patched if not name.startswith("sglang.srt.models.minimax_m2."))  # those are the CPU shims'
print(mine, "hsnb" in sys.modules)
"""


def answers(server) -> list[tuple]:
    """Return text, output ids and every logprob (as the server's own floats) of three prompts, one after the other."""
    given = []
    with server.client() as client:
        for n, size in enumerate((5, 40, 130)):  # one chunk, one chunk, three chunks
            reply = client.generate(prompt_ids(size, 49152, seed=n), rid=f"hsnb-same-{n}", max_new_tokens=8, logprobs=True)
            given.append((reply.text, tuple(reply.output_ids), tuple(reply.input_logprobs), tuple(reply.output_logprobs)))
    return given


HOOKED = {
    "unset": ({}, "[] True"),  # loaded, and not a trace
    "without hsnb": ({"SGLANG_PLUGINS": "hsnb_cpu_shims"}, "[] False"),  # as on a server without hsnb
    "set": (
        {"SGLANG_HS_DUMP_DIR": "/dev/shm/hsnb-never-written", "SGLANG_HS_DUMP_BOUNDARIES": "2,4"},
        "['sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run', "
        "'sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new', "
        "'sglang.srt.model_executor.model_runner.ModelRunner.load_model'] True",
    ),
}


@pytest.fixture(scope="module")
def loading():
    """A process that loads the plug-ins for each case, side by side: most of its time is the import of SGLang."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")} | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", PLUGINS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = {name: subprocess.Popen(command, env=env | variables, **pipes) for name, (variables, _) in HOOKED.items()}
    yield processes
    for process in processes.values():  # of a test that was not chosen, or that failed
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", HOOKED)
def test_what_sglang_has_hooked(name, loading):
    out, err = loading[name].communicate(timeout=240)
    assert out.strip().splitlines()[-1:] == [HOOKED[name][1]], err
    assert not os.path.exists("/dev/shm/hsnb-never-written")


def test_answers_are_identical_to_the_last_bit(engine, engine_starts, tmp_path):
    armed = engine("smollm2")
    expected = answers(armed)
    assert armed.armed[0].boundaries == list(range(31))
    assert answers(armed) == expected  # from run to run, else nothing below means anything
    assert len(expected[2][2]) == 130 and expected[2][2][5] < 0
    engine.stop()

    deployment = Deployment.parse(SETTINGS["smollm2"], origin="test")
    for what, env in (("variable unset", {}), ("without hsnb", {"SGLANG_PLUGINS": "hsnb_cpu_shims"})):
        with Server.start(deployment, log_dir=tmp_path, capture=False, extra_env=env) as server:
            engine_starts.note(f"smollm2, {what}", server.sglang_version)
            assert "hsnb: armed" not in server.log.read_text()
            assert not server.spool.exists()
            assert answers(server) == expected
