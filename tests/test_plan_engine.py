"""What a real server refuses is what hsnb says it will; and a rate is measured through it."""

from __future__ import annotations

import json

import pytest

from hsnb import cli, probe
from hsnb.data import prepare
from hsnb.errors import ServerError
from hsnb.limits import limits_of, server_limits
from hsnb.measure import measure
from tests.helpers import prompt_ids
from tests.test_conditions_engine import LONGEST
from tests.test_data import jsonl
from tests.test_extract_engine import files

pytestmark = pytest.mark.engine("tiny")


@pytest.fixture
def server(engine):
    return engine("tiny")


@pytest.fixture
def source(tmp_path):
    """Forty samples of 4 to 160 tokens."""
    rows = [prompt_ids(4 + 4 * n, 500, seed=n) for n in range(40)]
    return jsonl(tmp_path / "rows.jsonl", [{"input_ids": ids, "loss_mask": [0, *[1] * (len(ids) - 1)]} for ids in rows])


def test_one_token_more_than_the_longest_prompt_is_refused(server):
    """That the longest itself is taken is tested where chunks are large enough for it (test_conditions_engine)."""
    limits = server_limits(server.info)
    assert (limits.context_length, limits.max_total_num_tokens, limits.max_req_input_len) == (4096, 8192, 4090)
    assert limits.longest == limits_of(server.deployment).longest == LONGEST == 4089
    with server.client() as client, pytest.raises(ServerError, match=r"answered 400: Input length \(4090 tokens\) exceeds the maximum"):
        client.generate(prompt_ids(limits.longest + 1, 500), rid="one-too-many")


def test_a_rate_is_measured_as_a_shard_is_extracted(server, source, tmp_path):
    probe.ensure(server)
    own = server.deployment.model_copy(update={"data": server.deployment.data.model_copy(update={"source": str(source)})})
    data = prepare(own, tmp_path / "run" / "data")
    before = sorted(server.spool.glob("*.safetensors"))
    measured = measure(server, own, data, tmp_path / "run")
    spread = [4 + 4 * n for n in range(40)]
    assert measured.samples == 32 and min(spread) * 32 < measured.tokens < sum(spread)
    states = measured.tokens * 10 * 64 * 2  # nine boundaries and the final state, bfloat16
    assert 0 < measured.bytes - states - measured.tokens * 8 < 32 * 2048  # ids and headers come on top, nothing else
    assert 1 < measured.tokens_per_s < 1e6 and measured.eta_s(1000) == pytest.approx(1000 / measured.tokens_per_s)
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == [".data.lock", "data"]  # no trace of it, and the run is not begun
    assert files(data) == {} and sorted(server.spool.glob("*.safetensors")) == before


def test_the_command_measures_on_a_running_server(server, source, tmp_path, monkeypatch, capsys):
    for name in ("notebooks", "params", "outputs"):
        (tmp_path / "clone" / name).mkdir(parents=True)
    monkeypatch.setenv("HSNB_ROOT", str(tmp_path / "clone"))
    tree = {
        **server.deployment.model_dump(exclude_none=True),
        "data": {"source": str(source)},
        "extract": {"output_floor": 0, "spool_floor": 0},
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(tree))  # JSON is YAML
    command = ["plan", str(tmp_path / "tiny.yaml"), "--run", "m", "--measure", "--server", server.url, "--num-shards", "4", "--json"]
    assert cli.main(command) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["samples"], tree["tokens"], tree["server_takes"], len(tree["shards"])) == (40, 3280, 4089, 4)
    measured = tree["measured"]
    assert measured["samples"] == 32 and measured["url"] == server.url and measured["eta_s"] > 0
    assert measured["projected_bytes"] == pytest.approx(measured["bytes"] / measured["tokens"] * 3280, abs=1)
    assert f"{measured['tokens_per_s']:,.0f} tokens/s" in tree["text"]
    assert server.running()  # it was attached to, and goes on
