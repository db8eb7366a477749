"""One server over two nodes: SGLang's own --nnodes 2 over gloo, both launchers on this machine, as Ray places them and without Ray."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from hsnb import probe
from hsnb.cluster.connect import free_port
from hsnb.collect import collect
from hsnb.dumps import open_dump
from hsnb.errors import CaptureError
from hsnb.keep import passed
from hsnb.params import Deployment
from hsnb.patch.spool import file_stem
from hsnb.server import Server, attach
from hsnb.server.command import Part
from hsnb.server.link import Link
from hsnb.server.part import ServerPart
from hsnb.verify import verify
from tests.cluster_nodes import add, cluster
from tests.conftest import EVERYTHING, LEFT_OUT, tiny
from tests.helpers import prompt_ids, take
from tests.project import environment, make_project, tiny_params
from tests.reference import relative_l2
from tests.test_cluster_engine import ends_soon, journal
from tests.test_conditions_engine import ask, until

VOCAB = 500
BAR = 1e-5  # relative L2 per token in float32, as over one node
PUBLISHED_BAR = 2**-8  # of the published rows: bfloat16
NODE = "127.0.0.2"  # what the second node is called here
SERVER = {"chunked_prefill_size": 64, "tp_size": 2, "nnodes": 2}


class Here:
    """A further node's part in this process, as a Ray actor has it; `capture` is what it is told instead of the first node's."""

    def __init__(self, folder: Path, capture: dict | None = None):
        self.folder, self.capture = folder, capture
        self.part: ServerPart | None = None

    def start(self, deployment: dict, node_rank: int, address: str) -> dict:
        told = Deployment.parse({**deployment, "capture": {**deployment["capture"], **(self.capture or {})}}, origin="test")
        self.part = ServerPart(told, Part(node_rank, address), self.folder)
        return self.part.about()

    def news(self, heard: int) -> dict:
        return self.part.news(heard)

    def stop(self) -> None:
        if self.part:
            self.part.stop()


def link_to(part: Here) -> Link:
    return Link(f"127.0.0.1:{free_port('127.0.0.1')}", [(NODE, part)])


@pytest.mark.engine("tiny over nodes")
def test_a_second_node_that_is_armed_otherwise_is_refused_by_name(engine, engine_starts, tmp_path):
    """The check of the ranks must fail on what the second node hands over; nothing of either launcher is left."""
    engine.stop()
    part = Here(tmp_path, {"boundaries": [2, 4, 7]})
    with pytest.raises(CaptureError) as refused:
        Server.start(Deployment.parse(tiny(**SERVER), origin="test"), log_dir=tmp_path, link=link_to(part))
    assert f"rank 1 on {NODE} captures boundaries [2, 4, 7], expected [2, 4, 6], as tiny asks" in str(refused.value)
    assert part.part.made.supervisor.poll() is not None and not part.part.made.spool.exists()


SHARDS, SAMPLES = 2, 24


@pytest.mark.skipif(not EVERYTHING, reason=LEFT_OUT)
@pytest.mark.engine("ray over nodes")
@pytest.mark.notebook
@pytest.mark.timeout(900)
def test_a_server_over_two_nodes_gives_what_one_gives_and_survives_the_loss_of_one(engine, engine_starts, tmp_path):
    """hsnb run 03_extract.ipynb --shards 0-1 --ray ADDRESS with nnodes 2; the second node is taken away, and another one comes."""
    assert importlib.util.find_spec("ray"), "make setup-ray"
    prompts = [prompt_ids(n, VOCAB, seed=n) for n in (1, 63, 64, 65, 150)]
    rows = {row: prompt_ids(60 + row % 7, VOCAB, seed=row) for row in (0, 2)}  # two samples of shard 0, as tiny_params makes them
    one = engine("tiny")
    alone = [take(one, prompt) for prompt in (*prompts, *rows.values())]
    alone = [{k: dump.state(k).clone() for k in (2, 4, 6, "final")} for dump in alone]
    engine.stop()

    project = make_project(tmp_path / "project")
    params = tiny_params(project, SAMPLES, 60, "spans")
    tree = yaml.safe_load(params.read_text())
    params.write_text(yaml.safe_dump({**tree, "server": {**tree["server"], **SERVER}}))
    run = project / "outputs" / "spans"
    with cluster(1, 1) as (made, nodes):
        words = ["run", "03_extract.ipynb", "--shards", f"0-{SHARDS - 1}", "--ray", made.address, "--json", "-p", "num_shards", str(SHARDS)]
        process = subprocess.Popen(
            [sys.executable, "-m", "hsnb.cli", *words, "-p", "params", str(params), "-p", "run", "spans"],
            cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

        def wait_for(what: str, limit_s: float = 300.0) -> dict:
            """Return the first event of this kind once the driver has written it."""
            end = time.monotonic() + limit_s
            while not (found := [e for e in journal(run) if e["what"] == what]):
                if process.poll() is not None or time.monotonic() > end:
                    process.kill()
                    pytest.fail(f"no event {what}: {process.communicate()}, {journal(run)}")
                time.sleep(0.1)
            return found[0]

        try:
            url = wait_for("ready")["server"]
            (second,) = [n for n in nodes if n.node_id == wait_for("starting")["with"][0]["node"]]
            server = attach(url, expect=Deployment.load(params))
            engine_starts.note("tiny, tp 2 over two nodes", server.sglang_version)
            assert [(a.rank, a.tp_size, a.env["SGLANG_HS_DUMP_NODES"]) for a in server.armed] == [(0, 2, "2"), (1, 2, "2")]
            assert len({a.port for a in server.armed}) == 2  # of two launchers
            receipt = probe.require_receipt(server)
            assert (receipt.verdict, [rank for rank, *_ in receipt.server["ranks"]]) == ("PASS", [0, 1])
            both_ranks_give_what_one_gives(server, prompts, alone)
            wait_for("done")
            made.remove_node(second, allow_graceful=False)
            assert wait_for("waiting")["why"] == "1 of the 2 nodes that a server needs"
            ends_soon(url)
            until(lambda: len(exits(run)) == 2, f"both launchers' ends: {sorted(p.name for p in run.iterdir())}", 60.0)
            assert [e["left"] for e in exits(run)] == [[], []] and not server.spool.exists()
            add(made, 1)
            out, err = process.communicate(timeout=400)
        finally:
            if process.poll() is None:
                process.kill()
    assert process.returncode == 0, err
    assert json.loads(out)["ok"] and all(passed(run / f"03_extract-shard-{shard:04d}.ipynb") for shard in range(SHARDS))
    whole = verify(run / "data")
    assert whole.ok and whole.entered == SAMPLES, whole.text()
    ledgers = [pq.read_table(path)["row"].to_pylist() for path in sorted((run / "data" / "ledger").glob("*.parquet"))]
    assert ledgers == [list(range(s, SAMPLES, SHARDS)) for s in range(SHARDS)]  # none twice, none missing
    for (row, ids), expected in zip(rows.items(), alone[len(prompts) :], strict=True):
        dump = open_dump(run / "data" / "hidden_states" / f"hs_{row}.safetensors")
        assert dump.token_ids.tolist() == ids
        assert max(relative_l2(dump.state(k), expected[k]).max().item() for k in expected) < PUBLISHED_BAR

    events = journal(run)
    (lost,) = [e for e in events if e["what"] == "dropped"]
    assert lost["with"][0]["node"] == second.node_id and lost["shard"] == 1
    after = events[events.index(lost) :]
    assert [e["what"] for e in after if e["what"] != "waiting"] == ["dropped", "starting", "ready", "dealt", "done"]
    engine_starts.note("tiny, tp 2 over two nodes, again", server.sglang_version)
    until(lambda: len(exits(run)) == 4, "all launchers' ends", 60.0)
    assert [e["left"] for e in exits(run)] == [[]] * 4


def exits(run: Path) -> list[dict]:
    """Return what each launcher's supervisor wrote when nothing of it was left."""
    return [json.loads(path.read_text()) for path in sorted(run.glob("server-*.exit.json"))]


def both_ranks_give_what_one_gives(server: Server, prompts: list[list[int]], alone: list[dict]) -> None:
    """Compare the rows with those of one rank on one node, per token, and the two nodes' digests with each other."""
    for prompt, expected in zip(prompts, alone, strict=False):
        rid = f"hsnb-probe-nodes-{len(prompt)}"
        with server.client() as client:
            ask(client, prompt, rid)
        dump = open_dump(collect(server.spool, rid))
        assert dump.token_ids.tolist() == prompt and dump.dtype == torch.float32
        assert max(relative_l2(dump.state(k), expected[k]).max().item() for k in expected) < BAR
        said = [server.spool / f"{file_stem(rid)}.rank-{r}.json" for r in (0, 1)]
        until(lambda said=said: all(p.exists() for p in said), "both ranks' digests")
        first, second = (json.loads(p.read_text()) for p in said)
        assert first["rows"] == second["rows"] == len(prompt)
        assert first["columns"] == second["columns"] and len(set(first["columns"].values())) == 4
