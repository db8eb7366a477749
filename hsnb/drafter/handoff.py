"""What a mistake in the states costs a drafter: the same short training on right and on wrong states, judged on what is served.

Every drafter is judged on the states that SGLang feeds it at serving, the right ones, whatever it was trained on: a trainer's own
validation is measured on states with the same mistake, and shows the least part of it; the loss hardly shows it.
"""

from __future__ import annotations

import html
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hsnb.boundaries import late, telling_boundaries
from hsnb.checks import Check
from hsnb.drafter.accept import Acceptance, accept
from hsnb.drafter.other import VLLM, take_vllm
from hsnb.drafter.states import Sample, StatesFolder, choose, open_states
from hsnb.drafter.train import Driver, Recipe, Training, train
from hsnb.errors import DataError, ParamsError
from hsnb.progress import Progress

NORM_BAR = 0.10  # position-0 acceptance, right less wrong norm: 0.23 was seen
LATE_BAR = 0.04  # the same, right less one late, at the telling boundaries: 0.087 was seen


@dataclass(frozen=True)
class Variant:
    """One way to make the states. `aux`: the boundaries stored; `served`: those that the drafter is fed at serving."""

    name: str
    aux: tuple[int, ...]
    served: tuple[int, ...]
    normed: bool = False  # norm(B_L) stored where B_L belongs
    folder: str = ""  # states of another engine, instead of this one's; "vllm": taken for this comparison


def variants(num_layers: int, boundaries: Sequence[int], other: str = "") -> dict[str, Variant]:
    """Return the comparisons by name: right states first, each mistake after. `other`: a folder of another engine's states."""
    real, telling = tuple(boundaries), telling_boundaries(num_layers)
    found = [
        Variant("right", real, real),
        Variant("wrong norm", real, real, normed=True),
        Variant("one late", late(real, num_layers), real),
        Variant(f"right, {list(telling)}", telling, telling),
        Variant(f"one late, {list(telling)}", late(telling, num_layers), telling),
    ]
    if other:
        found.append(Variant("the other engine's", real, real, folder=other))
    return {v.name: v for v in found}


def needed(wanted: Mapping[str, Variant]) -> tuple[int, ...]:
    """Return every boundary that has to be captured for these comparisons, in one pass."""
    return tuple(sorted({b for v in wanted.values() for b in (*v.aux, *v.served)}))


@dataclass(frozen=True)
class Judged:
    """One training and what came of it: `accepted` on the states that are served."""

    variant: Variant
    training: Training
    accepted: Acceptance

    @property
    def position_0(self) -> float:
        return self.accepted.at_position[0]


@dataclass(frozen=True)
class Handoff:
    """All comparisons of one run. `judged[name]` has one entry a seed."""

    judged: dict[str, tuple[Judged, ...]]
    held_out: int  # tokens of the answers judged on
    seconds: float  # of all trainings
    num_layers: int

    def mean(self, name: str, what: str = "position_0") -> float:
        """Return the mean over the seeds of "position_0", "accept_length", "loss" or "validation"."""
        return statistics.mean(self.values(name, what))

    def values(self, name: str, what: str) -> list[float]:
        """Return one number a seed."""
        read = {
            "position_0": lambda j: j.position_0,
            "accept_length": lambda j: j.accepted.accept_length,
            "loss": lambda j: j.training.last_loss,
            "validation": lambda j: j.training.validation.get("full_acc_0", float("nan")),
        }[what]
        return [read(j) for j in self.judged[name]]

    def gap(self, better: str, worse: str, what: str = "position_0") -> list[float]:
        """Return better less worse, seed by seed."""
        return [a - b for a, b in zip(self.values(better, what), self.values(worse, what), strict=True)]

    @property
    def names(self) -> tuple[str, str, str, str, str]:
        """Return the names of: right, wrong norm, one late, right at the telling boundaries, one late there."""
        return tuple(self.judged)[:5]

    def frame(self):
        """Return one row a comparison: what was stored, and means over the seeds with their spread."""
        import pandas as pd

        def shown(name, what):
            values = self.values(name, what)
            spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
            return f"{statistics.mean(values):.3f}{spread}"

        rows = []
        for name, runs in self.judged.items():
            v = runs[0].variant
            rows.append(
                {
                    "trained on": name,
                    "stored": f"{list(v.aux)}, {'norm(B_L)' if v.normed else 'B_L'}",
                    "last loss": shown(name, "loss"),
                    "trainer's validation": shown(name, "validation"),
                    "position 0, served": shown(name, "position_0"),
                    "accept length, served": shown(name, "accept_length"),
                }
            )
        return pd.DataFrame(rows)

    def checks(self) -> list[Check]:
        """Return the bars: what each mistake has to cost at least, in every seed; what is only reported has no bar."""
        right, norm, shifted, told, told_late = self.names

        def bar(name: str, better: str, worse: str, least: float) -> Check:
            gaps = self.gap(better, worse)
            return Check(name, ", ".join(f"{g:+.3f}" for g in gaps), f"at least {least:g} in every seed", min(gaps) >= least)

        def report(name: str, better: str, worse: str) -> Check:
            return Check(name, ", ".join(f"{g:+.3f}" for g in self.gap(better, worse)), "reported, no bar", True)

        checks = [
            bar("position 0, right less wrong norm", right, norm, NORM_BAR),
            bar(f"position 0, right less one late, {list(self.judged[told][0].variant.aux)}", told, told_late, LATE_BAR),
            report(f"position 0, right less one late, {list(self.judged[right][0].variant.aux)}", right, shifted),
        ]
        return checks + [report(f"position 0, right less {name}", right, name) for name in list(self.judged)[5:]]

    @property
    def loss_says(self) -> str:
        """Return, in one sentence with the numbers, what the loss shows of the mistakes."""
        right, norm, shifted, told, told_late = self.names
        loss, cost = (lambda n: f"{self.mean(n, 'loss'):.2f}"), (lambda n: f"{self.mean(n, 'accept_length'):.2f}")
        return (
            f"The loss is {loss(right)} on right states, {loss(norm)} with the wrong norm, {loss(shifted)} one boundary "
            f"late ({loss(told)} and {loss(told_late)} at {list(self.judged[told][0].variant.aux)}), while the accept length is "
            f"{cost(right)}, {cost(norm)}, {cost(shifted)} ({cost(told)} and {cost(told_late)})."
        )

    def plot(self, ax=None):
        """Draw accept length and last loss of every comparison, one dot a seed."""
        from hsnb.drafter.figures import costs

        values = {n: {"accept_length": self.values(n, "accept_length"), "loss": self.values(n, "loss")} for n in self.judged}
        return costs(values, self.names[0], ax)

    def as_dict(self) -> dict:
        """Return everything as plain values, for --json and the report."""
        runs = {
            name: [{**j.training.as_dict(), "position_0": j.position_0, "accepted": j.accepted.as_dict()} for j in judged]
            for name, judged in self.judged.items()
        }
        return {
            "comparisons": runs,
            "variants": {name: asdict(judged[0].variant) for name, judged in self.judged.items()},
            "checks": [c.as_dict() for c in self.checks()],
            "seconds": self.seconds,
            "held_out": self.held_out,
        }

    def _repr_html_(self) -> str:
        seeds = len(next(iter(self.judged.values())))
        about = f"{seeds} seed(s), {self.seconds:.0f} s of training, judged on {self.held_out:,} tokens of the target's own answers"
        return f"<p>{html.escape(about)}</p>" + self.frame().to_html(index=False, border=0) + f"<p>{html.escape(self.loss_says)}</p>"


