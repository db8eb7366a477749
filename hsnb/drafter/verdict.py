"""The verdict of a hand-off: every check with its bar, and whether all hold."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path

from hsnb.checks import Check
from hsnb.errors import ExtractError
from hsnb.paths import write_json


@dataclass(frozen=True)
class Verdict:
    """All checks of a hand-off; `says`: the sentence about the loss; `numbers`: everything measured, as plain values."""

    checks: tuple[Check, ...]
    says: str
    numbers: dict = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks)

    def frame(self):
        """Return the checks as a table."""
        import pandas as pd

        return pd.DataFrame([{"check": c.name, "value": c.value, "threshold": c.threshold, "result": c.result} for c in self.checks])

    def as_dict(self) -> dict:
        """Return everything as plain values, for --json."""
        return {"ok": self.ok, "says": self.says, "checks": [c.as_dict() for c in self.checks], **self.numbers}

    def save(self, folder: Path) -> Path:
        """Write handoff.json beside the run's notebooks."""
        return write_json(folder / "handoff.json", self.as_dict())

    def require(self) -> None:
        """Raise ExtractError naming the first check that failed, so that a notebook and its process fail."""
        for check in self.checks:
            if not check.ok:
                raise ExtractError(
                    got=f"{check.name}: {check.value}",
                    expected=check.threshold,
                    likely="too short a training to tell (raise minutes), or states that are not what they are labelled",
                    next="probe the server that the states came from, then train longer",
                )

    def _repr_html_(self) -> str:
        passed = sum(c.ok for c in self.checks)
        return (
            f"<p><b>Verdict: {'PASS' if self.ok else 'FAIL'}</b> ({passed} of {len(self.checks)} checks passed)</p>"
            + self.frame().to_html(index=False, border=0)
            + f"<p>{html.escape(self.says)}</p>"
        )


def verdict(loaded: dict, taught, result, served) -> Verdict:
    """Put together what a hand-off found: the trainer's account of the folder, teacher top-1, the comparisons, the served drafter."""
    took = Check("samples the trainer dropped", f"{loaded['dropped']:,} of {loaded['samples']:,}", "0", loaded["dropped"] == 0)
    checks = (took, *taught.checks(), *result.checks(), *served.checks())
    numbers = {"loaded": loaded, "teacher": taught.as_dict(), "handoff": result.as_dict(), "served": served.as_dict()}
    return Verdict(checks, result.loss_says, numbers)
