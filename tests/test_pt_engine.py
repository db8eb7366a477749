"""The pt layout on the Kimi-shaped model: sizes to the byte, and numbers that go on after an emptied folder and a restart."""

import itertools
import shutil

import pytest
import torch

from hsnb.dumps import list_dumps
from hsnb.params import Deployment
from hsnb.server import Server
from tests.helpers import prompt_ids, take

pytestmark = pytest.mark.engine("kimi-shape")


def test_ten_ids_give_143360_bytes_a_file_and_n_goes_on(engine, engine_starts, tmp_path):
    engine.stop()
    spool = tmp_path / "spool"
    deployment = Deployment.load("params/kimi-shape.yaml", server={"spool": str(spool), "device": "cpu"})
    with Server.start(deployment, log_dir=tmp_path) as server:
        engine_starts.note("kimi-shape", server.sglang_version)
        dump = take(server, prompt_ids(10, 500))
        assert (dump.path.name, dump.boundaries, dump.final, dump.dtype) == ("req_0", (2, 30, 58), "pre", torch.bfloat16)
        assert (server.armed[0].num_layers, server.armed[0].hidden_size) == (61, 7168)
        for name in ("aux_0", "aux_1", "aux_2", "final"):
            tensor = torch.load(dump.path / f"{name}.pt", weights_only=True)
            assert list(tensor.shape) == [10, 7168]
            assert tensor.nbytes == tensor.untyped_storage().nbytes() == 143_360
            assert 143_360 < (dump.path / f"{name}.pt").stat().st_size < 143_360 + 4096
        columns = [dump.column(k).float() for k in range(4)]
        assert all(torch.isfinite(c).all() for c in columns)
        assert min((a - b).norm() / b.norm() for a, b in itertools.pairwise(columns)) > 0.1
        assert take(server, prompt_ids(7, 500)).path.name == "req_1"
        for path in list_dumps(spool):
            shutil.rmtree(path)
        assert take(server, prompt_ids(5, 500)).path.name == "req_2"
        shutil.rmtree(spool / "req_2")
    assert (spool / ".next").read_text() == "3"  # a spool that was named outlives its server
    with Server.start(deployment, log_dir=tmp_path) as server:
        engine_starts.note("kimi-shape again", server.sglang_version)
        assert take(server, prompt_ids(3, 500)).path.name == "req_3"
