"""A real Ray cluster, real servers, the real notebook: a node is taken away in the middle, and every shard is done all the same."""

import importlib.util
import json
import subprocess
import sys
import time

import httpx
import pyarrow.parquet as pq
import pytest

from hsnb.keep import passed
from hsnb.verify import verify
from tests.cluster_nodes import cluster
from tests.conftest import EVERYTHING, LEFT_OUT
from tests.project import environment, make_project, tiny_params

pytestmark = [
    pytest.mark.engine("ray"),
    pytest.mark.notebook,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not EVERYTHING, reason=LEFT_OUT),  # four minutes
]

SHARDS, SAMPLES = 8, 32


def journal(run) -> list[dict]:
    """Return what the driver has written down so far."""
    path = run / "cluster.json"
    return json.loads(path.read_text())["events"] if path.exists() else []


def running_on(events: list[dict], node: str) -> int | None:
    """Return the shard that a node has in hand, None when it has none."""
    mine = [e for e in events if e.get("node") == node and e["what"] in ("dealt", "done", "lost", "dropped")]
    return mine[-1]["shard"] if mine and mine[-1]["what"] == "dealt" else None


def test_eight_shards_through_the_loss_of_a_node(engine, engine_starts, tmp_path):
    """hsnb run 03_extract.ipynb --shards 0-7 --ray ADDRESS, two nodes with a server each; one is removed while it runs a shard."""
    assert importlib.util.find_spec("ray"), "make setup-ray"
    engine.stop()
    project = make_project(tmp_path / "project")
    params = tiny_params(project, SAMPLES, 60, "ray")
    run = project / "outputs" / "ray"
    with cluster(1, 1) as (made, nodes):
        line = ["run", "03_extract.ipynb", "--shards", f"0-{SHARDS - 1}", "--ray", made.address, "--json"]
        given = {"params": str(params), "run": "ray", "num_shards": str(SHARDS)}
        line += [word for pair in given.items() for word in ("-p", *pair)]
        process = subprocess.Popen(
            [sys.executable, "-m", "hsnb.cli", *line],
            cwd=project,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            gone = nodes[1].node_id
            end = time.monotonic() + 500
            while running_on(journal(run), gone) is None or not any(e["what"] == "done" for e in journal(run)):
                if process.poll() is not None or time.monotonic() > end:
                    process.kill()
                    pytest.fail(f"no shard was done: {process.communicate()}, {journal(run)}")
                time.sleep(0.1)
            made.remove_node(nodes[1], allow_graceful=False)
            out, err = process.communicate(timeout=400)
        finally:
            if process.poll() is None:
                process.kill()
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["ok"] and len(result["notebooks"]) == SHARDS
    for shard in range(SHARDS):
        notebook = run / f"03_extract-shard-{shard:04d}.ipynb"
        assert passed(notebook) and notebook.with_suffix(".html").is_file(), shard
        assert json.loads((run / f"shard-{shard:04d}.json").read_text())["samples"] == SAMPLES // SHARDS
    whole = verify(run / "data")
    assert whole.ok and whole.entered == SAMPLES, whole.text()
    ledgers = [pq.read_table(path)["row"].to_pylist() for path in sorted((run / "data" / "ledger").glob("*.parquet"))]
    assert ledgers == [list(range(s, SAMPLES, SHARDS)) for s in range(SHARDS)]  # none twice, none missing

    events = journal(run)
    assert {e["node"] for e in events if e["what"] == "done"} >= {nodes[0].node_id}
    dropped = [e for e in events if e["what"] == "dropped"]
    lost = dropped[0]["shard"]
    assert lost is not None and {e["node"] for e in dropped} == {gone}
    after = events[events.index(dropped[0]) :]
    assert [e["node"] for e in after if e["what"] == "done" and e["shard"] == lost] == [nodes[0].node_id]
    assert sorted(e["shard"] for e in events if e["what"] == "done") == list(range(SHARDS))
    servers = {e["server"] for e in events if e["what"] == "ready"}
    assert len(servers) == 2
    for url in servers:
        engine_starts.note(f"a node of the cluster ({url})", json.loads((run / "data" / "hsnb.json").read_text())["fingerprint"]["sglang"])
        ends_soon(url)


def ends_soon(url: str) -> None:
    """Wait until nothing answers at `url`: the lost node's server, too, ends with its actor."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            httpx.get(f"{url}/model_info", timeout=5)
        except httpx.ConnectError:
            return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"{url} still answers")
