"""Write docs/gpu-results.md from docs/gpu-results.json: every figure of the page comes from there, none is typed.

python -m benchmarks.render_gpu [--merge FILE ...]: takes the runs of other files in first (of one card, the newer file's).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu_results import PUBLISHED, Figure, Results, Run, Step, Value

HEAD = """# Seen on GPUs

Written out of [gpu-results.json](gpu-results.json) by `python -m benchmarks.render_gpu`; no figure is typed by hand. `make gpu` (on two cards
`make gpu GPUS=2`) measures the steps, `python -m benchmarks.gpu --steps drafter` the drafters, `make bench` the speed. The steps of one card are
of the versions and the days named with it; each has the hash of hsnb's source where one was recorded. Two models are random and made on
the machine: one of Kimi's depth and width (a mixture of experts with latent attention, narrow elsewhere), and a dense Llama whose
every layer moves the residual stream by a fifth. The drafters' target is SmolLM2-135M-Instruct (`--steps drafter`). "pass" means
that the figure meets its bar, "OFF" that it does not; a figure without a bar is reported, not judged. Medians are over tokens
without the first, whose norm can hide all others.
"""
TAIL = """## What this does not prove

Nothing about real weights larger than SmolLM2's, about other attention backends than the one used here, about CUDA graphs in prefill
(which hsnb refuses), or about more GPUs than were there. A random mixture of experts in half precision changes its routes with the last bit, so its deeper
states are compared only where the same batch gives the same bits; the dense model is there for the comparisons across batches and
engines. The speeds are of one card and one shape. A step is true of the source it names: where that is older than the process that writes
dumps, the files' layout and the checks are the same, and the writer is not.
"""
STATES = {"ok": "pass", "off": "OFF", "failed": "FAILED", "skipped": "not run"}


def show_value(value: Value) -> str:
    """Return a number for people: three digits, or thousands with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return value


def bar_text(figure: Figure) -> str:
    """Return the bar of a figure, "" when it has none."""
    return f"{figure.rule} {show_value(figure.bar)}" if figure.rule else ""


def page(results: Results) -> str:
    """Return the page. Raises ValueError when there is nothing to show, or a rehearsal among the runs."""
    if not results.runs or any(run.device != "cuda" for run in results.runs.values()):
        raise ValueError("expected runs on GPUs: make gpu on a machine with one")
    parts = [HEAD]
    for key in sorted(results.runs):
        parts += _run(key, results.runs[key])
    return "\n".join([*parts, TAIL])


def _run(key: str, run: Run) -> list[str]:
    said = {
        "card": f"{run.gpus} x {run.card}, {run.memory_mib:,} MiB each",
        "driver": run.driver,
        **run.versions,
        "last begun (UTC)": run.date,
    }
    summary = [[s.title, STATES[s.state], f"{show_value(s.seconds)} s", s.date, s.source, s.error] for s in run.steps.values()]
    parts = [
        f"## {key}\n",
        _table(["what", "value"], [[k, v] for k, v in said.items()]),
        _table(["step", "result", "took", "ended (UTC)", "hsnb source", "reason"], summary),
    ]
    for step in run.steps.values():
        parts += _step(step)
    return parts


def _step(step: Step) -> list[str]:
    parts = [f"### {step.title}\n"]
    if step.error:
        parts.append(f"{STATES[step.state]}: {_cell(step.error)}\n")
    if step.figures:
        rows = [[_named(f), show_value(f.value), f.unit, _count(f), bar_text(f), _result(f)] for f in step.figures]
        parts.append(_table(["figure", "value", "unit", "n", "bar", "result"], rows))
    for table in step.tables:
        names = [f"{name} ({unit})" if unit else name for name, unit in zip(table.columns, table.units, strict=True)]
        body = _table(names, [[show_value(v) for v in row] for row in table.rows])
        parts.append(f"<details><summary>{_cell(table.title)}</summary>\n\n{body}\n</details>\n")
    return parts


def _named(figure: Figure) -> str:
    return f"{figure.name} ({figure.note})" if figure.note else figure.name


def _count(figure: Figure) -> str:
    return "" if figure.n is None else f"{figure.n:,}"


def _result(figure: Figure) -> str:
    return "" if not figure.rule else "pass" if figure.ok else "OFF"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def main(argv: list[str] | None = None) -> int:
    """Merge what is named, write the JSON and the page; return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render_gpu", description=__doc__)
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="gpu-results.json files of other machines")
    args = parser.parse_args(argv)
    results = Results.read(PUBLISHED)
    for file in args.merge:
        other = Results.model_validate_json(file.read_text())
        results = results.merged(Results(runs={k: r for k, r in other.runs.items() if r.device == "cuda"}))
    text = page(results)
    if args.merge:
        results.write(PUBLISHED)
    PUBLISHED.with_suffix(".md").write_text(text)
    print(PUBLISHED.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
