"""What was found, in plain sentences that name engine, version, model and list; one verdict, and the table behind it."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path

from hsnb.checks import Check
from hsnb.divergence.compare import Comparison
from hsnb.divergence.settings import Setting, against, short
from hsnb.divergence.study import Study
from hsnb.paths import write_json
from hsnb.probe.bars import FP32_BAR

LISTS = "THE STATES AGREE, THE LISTS DO NOT: the same ids name other layers"
VERDICTS = {
    "agree": "THESE TWO AGREE: look elsewhere",
    "shifted": "THESE TWO COUNT LAYERS DIFFERENTLY",
    "found": "FOUND: the columns without numbers are told below",
    "undecided": "NOT PROVED: the noise hides a shift",
    "unrelated": "THESE TWO ARE NOT THE SAME STATES",
}


@dataclass(frozen=True)
class Conclusion:
    """The notebook's last word. `checks`: the numbers it rests on; `record`: everything measured, as plain values."""

    verdict: str
    sentences: tuple[str, ...]
    checks: tuple[Check, ...]
    record: dict = field(repr=False)

    def frame(self):
        """Return the checks as a table."""
        import pandas as pd

        return pd.DataFrame([{"check": c.name, "value": c.value, "threshold": c.threshold, "result": c.result} for c in self.checks])

    def text(self) -> str:
        return "\n".join([self.verdict, *self.sentences])

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{html.escape(s)}</p>" for s in self.sentences)
        return f"<h3>{html.escape(self.verdict)}</h3>{said}{self.frame().to_html(index=False)}"

    def save(self, folder: Path) -> Path:
        """Write everything as divergence.json into a run's folder."""
        return write_json(folder / "divergence.json", self.record)


def conclude(study: Study, comparison: Comparison, settings: tuple[Setting, ...] = ()) -> Conclusion:
    """Put what was measured into words."""
    checks = (*_comparison_checks(comparison), *(_setting_check(s) for s in settings))
    said = (*_on_lists(study, settings), *_on_boundaries(study, comparison), *_on_final(comparison))
    verdict = LISTS if comparison.verdict == "agree" and _lists_differ(settings) else VERDICTS[comparison.verdict]
    record = {
        "model": study.deployment.model,
        "architecture": study.architecture,
        "family": study.family,
        "layers": study.layers,
        "dtype": study.dtype,
        "ids": list(study.ids),
        "verdict": verdict,
        "sentences": list(said),
        "checks": [c.as_dict() for c in checks],
        "comparison": comparison.as_dict(),
        "settings": [s.as_dict() for s in settings],
    }
    if (found := against(settings)) is not None:
        record["own_map"] = {
            "a": found.a, "b": found.b, "rows": found.rows, "columns": found.columns, "relative_l2": found.relative_l2.tolist(),
            "tokens": found.tokens,
        }  # fmt: skip
    return Conclusion(verdict, tuple(said), checks, record)


def _comparison_checks(c: Comparison) -> list[Check]:
    verdicts = [o.verdict for o in c.offsets]
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    counted += f"; {', '.join(c.alone)} alone" if c.alone else ""
    blurred = "undecided" in verdicts and not {"shifted", "unknown"} & set(verdicts)
    checks = [
        Check(
            f"{c.a} on {c.b}: offset of each column", counted, f"{len(verdicts)} right", c.verdict == "agree",
            "what both get wrong alike", "margin over the runner-up, at least three times the noise", blurred,
        )
    ]  # fmt: skip
    for party, found in c.witnessed.items():
        words = [o.verdict for o in found]
        value = ", ".join(f"{words.count(v)} {v}" for v in dict.fromkeys(words))
        right = set(words) <= {"right", "found"}
        checks.append(
            Check(
                f"{party} on transformers",
                value,
                f"{len(words)} right",
                right,
                "",
                "",
                not right and set(words) <= {"right", "found", "undecided"},
            )
        )
    if c.boundaries:
        worst = max(c.boundaries, key=lambda b: b.error / _bar(c, b))
        ok = all(b.error <= _bar(c, b) for b in c.boundaries)
        source = "float32: 1e-5 at 30 layers" if c.dtype == "float32" else "three times the measured noise"
        value = f"{worst.error:.2g} at boundary {worst.number}; a shift costs {worst.shift:.2g} there"
        checks.append(Check("the same boundaries: worst relative L2", value, f"at most {_bar(c, worst):.2g}", ok, "a common error", source))
    if len(c.finals) == 2:
        value = "; ".join(f"{f.party}: {f.state}" for f in c.finals)
        same = len({f.state for f in c.finals}) == 1 and c.finals[0].state != "undecided"
        checks.append(
            Check(
                "final before or after the norm", value, "the same", same, "the boundaries before it", "rebuilt logprobs, ten times nearer"
            )
        )
    return checks


def _bar(c: Comparison, b) -> float:
    """Return the bar of one boundary: rounding adds up over the layers, 1e-5 is what 30 of them may have in float32."""
    return FP32_BAR * max(1.0, b.number / 30) if c.dtype == "float32" else 3 * b.noise


