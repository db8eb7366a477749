"""The right drafter, converted and served by SGLang's own EAGLE3: what it is fed, and what it accepts beside what was predicted."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from hsnb.checks import Check
from hsnb.drafter.accept import Acceptance, accept
from hsnb.drafter.convert import Converted, convert
from hsnb.drafter.served import check_served, count, serve_with
from hsnb.drafter.states import StatesFolder
from hsnb.params import Deployment
from hsnb.progress import Progress

ANSWERS = 12  # prompts that a server is asked; 45 tokens of verification each are enough for two digits
BARS = {"float32": 0.02, "bfloat16": 0.05, "float16": 0.05}  # relative, of the accept length; rounding flips ties in bfloat16


@dataclass(frozen=True)
class ServedDrafter:
    """One drafter at serving. `same` of `predicted.samples` answers equal the target's own greedy ones, token by token."""

    converted: Converted
    predicted: Acceptance
    counted: Acceptance
    same: int
    fed: tuple[Check, ...]
    sglang: str
    dtype: str

    @property
    def error(self) -> float:
        """Return |predicted - served| / served, of the accept length."""
        return abs(self.predicted.accept_length - self.counted.accept_length) / self.counted.accept_length

    def checks(self) -> list[Check]:
        """Return what was read back, the prediction against the count, and the texts (in float32; in less they are reported)."""
        bar, exact, n = BARS[self.dtype], self.dtype == "float32", self.counted.samples
        lengths = f"{self.predicted.accept_length:.3f} predicted, {self.counted.accept_length:.3f} served ({self.error:.1%})"
        return [
            *self.fed,
            Check("accept length", lengths, f"within {bar:.0%}", self.error <= bar),
            Check(
                "text unchanged", f"{self.same} of {n} answers", f"{n} of {n}" if exact else "reported, no bar", self.same == n or not exact
            ),
        ]

    def plot(self, ax=None):
        """Draw accepted drafts, predicted and served."""
        from hsnb.drafter.figures import acceptance

        return acceptance({"predicted from the dump": self.predicted, f"served by SGLang {self.sglang}": self.counted}, ax)

    def as_dict(self) -> dict:
        """Return plain values, for --json."""
        return {
            "converted": self.converted.as_dict(),
            "predicted": self.predicted.as_dict(),
            "served": self.counted.as_dict(),
            "same_text": self.same,
            "error": self.error,
            "checks": [c.as_dict() for c in self.checks()],
        }

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.predicted.text())}</p><p>{html.escape(self.counted.text())}</p>" + self.converted._repr_html_()


def serve_and_count(
    converted: Converted, deployment: Deployment, held_out: StatesFolder, out: Path, *, dtype: str, answers: int = ANSWERS
) -> ServedDrafter:
    """Start a server with a converted drafter, read back what it is fed, count what it accepts, and stop it.

    Raises what serve_with and count do.
    """
    predicted = accept(converted.path, held_out, limit=answers, sglang=converted.sglang)
    with Progress(None, unit="s", desc="starting the server with the drafter") as progress:
        tell = lambda seconds, line: progress.advance(max(0, int(seconds) - progress.done), note=line[-100:])  # noqa: E731
        server = serve_with(deployment, converted.flags(), out / "report", log_dir=out, progress=tell)
    with server:
        fed = check_served(out / "report", converted.path, converted.boundaries)
        counted, same = count(server, held_out, limit=answers)
        version = server.sglang_version
    return ServedDrafter(converted, predicted, counted, same, tuple(fed), version, dtype)


def convert_and_serve(job, result, held_out: StatesFolder, *, dtype: str) -> ServedDrafter:
    """Do so with the first seed's drafter of the right states (`job`: hsnb.drafter.plan.Plan; `result`: hsnb.drafter.handoff.Handoff).

    `dtype`: of the target's forward ("float32", "bfloat16"), which the drafter's has to be.
    """
    from hsnb.server.flags import sglang_version

    trained = next(iter(result.judged.values()))[0].training
    converted = convert(trained.path, job.out / "drafter", target=held_out.model, sglang=sglang_version(), dtype=dtype)
    return serve_and_count(converted, job.serving, held_out, job.out / "served", dtype=dtype)
