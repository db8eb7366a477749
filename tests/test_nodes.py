"""A server over several nodes without an engine: where it goes, what is refused, what is handed over, what a loss means."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import hsnb
from hsnb import cli
from hsnb.errors import CaptureError, ParamsError, ServerError
from hsnb.patch import arm, modes
from hsnb.patch.armed import Armed, ArmedFile, read_armed, refuse
from hsnb.planning import check_runnable
from hsnb.server import command
from hsnb.server import link as links
from hsnb.server.armed_check import check_armed
from hsnb.server.command import Part
from hsnb.server.far import read_far, write_far
from hsnb.server.leftovers import claim_spool, clear_spool
from hsnb.server.link import Link
from hsnb.server.part import ServerPart
from hsnb.server.preflight import preflight
from hsnb.server.supervisor import create_time
from tests.cluster_stand_in import deployment
from tests.project import make_project

TWO = {"tp_size": 2, "nnodes": 2}
STEM = "0" * 32


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_without_a_cluster_it_is_refused_and_ray_is_named(tmp_path, monkeypatch, capsys):
    words = r"ServerError: server.nnodes is 2, expected 1: a server on this machine alone\. .*Next: hsnb run 03_extract\.ipynb .*--ray auto"
    with pytest.raises(ServerError, match=words):
        preflight(deployment(**TWO)).check()
    project = make_project(tmp_path / "clone")
    (project / "params" / "two.yaml").write_text(json.dumps({**deployment().model_dump(), "server": {"device": "cpu", **TWO}}))
    monkeypatch.setenv("HSNB_ROOT", str(project))
    assert cli.main(["serve", str(project / "params" / "two.yaml")]) == 2
    assert "ServerError: server.nnodes is 2" in capsys.readouterr().err
    here = next(row for row in preflight(deployment(**TWO), node_rank=1).rows if row.check == "nodes")
    assert (here.value, here.note, here.ok) == ("2 of 2", "1 of 2 ranks here", True)


def test_ranks_that_do_not_divide_are_refused_before_anything_starts():
    words = r"server.tp_size 3 over server.nnodes 2, expected as many ranks on each node"
    for refused in (lambda d: check_runnable(d), lambda d: preflight(d, node_rank=0).check()):
        with pytest.raises(ParamsError, match=words):
            refused(deployment(tp_size=3, nnodes=2))
    check_runnable(deployment(**TWO))  # the data of a cluster's run may be prepared here


@pytest.mark.parametrize("flag", ["nnodes", "node_rank", "dist-init-addr", "nccl_init_addr"])
def test_the_flags_of_the_nodes_are_hsnbs(flag):
    with pytest.raises(ParamsError, match=r"Next: set server\.nnodes instead"):
        check_runnable(deployment(flags={flag: 1}))


def test_a_server_that_was_started_by_hand_over_nodes_is_not_armed(monkeypatch):
    args = SimpleNamespace(nnodes=2, tp_size=2)
    assert "nnodes is 2, expected 1 (--nnodes spreads a server over hosts" in modes.unsupported(arm.looked_after(args))
    monkeypatch.setenv("SGLANG_HS_DUMP_NODES", "3")
    assert "nnodes is 2" in modes.unsupported(arm.looked_after(args))
    monkeypatch.setenv("SGLANG_HS_DUMP_NODES", "2")
    assert modes.unsupported(arm.looked_after(args)) == ""


def test_a_parts_command_and_environment(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    four = deployment(tp_size=4, nnodes=2)
    argv = " ".join(command.build_command(four, 30000, Part(1, "10.0.0.1:29500")))
    assert "--tp-size 4" in argv and argv.endswith("--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:29500")
    env = command.build_env(four, "/dev/shm/hsnb/1")
    assert (env["SGLANG_CPU_OMP_THREADS_BIND"], env["SGLANG_HS_DUMP_NODES"]) == ("0,1,2,3|4,5,6,7|0,1,2,3|4,5,6,7", "2")
    assert "--nnodes" not in " ".join(command.build_command(deployment(), 30000))


# -- what is handed over -----------------------------------------------------------------------------------------------


def armed_file(spool, **fields) -> ArmedFile:
    """Write what a rank of this very process armed."""
    spool.mkdir(exist_ok=True)
    me = {"pid": os.getpid(), "pid_created": create_time(os.getpid()), "patch_version": hsnb.__version__, "only": "hsnb-"}
    common = {"state": "armed", **me, "boundaries": [2, 4, 6], "final": "pre", "format": "safetensors", "tp_size": 2}
    return ArmedFile(spool, Armed(**{**common, **fields}))


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Return a part whose launcher is played by a process that runs as long as `code` is None."""
    supervisor = SimpleNamespace(code=None, poll=lambda: supervisor.code)
    log = tmp_path / "log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    job = SimpleNamespace(exit_record=str(tmp_path / "exit.json"))
    made = SimpleNamespace(spool=tmp_path / "theirs", port=31001, supervisor=supervisor, log=log, job=job)
    made.spool.mkdir()
    told = {}
    monkeypatch.setattr("hsnb.server.part.launch", lambda d, folder, **more: told.update(server=d.server, **more) or made)
    part = ServerPart(deployment(**TWO, port=30000, spool=str(tmp_path / "named")), Part(1, "h:1"), tmp_path)
    assert (told["server"].port, told["server"].spool, told["part"]) == (
        0,
        "",
        Part(1, "h:1"),
    )  # the first node's port and spool are its own
    return part


