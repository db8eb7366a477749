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

LISTS = "THE STATES AGREE, THE LISTS DO NOT: the same ids name other layers"
VERDICTS = {
    "agree": "THESE TWO AGREE: look elsewhere",
    "shifted": "THESE TWO COUNT LAYERS DIFFERENTLY",
    "norm": "THE SAME LAYERS, ANOTHER NORM: one final is before it, the other after",
    "apart": "THE SAME LAYERS, FURTHER APART THAN NUMERICS EXPLAIN",
    "mislabelled": "THESE TWO AGREE, AND NEITHER HOLDS WHAT IT SAYS",
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
    verdicts = [p.verdict for p in c.pairs] or [o.verdict for o in c.offsets]
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    counted += f"; {', '.join(c.alone)} alone" if c.alone else ""
    blurred = "undecided" in verdicts and set(verdicts) <= {"right", "found", "undecided"}
    checks = [
        Check(
            f"{c.a} and {c.b}: the same number, the same boundary", counted, f"{len(verdicts)} right", set(verdicts) <= {"right", "found"},
            "what both get wrong alike", "each one's best fit, with a margin of three times the noise", blurred,
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
    if c.pairs:
        worst = max(c.pairs, key=lambda p: p.error / p.bar)
        source = "float32: 1e-5 at 30 layers" if c.dtype == "float32" else "three times the measured noise"
        ok = all(p.error <= p.bar for p in c.pairs)
        checks.append(
            Check(
                "worst relative L2 of one number",
                f"{worst.error:.2g} ({worst.b})",
                f"at most {worst.bar:.2g}",
                ok,
                "a common error",
                source,
            )
        )
    if len(c.finals) == 2:
        value = "; ".join(f"{f.party}: {f.state}" for f in c.finals)
        same = len({f.state for f in c.finals}) == 1 and c.finals[0].state != "undecided"
        checks.append(
            Check(
                "final before or after the norm", value, "the same", same, "the boundaries before it", "rebuilt logprobs, ten times nearer"
            )
        )
    return checks


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
    wrong = {v: [p for p in c.pairs if p.verdict == v] for v in ("shifted", "norm", "undecided", "unknown")}
    said = []
    if c.verdict == "agree":
        worst = max(p.error for p in c.pairs)
        shift = f", while the nearest other boundary is at least {min(b.shift for b in c.boundaries):.2g} away" if c.boundaries else ""
        alone = f" ({', '.join(c.alone)} has no counterpart in {c.b}.)" if c.alone else ""
        said.append(
            f"{c.a} and {c.b} agree at all {len(c.pairs)} boundaries that both have, in {c.dtype}: relative L2 at most {worst:.2g}{shift}. "
            f"If acceptance is low, these two captures are not the reason.{alone}"
        )
        said += [_on_numerics(c)] if c.boundaries else []
    elif not c.pairs:
        shown = ", ".join(f"{o.column} is {o.fits}" for o in c.offsets if o.said is None and o.verdict == "found")
        said.append(f"{c.a} does not say which boundaries it holds. Measured against {c.b}: {shown or 'it fits none of them'}.")
    if wrong["shifted"]:
        shown = "; ".join(f"{p.a} is {p.a_is}, {p.b} is {p.b_is}" for p in wrong["shifted"][:4])
        said.append(f"{len(wrong['shifted'])} of {len(c.pairs)} pairs of one number are two boundaries ({c.a} first): {shown}.")
    if wrong["norm"]:
        said.append(f"The finals are one boundary, {wrong['norm'][0].a_is} in {c.a} and {wrong['norm'][0].b_is} in {c.b}: one is normed.")
    if wrong["undecided"]:
        said.append(
            f"{len(wrong['undecided'])} of {len(c.pairs)} pairs cannot be told in {c.dtype}: the noise, or no neighbour to compare with, forbids it."
        )
    if wrong["unknown"]:
        said.append(
            f"{len(wrong['unknown'])} of {len(c.pairs)} pairs fit no boundary of this model on one side at least: other tokens, another model."
        )
    if c.verdict == "apart":
        worst = max(c.pairs, key=lambda p: p.error / p.bar)
        said.append(
            f"They hold the same boundaries and differ by more than numerics do: {worst.error:.2g} at {worst.b}, expected {worst.bar:.2g} at most."
        )
    for party, found in c.witnessed.items():
        if shifted := [o for o in found if o.verdict == "shifted"]:
            said.append(
                f"{party} does not hold what it says: by transformers {', '.join(f'its {o.said} is {o.fits}' for o in shifted[:4])}."
            )
        elif c.verdict in ("found", "shifted", "norm") and any(o.verdict == "found" and o.said is None for o in found):
            said.append(f"By transformers {party} holds {', '.join(o.fits for o in found)}.")
    return said


def _on_numerics(c: Comparison) -> str:
    ratio = min(b.shift / max(b.error, b.noise) for b in c.boundaries)
    text = f"Numerics against a shift, the first token of each prompt left out: in {c.dtype} the nearest other boundary is at least {ratio:,.0f} times further off"
    half = [b.shift / b.half_noise for b in c.boundaries if b.half_noise]
    if not half:
        return f"{text}."
    if min(half) < 3:
        return f"{text}; bfloat16 alone changes these states by up to {1 / min(half):,.1f} times that distance, and would hide a shift."
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
