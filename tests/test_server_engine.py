"""The bring-up of a real SGLang on the tiny model: starts, stops, kills and refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hsnb.errors import BoundaryError, CaptureError, ServerError
from hsnb.params import Deployment
from hsnb.server import Server, attach, running_servers
from tests.conftest import tiny

pytestmark = pytest.mark.engine
SHM = Path("/dev/shm")
GONE_WITHIN_S = 15.0


def shm_files() -> set[str]:
    return {str(p.relative_to(SHM)) for p in SHM.rglob("*") if not p.is_dir()}


ENGINE_WORDS = ("sglang::", "sglang.launch_server", "hsnb.server.supervisor", "from multiprocessing")  # the last: not yet titled


def engine_processes() -> set[int]:
    """Return what belongs to any SGLang on this machine, by title or command line."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(word in line for word in ENGINE_WORDS):
            found.add(process.pid)
    return found


@pytest.fixture(autouse=True)
def machine(engine):
    """Stop the server that other tests share, and compare the machine before and after."""
    engine.stop()
    processes, files = engine_processes(), shm_files()
    yield
    left = set(), set()
    limit = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < limit:
        left = engine_processes() - processes, shm_files() - files
        if left == (set(), set()):
            return
        time.sleep(0.2)
    raise AssertionError(f"left behind: processes {left[0]}, files {left[1]}")


def tiny_deployment(**server) -> Deployment:
    return Deployment.parse(tiny(**server), origin="tiny")


def test_ready_answers_and_stops_without_a_trace(tmp_path, engine_starts):
    told = []
    with Server.start(tiny_deployment(), log_dir=tmp_path, capture=False, progress=lambda s, line: told.append((s, line))) as server:
        engine_starts.note("tiny, bring-up", server.sglang_version)
        assert server.running() and server.info["disable_radix_cache"] is True and server.info["dtype"] == "float32"
        assert server.armed == [] and server.as_dict()["capture"] == "off" and server.url in server._repr_html_()
        assert len(told) > 3 and told == sorted(told, key=lambda t: t[0]) and any(line for _, line in told)
        assert "fired up" in server.tail(30) and server.log.name.startswith(f"server-{server.port}-")
        assert server.port in [s.port for s in running_servers()]
        with server.client() as client:
            got = client.generate(list(range(5, 25)), rid="hsnb-test-1", logprobs=True)
        assert got.rid == "hsnb-test-1" and got.prompt_tokens == 20 and got.input_ids == list(range(5, 25)) and got.cached_tokens == 0
        assert got.input_logprobs[0] is None and all(x < 0 for x in got.input_logprobs[1:]) and len(got.output_ids) == 1

        async def several():
            async with server.client() as client:
                return await asyncio.gather(*(client.agenerate([5, 6, 7 + i], rid=f"hsnb-test-a{i}") for i in range(6)))

        assert [g.rid for g in asyncio.run(several())] == [f"hsnb-test-a{i}" for i in range(6)]
        with server.client() as client, pytest.raises(ServerError, match="answered 400"):
            client.generate([5] * 5000, rid="hsnb-test-long")
        assert attach(server.url, capture=False).pid == server.pid
        before = time.monotonic()
    assert time.monotonic() - before < 15 and not server.running()
    server.stop()
    record = json.loads(server.log.with_suffix(".exit.json").read_text())
    assert record["reason"] == "asked to stop" and record["left"] == [] and any("sglang_loads" in n for n in record["removed"])


OWNER = """
import sys
from hsnb.params import Deployment
from hsnb.server import Server
server = Server.start(Deployment.parse({tree!r}, origin="t"), log_dir={log!r}, capture=False, progress=lambda s, l: print(round(s, 1), l, flush=True))
print("READY", server.url, flush=True)
import time; time.sleep(600)
"""


