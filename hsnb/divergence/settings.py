"""The same ids through each tool's own user-facing setting: which boundary each really returned, found by measuring."""

from __future__ import annotations

from dataclasses import dataclass, field

from hsnb import boundaries as bd
from hsnb.divergence.measure import Distances, distances
from hsnb.divergence.offsets import Offset
from hsnb.divergence.states import States
from hsnb.errors import BoundaryError

READ = ("speculators-0.3", "speculators", "specforge", "model-optimizer-hf", "model-optimizer-vllm")  # tools that are not engines


@dataclass(frozen=True)
class Setting:
    """One list of ids given to one engine by its own option: what it handed out, and where each column fits among known boundaries."""

    engine: str
    option: str
    ids: tuple[int, ...]
    expected: tuple[int, ...]  # by hsnb.boundaries
    returned: tuple[Offset, ...] = field(repr=False)
    states: States = field(repr=False)

    @property
    def measured(self) -> tuple[int | None, ...]:
        """Return the boundary of each id, None where none can be told."""
        return tuple(o.fits_number if o.verdict in ("right", "shifted") else None for o in self.returned)

    @property
    def as_expected(self) -> bool:
        return self.measured == self.expected

    @property
    def shifts(self) -> tuple[int | None, ...]:
        return tuple(None if m is None else m - i for i, m in zip(sorted(self.ids), self.measured, strict=True))

    def as_dict(self) -> dict:
        return {
            "engine": self.engine,
            "option": self.option,
            "ids": list(self.ids),
            "expected": list(self.expected),
            "measured": list(self.measured),
            "returned": [o.as_dict() for o in self.returned],
        }


def frame(settings: tuple[Setting, ...], family: str, layers: int):
    """Return one row a tool and list: what was measured, and what the other tools' rules make of the same lists (read, not run)."""
    import pandas as pd

    rows = [
        {
            "tool": s.engine,
            "setting": s.option,
            "ids": short(s.ids),
            "boundaries": short(s.measured),
            "by": "measured",
            "as hsnb converts": "yes" if s.as_expected else f"no: {short(s.expected)}",
        }
        for s in settings
    ]
    lists = list(dict.fromkeys(s.ids for s in settings if len(s.ids) <= 4))
    for name in READ:
        for ids in lists:
            rule = bd.CONVENTIONS[name]
            known = {"tool": name, "setting": "layer ids", "ids": short(ids), "by": "its rule", "as hsnb converts": "by definition"}
            try:
                meant = short(bd.to_boundaries(ids, name, num_layers=layers, family=family))
            except BoundaryError:
                meant = "no such layer"
            rows.append({**known, "boundaries": meant, "setting": rule.source})
    return pd.DataFrame(rows)


def against(settings: tuple[Setting, ...]) -> Distances | None:
    """Return the map of the longest list that the first engine was given against the longest that another was; None without two."""
    longest: dict[str, Setting] = {}
    for s in settings:
        if s.engine not in longest or len(s.ids) > len(longest[s.engine].ids):
            longest[s.engine] = s
    pair = list(longest.values())[:2]
    return distances(*(s.states for s in pair)) if len(pair) == 2 else None


def short(numbers) -> str:
    """Return "2, 15, 27", with runs of four or more as "27..33"; "?" for a number that cannot be told."""
    runs: list[list] = []
    for n in numbers:
        if runs and None not in (n, runs[-1][-1]) and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{r[0]}..{r[-1]}" if len(r) > 3 else ", ".join("?" if n is None else str(n) for n in r) for r in runs]
    return ", ".join(parts)