def test_a_part_hands_over_what_its_ranks_armed_and_said(part):
    spool = part.made.spool
    file = armed_file(spool, rank=1, port=31001)
    (spool / f"{STEM}.rank-1.json").write_text('{"rank": 1}')
    (spool / "receipt.json").write_text("{}")
    first = part.news(0, 0)
    assert (sorted(first["files"]), first["gone"]) == ([f"{STEM}.rank-1.json", "armed-1.json"], "")
    assert part.news(0, 0) == first, "an answer that was lost on its way is not given again"
    assert part.news(1, 0) == {"number": 1, "files": {}, "gone": ""} and not (spool / f"{STEM}.rank-1.json").exists()
    file.count("warmup")
    assert json.loads(part.news(1, 0)["files"]["armed-1.json"])["counts"] == {"captured": 0, "warmup": 1}
    part.made.supervisor.code = 1
    assert "its launcher has ended: the GPU's memory is too small" in part.news(2, 0)["gone"]


def test_a_parts_refusal_without_a_rank_is_not_taken_for_the_first_nodes(part):
    refuse(part.made.spool, "SGLang 0.5.16")
    assert json.loads(part.news(0, 0)["files"]["armed-1.json"])["rank"] == 1


def test_a_rank_that_has_ended_is_the_end_of_its_part(part):
    armed_file(part.made.spool, rank=1, pid_created=1.0)
    assert f"rank 1 (process {os.getpid()}) has ended" in part.news(0, 0)["gone"]


class Played:
    """A part that says what a test gives it."""

    def __init__(self, *news, weights="w", error=None):
        self.said, self.weights, self.error, self.stopped = list(news), weights, error, False

    def start(self, deployment, node_rank, address):
        if self.error:
            raise self.error
        return {"ranks": [node_rank], "port": 31001, "weights": self.weights}

    def news(self, heard):
        if not self.said:
            threading.Event().wait(0.01)
            return {"number": heard, "files": {}, "gone": ""}
        if isinstance(self.said[0], Exception):
            raise self.said[0]
        return {"number": heard + 1, **self.said.pop(0)}

    def stop(self):
        self.stopped = True


def begun(spool, part, lost=lambda: None) -> Link:
    spool.mkdir(exist_ok=True)
    link = Link("10.0.0.1:29500", [("10.0.0.2", part)])
    link.begin(deployment(**TWO).model_dump(), spool, "w", on_loss=lost)
    return link


def file_of(tmp_path, **fields) -> bytes:
    return armed_file(tmp_path / "theirs", **fields).path.read_bytes()


def test_what_is_handed_over_is_checked_as_if_it_were_here(tmp_path):
    spool = tmp_path / "spool"
    armed_file(spool, rank=0, port=30000)
    theirs = file_of(tmp_path, rank=1, port=31001, pid=2**22 + 1)  # a process of another machine
    played = Played({"files": {"armed-1.json": theirs, f"{STEM}.rank-1.json": b"{}"}, "gone": ""})
    link = begun(spool, played)
    link.wait_armed(spool)
    expect = deployment(**TWO)
    check_armed(read_armed(spool), ranks=2, expect=expect, port=30000, far=read_far(spool))
    with pytest.raises(CaptureError, match=r"rank 1 was armed by process \d+, which does not run on this host"):
        check_armed(read_armed(spool), ranks=2, expect=expect)
    link.end()
    assert played.stopped and link.lost == "" and (spool / f"{STEM}.rank-1.json").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"boundaries": [2, 4, 7]}, "rank 1 on 10.0.0.2 captures boundaries [2, 4, 7], expected [2, 4, 6], as tiny asks"),
        ({"state": "refused", "error": "SGLang 0.5.16"}, "rank 1 on 10.0.0.2 is refused: SGLang 0.5.16, expected armed"),
        ({"patch_version": "0.0.1"}, "rank 1 on 10.0.0.2 runs the plug-in of hsnb 0.0.1"),
        ({"config_hash": "other"}, "rank 1 on 10.0.0.2 has config_hash 'other', rank 0 has ''"),
        ({"port": 30000}, "rank 1 on 10.0.0.2 belongs to port 30000, expected port 31001"),
        ({"rank": 2}, "armed ranks [0, 2], expected ranks 0..1"),
    ],
)
def test_a_second_node_that_armed_otherwise_is_named(tmp_path, fields, words):
    spool = tmp_path / "spool"
    armed_file(spool, rank=0, port=30000)
    armed_file(spool, **{"rank": 1, "port": 31001, **fields})
    write_far(spool, {1: ("10.0.0.2", 31001)})
    with pytest.raises(CaptureError) as error:
        check_armed(read_armed(spool), ranks=2, expect=deployment(**TWO), port=30000, far=read_far(spool))
    assert words in str(error.value)