def _setting_check(s: Setting) -> Check:
    blurred = any(o.verdict == "undecided" for o in s.returned)
    name = f"{s.engine} {s.option} {short(s.ids)}"
    return Check(name, f"boundaries {short(s.measured)}", f"boundaries {short(s.expected)}", s.as_expected, "", "hsnb.boundaries", blurred)


def _lists_differ(settings: tuple[Setting, ...]) -> bool:
    """Say whether the engines returned other boundaries for one and the same list."""
    told: dict[tuple[int, ...], set] = {}
    for s in settings:
        if None not in s.measured:
            told.setdefault(s.ids, set()).add(s.measured)
    return any(len(measured) > 1 for measured in told.values())


def _on_lists(study: Study, settings: tuple[Setting, ...]) -> list[str]:
    said, by_list = [], {}
    for s in settings:
        by_list.setdefault(s.ids, []).append(s)
        shifts = set(s.shifts)
        if None in shifts:
            how = "not all of which can be told from the noise"
        elif len(shifts) == 1:
            (shift,) = shifts
            how = (
                "the ids as they are"
                if shift == 0
                else f"every id {abs(shift)} layer{'s' * (abs(shift) > 1)} {'later' if shift > 0 else 'earlier'}"
            )
        else:
            how = "not the same shift for each"
        said.append(f"{study.architecture}: for {s.option} {short(s.ids)}, {s.engine} returns the boundaries {short(s.measured)}: {how}.")
    for ids, both in by_list.items():
        if len(both) == 2 and None not in (*both[0].measured, *both[1].measured):
            one, other = both
            if one.measured != other.measured:
                said.append(
                    f"So the list {short(ids)} names other tensors in the two: {one.engine} gives {short(one.measured)}, {other.engine} "
                    f"{short(other.measured)}. A drafter trained on one and fed by the other sees the wrong layers."
                )
            else:
                said.append(f"The list {short(ids)} names the same boundaries in {one.engine} and in {other.engine}.")
    return said


def _on_boundaries(study: Study, c: Comparison) -> list[str]:
    shifted = [o for o in c.offsets if o.verdict == "shifted"]
    if c.verdict == "agree":
        worst, shift = max(b.error for b in c.boundaries), min(b.shift for b in c.boundaries)
        said = [
            f"Asked for the same boundaries, {c.a} and {c.b} agree at all {len(c.offsets)} of them in {c.dtype}: relative L2 at most "
            f"{worst:.2g}, while the nearest wrong boundary is at least {shift:.2g} away. If acceptance is low, these two captures are not the reason."
            + (f" ({', '.join(c.alone)} has no counterpart in {c.b}.)" if c.alone else "")
        ]
    elif c.verdict == "shifted":
        shown = ", ".join(f"{o.column} is {o.fits}" for o in shifted[:4]) + (", ..." if len(shifted) > 4 else "")
        said = [
            f"{len(shifted)} of {len(c.offsets)} columns of {c.a} are another boundary of {c.b}: {shown}. Their numbers do not mean the same."
        ]
    elif c.verdict == "found":
        shown = ", ".join(f"{o.column} is {o.fits}" for o in c.offsets)
        said = [f"{c.a} does not say which boundaries it holds. Measured against {c.b}: {shown}."]
    elif c.verdict == "undecided":
        n = sum(o.verdict == "undecided" for o in c.offsets)
        said = [
            f"{n} of {len(c.offsets)} columns cannot be told in {c.dtype}: the margin is under three times the noise. Compare in float32."
        ]
    else:
        n = sum(o.verdict == "unknown" for o in c.offsets)
        said = [f"{n} of {len(c.offsets)} columns of {c.a} fit none of {c.b}: another model, other tokens, or another norm."]
    if c.boundaries:
        said.append(_on_numerics(c))
    return said


def _on_numerics(c: Comparison) -> str:
    ratio = min(b.shift / max(b.error, b.noise) for b in c.boundaries)
    text = f"Numerics against a shift, the first token of each prompt left out: in {c.dtype} a shift by one costs at least {ratio:,.0f} times what the two differ by"
    half = [b.shift / b.half_noise for b in c.boundaries if b.half_noise]
    if not half:
        return f"{text}."
    if min(half) < 3:
        return f"{text}; bfloat16 alone changes these states by up to {1 / min(half):,.1f} times that, and would hide a shift."
    return f"{text}; what bfloat16 does to the states is at least {min(half):,.1f} times smaller than a shift."


def _on_final(c: Comparison) -> list[str]:
    words = {"pre": "before the final norm", "post": "after the final norm", "undecided": "not to be told before or after the norm"}
    said = [
        f"The last state of {f.party} is {words[f.state]} (logprobs rebuilt: {f.pre:.2g} nats off taken as before, {f.post:.2g} as after)."
        for f in c.finals
    ]
    if c.logprob_gap:
        said.append(
            f"From their last states the two give the same next token log p within {c.logprob_gap[0]:.2g} nats on average, {c.logprob_gap[1]:.2g} at most."
        )
    return said
