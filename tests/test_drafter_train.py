"""The real speculators code in its own environment: what it trains, what it drafts, what it drops, and how it ends."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsnb.drafter import train as train_module
from hsnb.drafter.accept import accept
from hsnb.drafter.config import read_drafter
from hsnb.drafter.convert import convert
from hsnb.drafter.model import load_drafter
from hsnb.drafter.states import choose
from hsnb.drafter.train import Driver, Recipe, load_with_trainer, train, trainers_python
from hsnb.errors import ModelError, ParamsError
from tests.drafter_files import make_target
from tests.test_drafter_accept import texts, write_states

pytestmark = [pytest.mark.timeout(600)]
TINY = {"steps": 12, "tokens_per_step": 64, "draft_vocab": 24, "threads": 1, "lr": 3e-3}


@pytest.fixture(scope="module")
def driver():
    """One running driver for all: its imports take longer than these trainings."""
    try:
        trainers_python()
    except ParamsError as error:
        pytest.skip(str(error))
    with Driver() as running:
        yield running


@pytest.fixture
def states(tmp_path):
    return choose(write_states(tmp_path / "all", make_target(tmp_path / "target"), texts()), tmp_path / "states", [2, 4, 5])


@pytest.mark.parametrize(
    "flags", [{"norm_before_fc": False, "norm_output": False}, {"norm_before_fc": True, "norm_output": True}], ids=["plain", "norms"]
)
def test_our_drafter_is_speculators_own(tmp_path, states, driver, flags):
    """Train with the real classes, then compare every draft of every root with the real model's: the same tokens."""
    recipe = Recipe(**TINY, flags={"norm_before_residual": False, **flags})
    trained = train(states, tmp_path / "drafter", recipe, driver=driver, validate=states)
    assert trained.last_loss < trained.losses[0] and trained.dropped == 0 and trained.samples == 3 and len(trained.losses) == 12
    assert 0 <= trained.validation["full_acc_2"] <= trained.validation["full_acc_0"] <= 1
    config = read_drafter(trained.path)
    assert config.top_ids == [2, 4, 5] and config.kind == "speculators" and config.raw["norm_output"] is flags["norm_output"]
    request = {
        **recipe.request(),
        "mode": "drafts",
        "drafter": str(trained.path),
        "data": str(states.path),
        "out": str(tmp_path / "drafts"),
    }
    list(driver.run(request))
    real, ours = load_file(tmp_path / "drafts"), load_drafter(trained.path, states.model)
    for row in states.rows:
        ids, _, columns = states.read(row)
        drafts = ours.drafts(ids, columns[:, :-1], 3)
        for k in range(3):  # a root's draft k needs k tokens of the text behind it
            assert torch.equal(drafts[: len(ids) - 1 - k, k], real[str(row)][: len(ids) - 1 - k, k])
    converted = convert(trained.path, tmp_path / "converted", target=states.model, dtype="float32")
    assert converted.left_out == ("embed_tokens.weight", "t2d") and converted.ids == (1, 3, 4)
    assert accept(converted.path, states).histogram == accept(trained.path, states).histogram


def test_a_seed_is_a_seed(tmp_path, states, driver):
    runs = [train(states, tmp_path / f"{n}", Recipe(**TINY), seed=seed, driver=driver) for n, seed in enumerate([0, 0, 1])]
    assert runs[0].losses == runs[1].losses != runs[2].losses


def test_a_time_limit_ends_a_training_early(tmp_path, states, driver):
    got = train(states, tmp_path / "short", Recipe(**{**TINY, "steps": 100000}, seconds=2), driver=driver)
    assert 1 < len(got.losses) < 100000 and got.path.joinpath("model.safetensors").is_file()


def test_dropped_samples_are_counted(states, driver):
    assert load_with_trainer(states.path, driver=driver) == {"samples": 3, "dropped": 0, "tokens": 98, "trained": 76, "columns": [3]}
    path = states.path / "hidden_states" / "hs_1.safetensors"
    tensors = load_file(path)
    tensors["token_ids"][3] += 1
    save_file(tensors, path)
    (states.path / "hidden_states" / "hs_2.safetensors").unlink()
    got = load_with_trainer(states.path, driver=driver)
    assert (got["samples"], got["dropped"]) == (3, 2)
    assert load_with_trainer(states.path, [0], driver=driver)["dropped"] == 0


def test_a_failure_is_told_and_the_driver_lives_on(tmp_path, states, driver):
    gone = choose(states, tmp_path / "gone", [2, 4, 5])
    (gone.path / "token_freq.pt").unlink()
    with pytest.raises(ModelError, match=r"the training failed: FileNotFoundError: .*token_freq"):
        train(gone, tmp_path / "x", Recipe(**TINY), driver=driver)
    assert load_with_trainer(states.path, driver=driver)["dropped"] == 0


def test_a_killed_parent_leaves_no_training(tmp_path, states, driver):
    """kill -9 of the process that trains: the driver ends within seconds, in the middle of its steps."""
    code = (
        "from pathlib import Path; from hsnb.drafter.states import open_states; from hsnb.drafter.train import *\n"
        f"train(open_states(Path({str(states.path)!r})), Path({str(tmp_path / 'long')!r}), Recipe(steps=10**6, threads=1, draft_vocab=24),\n"
        "      progress=lambda step, loss: print(step, flush=True))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout.readline().strip() == "1"
    (child,) = psutil.Process(parent.pid).children()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    gone, alive = psutil.wait_procs([child], timeout=20)
    assert gone and not alive, "the driver outlives its parent"


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_muon_in_float32_is_muon(shape, monkeypatch):
    """torch's own iterations, less its rounding to bfloat16; the path that a CPU without bfloat16 takes."""
    import torch.optim._muon as muon

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the module sets it
    monkeypatch.setattr(muon, "_zeropower_via_newtonschulz", own := muon._zeropower_via_newtonschulz)
    inside = runpy.run_path(str(Path(train_module.__file__).with_name("driver.py")))
    grad, how = torch.randn(shape, generator=torch.Generator().manual_seed(0)), ((3.4445, -4.7750, 2.0315), 5, 1e-7)
    inside["muon_in_float32"]()
    found, expected = muon._zeropower_via_newtonschulz(grad, *how), own(grad, *how).float()
    assert found.dtype == torch.float32 and found.shape == shape
    assert 0 < (found - expected).norm() / expected.norm() < 0.03
    assert torch.linalg.svdvals(found).min() > 0.4 and torch.linalg.svdvals(found).max() < 1.4
    step = torch.nn.Parameter(torch.zeros(shape))
    step.grad = grad
    torch.optim.Muon([step], lr=1.0, momentum=0.0, weight_decay=0.0, nesterov=False).step()
    assert torch.allclose(step / step.norm(), -found / found.norm(), atol=1e-6)  # torch's optimizer takes it


def test_without_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HSNB_TRAINERS", str(tmp_path))
    with pytest.raises(ParamsError, match="make setup-trainers"):
        trainers_python()