def test_ranks_that_nobody_watches_any_longer_are_refused(tmp_path):
    armed_file(tmp_path, rank=0)
    armed_file(tmp_path, rank=1)
    write_far(tmp_path, {1: ("10.0.0.2", 31001)})
    tree = json.loads((tmp_path / ".nodes.json").read_text())
    (tmp_path / ".nodes.json").write_text(json.dumps({**tree, "watcher": [os.getpid(), 1.0]}))
    with pytest.raises(CaptureError, match=r"rank 1 on 10\.0\.0\.2 is watched by nobody here any longer"):
        check_armed(read_armed(tmp_path), ranks=2, far=read_far(tmp_path))
    claim_spool(tmp_path, "x")
    assert clear_spool(tmp_path, keep_dumps=True) and read_far(tmp_path).ranks == {} and read_armed(tmp_path) == []


@pytest.mark.parametrize(
    ("news", "words"),
    [
        ({"files": {}, "gone": "its launcher has ended: the GPU's memory is too small"}, "the GPU's memory is too small"),
        (ConnectionError("the actor died"), r"what it says could not be had \(ConnectionError: the actor died\)"),
        ({"files": {"../armed-1.json": b"x"}, "gone": ""}, "a file '../armed-1.json' of a rank that is not its own"),
        ({"files": {"armed-0.json": b"x"}, "gone": ""}, "a file 'armed-0.json' of a rank that is not its own"),
    ],
)
def test_the_loss_of_a_part_ends_the_server(tmp_path, news, words):
    ended = threading.Event()
    link = begun(tmp_path / "spool", Played(news), ended.set)
    assert ended.wait(10)
    with pytest.raises(ServerError, match=rf"a server over several nodes has lost node 10\.0\.0\.2: .*{words}"):
        link.check()
    assert list((tmp_path / "spool").glob("armed*")) == []


def test_a_full_spool_of_the_first_node_is_no_loss_of_the_other(tmp_path, monkeypatch):
    """What it handed over is written when there is room again."""
    write, full = Path.write_bytes, []

    def no_room(path, content):
        if len(full) < 3:
            full.append(path)
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", no_room)
    link = begun(tmp_path / "spool", Played({"files": {"armed-1.json": b"{}"}, "gone": ""}))
    until = time.monotonic() + 10
    while not (tmp_path / "spool" / "armed-1.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / "spool" / "armed-1.json").read_bytes() == b"{}" and len(full) == 3
    link.check()
    link.end()


def test_a_part_that_does_not_start_and_one_with_other_weights_are_named(tmp_path):
    error = ServerError(got="4 GPUs listed by nvidia-smi", expected="at least tp_size (16) over nnodes (2)", likely="x", next="y")
    with pytest.raises(ServerError, match=r"node 10\.0\.0\.2: 4 GPUs listed by nvidia-smi, expected at least tp_size"):
        begun(tmp_path, Played(error=error))
    with pytest.raises(ServerError, match=r"has lost node 10\.0\.0\.2: RuntimeError: the actor died"):
        begun(tmp_path, Played(error=RuntimeError("the actor died")))
    with pytest.raises(ServerError, match=r"another checkpoint on node 10\.0\.0\.2 than here"):
        begun(tmp_path, Played(weights="other"))


def test_a_part_that_hands_over_nothing_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "ARMED_S", 0.1)
    link = begun(tmp_path / "spool", Played())
    armed_file(tmp_path / "spool", rank=0)
    link.wait_armed(tmp_path / "spool")
    with pytest.raises(CaptureError, match=r"armed ranks \[0\], expected ranks 0\.\.1"):
        check_armed(read_armed(tmp_path / "spool"), ranks=2, far=read_far(tmp_path / "spool"))
    link.end()
