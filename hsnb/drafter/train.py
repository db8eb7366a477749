"""A short training by the real speculators code, in its own environment: started, watched and ended as a process of its own.

Not for production: it shows within minutes on a CPU whether a folder of states trains a drafter that is accepted, and what a
mistake in the states costs. The loss does not tell: states a boundary late, and a normed final, train to as low a loss.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hsnb.drafter.states import StatesFolder
from hsnb.errors import HsnbError, ModelError, ParamsError
from hsnb.paths import project_root
from hsnb.show import pairs_html

ENVIRONMENT = ".venv-trainers"  # made by `make setup-trainers`; HSNB_TRAINERS names another one
FLAGS = {"norm_before_residual": False, "norm_before_fc": True, "norm_output": True}  # what SGLang can run, and trains fastest
SILENT_S = 300.0  # a training that says nothing for so long has hung


@dataclass(frozen=True)
class Recipe:
    """How a short training goes; the defaults are about the least with which every mistake still shows (docs/handoff.md)."""

    steps: int = 40
    seconds: float = 0.0  # 0: no limit
    tokens_per_step: int = 512
    ttt_steps: int = 1
    draft_vocab: int = 2048
    lr: float = 1e-3
    muon_lr: float = 1e-2
    optimizer: str = "muon"  # the trainer's own default: 60 steps of it learn more than 100 of adamw
    flags: dict[str, bool] = field(default_factory=lambda: dict(FLAGS))
    drafts: int = 3
    threads: int = 2

    def request(self) -> dict[str, Any]:
        """Return it as the driver reads it."""
        tree = asdict(self)
        muon = {"muon_momentum": 0.95, "muon_weight_decay": 0.1, "muon_ns_steps": 5, "muon_adjust_lr_fn": "match_rms_adamw"}
        tree["optimizer"] = {"optimizer": self.optimizer, "lr": self.lr, "weight_decay": 0.01, "muon_lr": self.muon_lr, **muon}
        return {**tree, "warmup_steps": 10, "trim_vocab": True, "max_length": 4096}


@dataclass(frozen=True)
class Training:
    """One trained drafter. `losses`: of every step; `validation`: the trainer's own metrics on states like those it was trained on."""

    path: Path
    data: Path
    boundaries: tuple[int, ...]
    seed: int
    losses: tuple[float, ...]
    tokens: int  # seen, repeats counted
    seconds: float
    samples: int
    dropped: int
    validation: dict[str, float] = field(default_factory=dict)

    @property
    def last_loss(self) -> float:
        """Mean of the last ten steps."""
        last = self.losses[-10:]
        return sum(last) / len(last)

    def as_dict(self) -> dict:
        """Return plain values, for --json."""
        return {**asdict(self), "path": str(self.path), "data": str(self.data), "last_loss": self.last_loss}

    def plot(self, ax=None):
        """Draw the loss over the steps."""
        from hsnb.drafter.figures import losses

        return losses({self.path.name: self.losses}, ax)

    def _repr_html_(self) -> str:
        shown = {
            "drafter": self.path,
            "trained on": self.data,
            "boundaries": list(self.boundaries),
            "steps": len(self.losses),
            "tokens seen": f"{self.tokens:,}",
            "samples dropped": self.dropped,
            "last loss": f"{self.last_loss:.3f}",
            "seconds": f"{self.seconds:.0f}",
        }
        return pairs_html(shown.items())


def trainers_python() -> Path:
    """Return the interpreter of the trainers' environment. Raises ParamsError when it has not been made."""
    folder = Path(os.environ.get("HSNB_TRAINERS") or project_root() / ENVIRONMENT)
    python = folder / "bin" / "python"
    if not python.exists():
        raise ParamsError(
            got=f"no {python}",
            expected="the trainers' own environment (speculators needs other versions than the server)",
            likely="it has not been made yet",
            next="make setup-trainers, or set HSNB_TRAINERS to an environment with speculators 0.9",
        )
    return python


def train(
    states: StatesFolder,
    out: Path,
    recipe: Recipe | None = None,
    *,
    seed: int = 0,
    validate: StatesFolder | None = None,
    progress: Callable[[int, float], None] | None = None,
    driver: Driver | None = None,
) -> Training:
    """Train an EAGLE-3 drafter on `states` with speculators' own classes and save it to `out`.

    `validate`: held-out states with the same columns, for the trainer's own metrics. `progress(step, loss)` is called at every
    step. `driver`: one that runs already (its imports take longer than a short training). Raises ModelError with the trainer's own
    words when it fails, ParamsError when its environment is not there.
    """
    if driver is None:
        with Driver(out.with_name(f"{out.name}.log")) as own:
            return train(states, out, recipe, seed=seed, validate=validate, progress=progress, driver=own)
    request = {
        **(recipe or Recipe()).request(),
        "mode": "train",
        "data": str(states.path),
        "out": str(out),
        "target": str(states.model),
        "boundaries": list(states.boundaries),
        "seed": seed,
        "validate": str(validate.path) if validate else "",
    }
    losses, tokens, samples, begin, last = [], 0, 0, time.monotonic(), {}
    for line in driver.run(request):
        if line["event"] == "begin":
            samples = line["samples"]
        elif line["event"] == "step":
            losses.append(line["loss"])
            tokens = line["tokens"]
            if progress:
                progress(line["step"], line["loss"])
        else:
            last = line
    seconds = time.monotonic() - begin
    return Training(out, states.path, states.boundaries, seed, tuple(losses), tokens, seconds, samples, last["dropped"], last["validation"])


def load_with_trainer(folder: Path, rows: list[int] | None = None, driver: Driver | None = None) -> dict:
    """Read a folder with the trainer's own data set and collate function: samples, dropped, tokens, trained, columns."""
    if driver is None:
        with Driver() as own:
            return load_with_trainer(folder, rows, own)
    *_, last = driver.run({"mode": "load", "data": str(folder), "max_length": 131072, "rows": rows})
    return {k: v for k, v in last.items() if k != "event"}


class Driver:
    """The program driver.py in the trainers' environment: a context manager; it ends with it, and with this process however that ends."""

    def __init__(self, log: Path | None = None):
        self.log = log
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Driver:
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve whatever else runs on a small machine
        if self.log:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log or os.devnull, "w") as errors:
            self._process = subprocess.Popen(
                [trainers_python(), "-u", Path(__file__).with_name("driver.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                start_new_session=True,
            )
        self._rest = b""
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()  # it leaves by itself
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(self, request: dict) -> Iterator[dict]:
        """Yield what it says to `request`, the last being "done".

        Raises ModelError when it says that it failed, ends, or is silent for SILENT_S seconds.
        """
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            line = json.loads(self._line())
            if line["event"] == "error":
                raise self._failed(line["error"])
            yield line
            if line["event"] == "done":
                return

    def _line(self) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(SILENT_S):
                    raise self._failed(f"silent for {SILENT_S:.0f} s")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise self._failed(f"it ended with status {self._process.wait()}")
                self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def _failed(self, what: str) -> HsnbError:
        return ModelError(
            got=f"the training failed: {what}",
            expected="a trained drafter",
            likely="see the trainer's own words",
            next=f"read {self.log}" if self.log else "run it again with a log",
        )
