"""What each mistake in the states costs over several seeds, on the states that 04_handoff captured: docs/handoff-seeds.json.

    hsnb run 03_extract -p limit 96 && hsnb run 04_handoff -p seeds 3                        # the bars, in the notebook
    python -m benchmarks.handoff_seeds outputs/demo/handoff --seeds 3 --other vllm            # and the spread, recorded
    python -m benchmarks.handoff_seeds --render                                               # into docs/handoff.md

Goes on where it was stopped: a comparison that the file has with as many seeds is not trained again. `--other vllm` starts vLLM for
the same samples (`make setup-vllm`), `--limit-s` begins no comparison after so many seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from hsnb.boundaries import default_boundaries
from hsnb.drafter.handoff import LATE_BAR, NORM_BAR, compare, variants
from hsnb.drafter.states import Sample, StatesFolder, open_states
from hsnb.drafter.train import Recipe
from hsnb.paths import project_root, write_json

RECORD = project_root() / "docs" / "handoff-seeds.json"
PAGE = RECORD.with_name("handoff.md")
BEGIN, END = "<!-- seeds: written by benchmarks.handoff_seeds -->\n", "<!-- /seeds -->\n"
MINUTES = 30.0  # a comparison; far more than it takes, so that the number of steps is the recipe's on a slow machine, too


def main(argv: list[str] | None = None) -> int:
    """Train what is owed, write the record, render it; return 0 when every bar is met and nothing is owed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff_seeds", description=__doc__)
    parser.add_argument("states", type=Path, nargs="?", help="outputs/RUN/handoff, with training/ and held-out/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--other", default="", help="another engine's folder of the same rows, or vllm")
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--render", action="store_true", help="write the table into docs/handoff.md")
    args = parser.parse_args(argv)
    if args.states:
        run(args.states, args.seeds, args.other, args.limit_s, args.record)
    record = json.loads(args.record.read_text())
    print(table(record))
    if args.render:
        PAGE.write_text(rendered(PAGE.read_text(), record))
    return 0 if all(met(record)) and not owed(record) else 1


def run(states: Path, seeds: int, other: str, limit_s: float, file: Path) -> None:
    """Train the comparisons that `file` does not have yet, and write it after each of them."""
    begun, training, held_out = time.monotonic(), open_states(states / "training"), open_states(states / "held-out")
    wanted = variants(training.num_layers, default_boundaries(training.num_layers), other)
    record = json.loads(file.read_text()) if file.is_file() else {"comparisons": {}}
    recipe = asdict(Recipe())
    record |= {"seeds": seeds, "wanted": list(wanted), "tokens": training.tokens, "samples": len(training.rows), "recipe": recipe}
    for name, variant in wanted.items():
        write_json(file, record)
        if len(record["comparisons"].get(name, [])) >= seeds or time.monotonic() - begun > limit_s:
            continue
        with tempfile.TemporaryDirectory(prefix="hsnb-seeds-") as out:
            rows = samples(training)
            got = compare(training, held_out, {name: variant}, Path(out), minutes=MINUTES, seeds=seeds, samples=rows).judged[name]
        record["comparisons"][name] = [
            {
                "stored": list(j.variant.aux),
                "position_0": j.position_0,
                "accept_length": j.accepted.accept_length,
                "last_loss": j.training.last_loss,
                "validation": j.training.validation.get("full_acc_0"),
                "seconds": j.training.seconds,
            }
            for j in got
        ]
        write_json(file, record)


def samples(states: StatesFolder) -> list[Sample]:
    """Return the samples of a folder, whose answers are under the mask to their end."""
    found = []
    for row in states.rows:
        entry = states.table[row]
        begin = int(entry["loss_mask"].argmax())
        ids = entry["input_ids"].tolist()
        found.append(Sample(tuple(ids[:begin]), tuple(ids[begin:]), row))
    return found


def owed(record: dict) -> list[str]:
    """Return the comparisons that were asked for and are not there."""
    return [name for name in record["wanted"] if len(record["comparisons"].get(name, [])) < record["seeds"]]


def gaps(record: dict, better: str, worse: str) -> list[float]:
    """Return position 0 of `better` less that of `worse`, seed by seed; [] when one of them is not there."""
    a, b = (record["comparisons"].get(name, []) for name in (better, worse))
    return [x["position_0"] - y["position_0"] for x, y in zip(a, b, strict=bool(a and b))]


def met(record: dict) -> list[bool]:
    """Say of each bar whether every seed meets it."""
    right, norm, _, told, told_late, *_ = record["wanted"]
    return [min(gaps(record, right, norm), default=0) >= NORM_BAR, min(gaps(record, told, told_late), default=0) >= LATE_BAR]


def table(record: dict) -> str:
    """Return the record as Markdown: mean (least to most) of each comparison, and the gaps seed by seed."""

    def spread(rows: list[dict], what: str, digits: int = 3) -> str:
        values = [row[what] for row in rows]
        return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"

    recipe, done = record["recipe"], record["comparisons"]
    seconds = [row["seconds"] for rows in done.values() for row in rows]
    lines = [
        f"{recipe['steps']} steps of {recipe['tokens_per_step']} tokens, {record['seeds']} seeds, {record['samples']} samples "
        f"({record['tokens']:,} tokens): mean (least to most). {len(seconds)} trainings, {sum(seconds):.0f} s.\n",
        "| trained on | stored | last loss | trainer's own validation | position 0, served | accept length, served |",
        "|---|---|---|---|---|---|",
    ]
    for name in record["wanted"]:
        if rows := done.get(name):
            shown = [spread(rows, what) for what in ("last_loss", "validation", "position_0", "accept_length")]
            lines.append(f"| {name} | {rows[0]['stored']} | " + " | ".join(shown) + " |")
    right, norm, late, told, told_late, *others = record["wanted"]
    pairs = [(right, norm, NORM_BAR), (told, told_late, LATE_BAR), (right, late, None), *((right, o, None) for o in others)]
    lines += ["", "| position 0 | seed by seed | bar |", "|---|---|---|"]
    for better, worse, bar in pairs:
        if found := gaps(record, better, worse):
            values = ", ".join(f"{g:+.3f}" for g in found)
            lines.append(f"| {better} less {worse} | {values} | {f'at least {bar:g} in every seed' if bar else 'reported'} |")
    if missing := owed(record):
        lines += ["", f"Not trained: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def rendered(page: str, record: dict) -> str:
    """Return the page with the table of `record` between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(record) + END + rest.split(END)[1]


if __name__ == "__main__":
    sys.exit(main())
