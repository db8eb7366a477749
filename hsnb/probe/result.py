"""The probe's result: every check with its bar, one verdict, and what it does not prove."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path

from hsnb.checks import Check
from hsnb.errors import CaptureError
from hsnb.paths import write_json

NOT_PROVED = (
    "That other prompts, lengths and loads give the right states (extraction verifies each sample's rows and ids, not its layers); "
    "what the checkpoint, transformers and SGLang would all get wrong; and anything after this server is started again."
)


@dataclass(frozen=True)
class ProbeResult:
    """The verdict on one server: `verdict` is PASS, FAIL or NOT PROVED; `pid` and `started` say which server it was.

    `layer_witnesses`: who the layers were compared with. `logprob_errors`: |error| in nats per text prompt and token.
    """

    checks: tuple[Check, ...]
    model: str
    sglang_version: str
    boundaries: tuple[int, ...]
    final: str
    dtype: str
    pid: int
    started: str
    layer_witnesses: tuple[str, ...] = ()
    logprob_errors: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(c.ok for c in self.checks)

    @property
    def verdict(self) -> str:
        if any(not c.ok and not c.not_proved for c in self.checks):
            return "FAIL"
        return "PASS" if self.ok else "NOT PROVED"

    @property
    def failed(self) -> list[Check]:
        return [c for c in self.checks if not c.ok]

    def as_dict(self) -> dict:
        """Return everything as plain values, for --json."""
        return {
            "verdict": self.verdict,
            "model": self.model,
            "sglang_version": self.sglang_version,
            "boundaries": list(self.boundaries),
            "final": self.final,
            "pid": self.pid,
            "started": self.started,
            "layer_witnesses": list(self.layer_witnesses),
            "checks": [c.as_dict() for c in self.checks],
            "not_proved": NOT_PROVED,
        }

    def save(self, folder: Path) -> Path:
        """Write the result as probe.json beside the run's notebooks."""
        return write_json(folder / "probe.json", self.as_dict())

    def frame(self):
        """Return the checks as a table."""
        import pandas as pd

        rows = [{"check": c.name, "value": c.value, "threshold": c.threshold, "result": c.result} for c in self.checks]
        return pd.DataFrame(rows)

    def plot(self, ax=None):
        """Draw the errors of the rebuilt logprobs against their bar."""
        from hsnb.figures import logprob_errors
        from hsnb.probe.bars import LOGPROB_BARS

        return logprob_errors(self.logprob_errors, LOGPROB_BARS[self.dtype][1], ax)

    def require(self) -> None:
        """Raise CaptureError when the verdict is not PASS, so that a notebook and its process fail."""
        if self.ok:
            return
        first = self.failed[0]
        raise CaptureError(
            got=f"the probe's verdict is {self.verdict}: {first.name} is {first.value}; "
            f"{len(self.failed)} of {len(self.checks)} checks failed",
            expected=first.threshold,
            likely="the dump does not hold what its labels say, or another server's files lie in the spool",
            next="do not extract from this server; start it again and probe it",
        )

    def text(self) -> str:
        """Return the verdict and the failed checks, for a terminal."""
        lines = [f"{self.verdict}: {sum(c.ok for c in self.checks)} of {len(self.checks)} checks passed"]
        lines += [f"  {c.name}: {c.value}, expected {c.threshold}" for c in self.failed]
        return "\n".join([*lines, f"Not proved: {NOT_PROVED}"])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(c.name)}</td><td>{html.escape(c.value)}</td><td>{html.escape(c.threshold)}</td>"
            f"<td><b>{c.result}</b></td></tr>"
            for c in self.checks
        )
        return (
            f"<p><b>Verdict: {self.verdict}</b> ({sum(c.ok for c in self.checks)} of {len(self.checks)} checks passed)</p>"
            "<table><tr><th style='text-align:left'>check</th><th>value</th><th>threshold</th><th>result</th></tr>"
            f"{rows}</table><p>Not proved: {html.escape(NOT_PROVED)}</p>"
        )