def compare(
    training_states: StatesFolder,
    held_out: StatesFolder,
    wanted: Mapping[str, Variant],
    out: Path,
    *,
    minutes: float = 3.0,
    seeds: int = 1,
    recipe: Recipe | None = None,
    samples: Sequence[Sample] = (),
) -> Handoff:
    """Train a drafter for every comparison and seed, within `minutes` in all, and judge each on the served states of `held_out`.

    Folders of chosen columns are written below `out`, drafters to {out}/{name}-seed{n}. A variant of another engine is trained on
    the rows of `samples` in its own folder, or, for "vllm", on what vLLM gives for `samples` now (a minute and more).
    Raises ParamsError when a training would get less than two seconds.
    """
    each = minutes * 60 / (len(wanted) * seeds)
    if each < 2:
        raise ParamsError(
            got=f"{minutes:g} minutes for {len(wanted) * seeds} trainings",
            expected=f"at least {len(wanted) * seeds * 2 / 60:.1f} minutes",
            likely="minutes are for all trainings together",
            next="-p minutes 3, or fewer seeds",
        )
    recipe = replace(recipe or Recipe(), seconds=each)
    judged: dict[str, list[Judged]] = {name: [] for name in wanted}
    total = recipe.steps * len(wanted) * seeds
    with Driver(out / "trainer.log") as driver, Progress(total, unit="steps", desc="training") as progress:
        for name, variant in wanted.items():
            slug = "-".join(re.findall(r"[a-z0-9]+", name.lower()))
            states, check = _states(training_states, held_out, variant, samples, out / slug)
            for seed in range(seeds):
                tell = lambda step, loss, name=name, seed=seed: progress.advance(1, note=f"{name}, seed {seed}: loss {loss:.2f}")  # noqa: E731
                where = out / f"{slug}-seed{seed}"
                trained = train(states, where, recipe, seed=seed, validate=check, progress=tell, driver=driver)
                accepted = accept(trained.path, held_out, boundaries=variant.served)
                judged[name].append(Judged(variant, trained, accepted))
    seconds = sum(j.training.seconds for runs in judged.values() for j in runs)
    tokens = next(iter(judged.values()))[0].accepted.tokens
    return Handoff({n: tuple(runs) for n, runs in judged.items()}, tokens, seconds, held_out.num_layers)


def _states(
    training_states: StatesFolder, held_out: StatesFolder, variant: Variant, samples: Sequence[Sample], out: Path
) -> tuple[StatesFolder, StatesFolder]:
    """Return (states to train on, held-out states with the same mistake, for the trainer's own validation)."""
    check = choose(held_out, out / "validation", variant.aux, normed=variant.normed)
    if not variant.folder:
        return choose(training_states, out / "train", variant.aux, normed=variant.normed), check
    if variant.folder == VLLM:
        return take_vllm(samples, out / "train", variant.aux, training_states.model), check
    labelled = (Path(variant.folder) / "hsnb.json").is_file()
    other = open_states(variant.folder, boundaries=() if labelled else variant.aux, model=training_states.model)
    rows, lengths = [s.row for s in samples], [len(s.ids) for s in samples]
    if gone := sorted(set(rows) - set(other.rows)):
        raise DataError(
            got=f"{variant.folder}: no states of row {gone[0]} ({len(gone)} rows missing)",
            expected="the other engine's states of the same rows",
            likely="another shard, or another data set",
            next="extract the same shard with the other engine",
        )
    chosen = choose(other, out / "train", variant.aux, rows=rows, lengths=lengths)
    for n, sample in enumerate(samples):
        if chosen.table[n]["input_ids"].tolist() != sample.ids:
            raise DataError(
                got=f"{variant.folder}: row {sample.row} has other token ids",
                expected="the same texts, token by token",
                likely="another data set, or another chat template",
                next="prepare the data once, and give the same ids to both engines",
            )
    return chosen, check
