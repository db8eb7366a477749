"""The numbering trap: what SGLang's own option returns for a list of ids, against our conversion of that list, on real servers.

`--enable-return-aux-hidden-states --speculative-algorithm EAGLE3 --return-aux-hidden-state-layer-ids ...` (0.5.23) goes through
the setter that shifts every list on Llama, and on DeepSeek only lists that begin with 1. The states come back as JSON, so they
are compared with the capture's dumps of the same prompt, bit for bit.
"""

import pytest
import torch

from hsnb.boundaries import from_boundaries, to_boundaries
from hsnb.params import Deployment
from hsnb.server import Server
from hsnb.server.flags import known_flags
from tests.conftest import SETTINGS
from tests.helpers import prompt_ids, take

pytestmark = pytest.mark.skipif(
    "return-aux-hidden-state-layer-ids" not in known_flags(), reason="this SGLang has no --return-aux-hidden-state-layer-ids"
)
LISTS = {
    "tiny": ("deepseek", 8, 64, [[2, 4, 6], [1, 4, 6]]),
    "smollm2": ("llama", 30, 576, [[1, 15, 27]]),
}


def own_option(name: str, ids: list[int], prompt: list[int], folder, engine_starts) -> torch.Tensor:
    """Return what SGLang itself hands out for `ids`: float32 [S, K * H]."""
    flags = {"enable-return-aux-hidden-states": True, "speculative-algorithm": "EAGLE3", "return-aux-hidden-state-layer-ids": ids}
    tree = {**SETTINGS[name], "server": {**SETTINGS[name]["server"], "flags": flags}}
    with Server.start(Deployment.parse(tree, origin=name), log_dir=folder, capture=False) as server:
        engine_starts.note(f"{name}, SGLang's own option {ids}", server.sglang_version)
        with server.client() as client:
            body = {"input_ids": prompt, "return_hidden_states": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            reply = client.request("POST", "/generate", body)
    return torch.tensor(reply["meta_info"]["hidden_states"][0], dtype=torch.float32)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.engine(name)) for name in LISTS])
def test_every_conversion_is_what_sglang_returns(name, engine, engine_starts, tmp_path):
    family, layers, width, lists = LISTS[name]
    prompt = prompt_ids(20, 480, seed=3)
    dump = take(engine(name), prompt)
    columns = {k: dump.state(k).clone() for k in dump.boundaries}
    engine.stop()
    for ids in lists:
        expected = to_boundaries(ids, "sglang-eagle3", num_layers=layers, family=family)
        returned = own_option(name, ids, prompt, tmp_path, engine_starts).split(width, dim=-1)
        assert len(returned) == len(ids)
        found = tuple(next((k for k, c in columns.items() if torch.equal(c, r)), None) for r in returned)
        assert found == expected
        back = from_boundaries(expected, "sglang-eagle3", num_layers=layers, family=family)
        assert back == (ids if family == "llama" else [2, *expected[1:]])  # DeepSeek takes [2, 5, 7] and [1, 4, 6] for the same