@pytest.mark.parametrize("when", ["starts", "ready"])
def test_nothing_outlives_an_owner_that_is_killed(tmp_path, engine_starts, when):
    before = engine_processes()
    script = textwrap.dedent(OWNER).format(tree=tiny(), log=str(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        for line in owner.stdout:
            # Supervisor, launcher, resource tracker, scheduler, detokenizer: the last two SGLang's own launcher would orphan now.
            if when == "starts" and len(engine_processes() - before) >= 5:
                break
            if line.startswith("READY"):
                engine_starts.note("tiny, owner killed", attach(line.split()[1], capture=False).sglang_version)
                break
        assert engine_processes() - before, "the server was never there"
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    killed = time.monotonic()
    while left := engine_processes() - before:
        assert time.monotonic() - killed < GONE_WITHIN_S, f"still there: {left}"
        time.sleep(0.1)
    assert running_servers() == []
    record = json.loads(next(tmp_path.glob("*.exit.json")).read_text())
    assert record["reason"] == f"owner {owner.pid} ended"


def test_a_wrong_value_gives_the_cause_in_words(tmp_path):
    with pytest.raises(ServerError, match=r"the server ended after \d+ s \(exit code 2\): a wrong flag: --schedule-policy") as error:
        Server.start(tiny_deployment(flags={"schedule_policy": "nonsense"}), log_dir=tmp_path, capture=False)
    assert "invalid choice" in error.value.log_tail and str(error.value.log) in error.value.__notes__[0]


def test_missing_weights_give_the_cause_in_words(tmp_path):
    whole = tiny_deployment().model_path()
    folder = tmp_path / "no-weights"
    folder.mkdir()
    for file in whole.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    lame = Deployment.parse({**tiny(), "model": str(folder)}, origin="t")
    with pytest.raises(ServerError, match="the model's weights are missing or not whole"):
        Server.start(lame, log_dir=tmp_path, capture=False)


def test_a_boundary_beyond_the_model_is_refused_before_anything_is_loaded(tmp_path):
    before = time.monotonic()
    lame = Deployment.parse({**tiny(), "capture": {"boundaries": [2, 9]}}, origin="t")
    with pytest.raises(BoundaryError, match=r"0\.\.8"):
        Server.start(lame, log_dir=tmp_path)
    assert time.monotonic() - before < 20 and list(tmp_path.iterdir()) == []


def test_a_start_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(ServerError, match=r"not ready after \d+ s.*still loading.*raise server.ready_timeout_s"):
        Server.start(tiny_deployment(ready_timeout_s=4), log_dir=tmp_path, capture=False)


def test_serve_in_the_foreground_until_sigterm_and_what_attach_refuses(tmp_path, engine_starts):
    params = tmp_path / "tiny.yaml"
    params.write_text(json.dumps(tiny()))
    code = "import sys, json, argparse, logging; from hsnb.server import commands as c; logging.basicConfig(level=20, stream=sys.stderr);"
    code += "p = argparse.ArgumentParser(); c.add_serve(p); print(json.dumps(c.serve(p.parse_args(sys.argv[1:]))))"
    env = {**os.environ, "HSNB_ROOT": str(tmp_path)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    serving = subprocess.Popen([sys.executable, "-c", code, str(params)], env=env, **streams)
    try:
        ready = next(line for line in serving.stderr if "ready at" in line)
        url = ready.split("ready at ")[1].split()[0]
        server = attach(url, expect=tiny_deployment())
        engine_starts.note("tiny, in the foreground", server.sglang_version)
        assert server.armed[0].boundaries == [2, 4, 6] and server.as_dict()["capture"] == "armed" and server.spool.name == str(server.port)
        assert server.spool.stat().st_mode & 0o777 == 0o700
        other = Deployment.parse({**tiny(), "capture": {"boundaries": [1, 4, 6]}}, origin="t")
        with pytest.raises(CaptureError, match=r"rank 0 captures boundaries \[2, 4, 6\], expected \[1, 4, 6\], as tiny asks"):
            attach(url, expect=other)
        with pytest.raises(CaptureError, match="runs without the plug-in"):
            attach(url, spool=str(tmp_path))
        with pytest.raises(ServerError, match=r"port \d+ is taken by a server of hsnb"):
            Server.start(tiny_deployment(port=server.port), log_dir=tmp_path, capture=False)
        assert server.running()
    finally:
        serving.terminate()
        out, _ = serving.communicate(timeout=30)
    assert serving.returncode == 0 and json.loads(out)["stopped"] is True and not server.spool.exists()


def test_serve_detached_and_stop(tmp_path, engine_starts):
    """By the commands' functions and through processes of their own: the one that served has long ended when stop is asked."""
    params = tmp_path / "tiny.yaml"
    params.write_text(json.dumps(tiny()))
    code = "import sys, json, argparse; from hsnb.server import commands as c; p = argparse.ArgumentParser(); getattr(c, 'add_' + sys.argv[1])(p);"
    code += "print(json.dumps(getattr(c, sys.argv[1])(p.parse_args(sys.argv[2:]))))"

    def ask(*words: str) -> dict:
        env = {**os.environ, "HSNB_ROOT": str(tmp_path)}  # its outputs/ get the log
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    served = ask("serve", str(params), "--detach", "--no-capture", "--run", "test-serve")
    try:
        time.sleep(2)  # four polls of the supervisor: its owner is gone, and it has none
        server = attach(served["url"], capture=False)
        engine_starts.note("tiny, detached", server.sglang_version)
        server.stop()
        assert server.running() and server.detached, "an attached server is not ours to end"
    finally:
        stopped = ask("stop", served["url"])
    assert [s["url"] for s in stopped["stopped"]] == [served["url"]] and running_servers() == []
