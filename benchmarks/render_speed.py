"""Write the tables of docs/performance.md and the README from what `make bench` measured: python -m benchmarks.render_speed."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks import drain_results, grow_results, others_results, parts_results
from benchmarks.gpu_results import PUBLISHED, Step
from benchmarks.gpu_results import Results as GpuResults
from benchmarks.gpu_site import ROOT
from benchmarks.gpu_speed import TITLE, figures
from benchmarks.render_gpu import page
from benchmarks.speed_results import FILE, Load, Results, Run

PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
MARKS = {  # of each table: where it begins and ends
    "server": ("<!-- tables: make bench -->\n", "<!-- end of tables -->"),
    "client": ("<!-- client: python -m benchmarks.drain -->\n", "<!-- end of client -->"),
    "others": ("<!-- others: python -m benchmarks.others -->\n", "<!-- end of others -->"),
    "parts": ("<!-- parts: python -m benchmarks.parts -->\n", "<!-- end of parts -->"),
    "grow": ("<!-- grow: python -m benchmarks.grow -->\n", "<!-- end of grow -->"),
}


def spread(values: list[float]) -> str:
    """Return "median (smallest to largest)"."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def row(name: str, load: Load, run: Run) -> str:
    """Return one load of a run as a row."""
    plain, captured = (statistics.median(t.rate for t in turns) for turns in (load.plain, load.captured))
    drained = bool(load.output)
    return _cells(
        name, load.prompts, str(load.turns), f"{plain:,.0f}", f"{captured:,.0f}", spread(load.ratios()),
        spread(load.ratios("whole")) if drained else "", spread(load.ratios("cpu_s")), spread(load.ratios("server_cpu")),
        f"{statistics.median(load.speeds()):.2f}", spread(load.shares()) if load.alone_s else "",
        f"{load.client_cores():.2f}" if drained else "", f"{load.ring_full_ms:,}",
        f"{load.memory_growth_mib:.1f}", "{:.0f}, {:.0f}".format(*load.batch_ms()) if load.batch_ms() else "",
        (load.date + load.of_another_source(run)).removeprefix(", "),
    )  # fmt: skip


def tables(results: Results) -> str:
    """Return every run's tables."""
    head = _head(
        "load", "prompts", "n", "plain, tokens/s", "captured, tokens/s", "ratio, into the spool (spread)", "ratio, published (spread)",
        "schedulers' CPU a token, ratio (spread)", "with the writing process, ratio (spread)", "GB/s to where it ends",
        "of the disk alone (spread)", "client's cores for each GB/s", "forward waited for the ring, ms", "memory grown, MiB", "ms a batch, plain and captured", "ended",
    )  # fmt: skip
    parts = []
    for key, run in sorted(results.runs.items()):
        rows = [row(name, load, run) for name, load in run.loads.items() if load.turns]
        made = f"SGLang {run.versions['sglang']}, torch {run.versions['torch']}, hsnb source {run.versions['hsnb source']}"
        parts.append(f"### {key}\n\n{run.card}, {run.cores} cores, {run.date}, {made}\n\n")
        parts.append(head + "\n".join(rows) + "\n\n" if rows else "")
        parts.append("| ceiling | GB/s |\n| --- | --- |\n" + "".join(f"| {k} | {v:.2f} |\n" for k, v in run.ceilings.items()) + "\n")
    return "".join(parts)


def client_tables(results: drain_results.DrainResults) -> str:
    """Return every run of the client's drain."""
    parts = []
    for key, run in sorted(results.runs.items()):
        parts.append(
            f"### {key}\n\n{run.cores} cores, {run.threads} threads that publish, {run.date}, hsnb source {run.versions['hsnb source']}\n\n"
        )
        parts.append(_head("spool to output", "dumps", "n", "cores for each GB/s (spread)", "GB/s (spread)"))
        for name, case in run.cases.items():
            parts.append(_cells(name, case.dumps, str(len(case.turns)), spread(case.values("cores")), spread(case.values("rate"))) + "\n")
        parts.append("\n")
    return "".join(parts)


def others_tables(results: others_results.Others) -> str:
    """Return hsnb beside the other ways."""
    parts = []
    for name, part in results.parts.items():
        first = next(iter(part.ways))
        parts.append(f"**{name}**: {part.work}; {part.date}, hsnb source {part.versions['hsnb source']}\n\n")
        against = f"of {first}'s (spread)"
        parts.append(_head("way", "n", "until the forward goes on, s", against, "until all is written, s", against, "CPU, s", against))
        for way, samples in part.ways.items():
            values = [str(len(samples))]
            for of in ("stood_s", "seconds", "cpu_s"):
                values += [f"{part.median(way, of):.3f}", spread(part.ratios(way, of))]
            parts.append(_cells(way, *values) + "\n")
        parts.append("\n")
    return "".join(parts)


def grow_tables(found: grow_results.Grow) -> str:
    """Return what a token and a sample cost as the work grows."""
    parts = []
    if found.writer:
        parts.append(f"The writer, {_made(found, 'writer')}:\n\n")
        parts.append(
            _head("prompts of, tokens", "n", "writer's CPU, us a token (spread)", "wall, us a token (spread)", "memory, MiB (spread)")
        )
        for one in found.writer:
            us = [spread([1e6 * s for s in values]) for values in (one.cpu_s, one.seconds)]
            parts.append(_cells(f"{one.tokens:,}", str(len(one.seconds)), *us, spread(one.memory_mib)) + "\n")
        parts.append("\n")
    if found.client:
        parts.append("Whole extractions:\n\n")
        names = (
            "samples",
            "a second (wall clock)",
            "CPU seconds of a thousand (spread)",
            "of the second thousand",
            "of the last",
            "memory after the second thousand, MiB",
            "at the end",
            "measured",
        )
        parts.append(_head(*names))
        for count, one in sorted(found.client.items()):
            seconds = (spread(one.seconds), f"{one.seconds[1]:.2f}", f"{one.seconds[-1]:.2f}") if len(one.seconds) > 1 else ("", "", "")
            memory = (f"{one.memory_mib[min(2, len(one.memory_mib) - 1)]:.0f}", f"{one.memory_mib[-1]:.0f}")
            parts.append(_cells(f"{count:,}", f"{one.rate:.0f}", *seconds, *memory, _made(found, f"client {count}")) + "\n")
        parts.append("\n")
    if one := found.server:
        parts.append(f"A real server, {one.work}, {_made(found, 'server')}; memory of scheduler and writing process, wall clock:\n\n")
        parts.append(_head("requests", "seconds of the last thousand", "memory, MiB"))
        for n, held in enumerate(one.memory_mib):
            parts.append(_cells(f"{1000 * n:,}", f"{one.seconds[n - 1]:.1f}" if n else "", f"{held:.1f}") + "\n")
        parts.append("\n")
    return "".join(parts)


def _made(found: grow_results.Grow, part: str) -> str:
    made = found.made.get(part)
    return f"{made.date}, hsnb source {made.versions['hsnb source']}" if made else "with an older source, not recorded"


def parts_table(found: parts_results.Parts) -> str:
    """Return what each part costs."""
    rows = []
    for key, values in found.parts.items():
        name, _, unit = key.removesuffix("]").rpartition(" [")
        rows.append(_cells(name, unit, str(len(values)), spread(values)) + "\n")
    about = f"{found.cores} cores, {found.date}, hsnb source {found.versions['hsnb source']}\n\n" if rows else ""
    return about + _head("part", "unit", "n", "CPU time (spread)") + "".join(rows) + "\n"


def beside(results: others_results.Others) -> str:
    """Return the README's short table: the medians of what each way takes, hsnb's or plain prefill's taken as 1."""
    parts = []
    for name, part in results.parts.items():
        parts.append(_head(f"{name} (the first is 1)", "until the forward goes on", "until all is written", "CPU"))
        for way in part.ways:
            parts.append(_cells(way, *(f"{statistics.median(part.ratios(way, of)):.2f}" for of in ("stood_s", "seconds", "cpu_s"))) + "\n")
        parts.append("\n")
    return "".join(parts)


def _cells(*values: str) -> str:
    return "| " + " | ".join(values) + " |"


def _head(*names: str) -> str:
    return f"{_cells(*names)}\n{_cells(*['---'] * len(names))}\n"


def put(page: Path, mark: str, text: str) -> None:
    """Replace what stands between two marks of a page."""
    begin, end = MARKS[mark]
    before, rest = page.read_text().split(begin)
    page.write_text(before + begin + text + end + rest.split(end)[1])


def keep_gpu(results: Results) -> None:
    """Put the ratios of each card into gpu-results.json, as `make gpu` would have."""
    published = GpuResults.read(PUBLISHED)
    for key in set(results.runs) & set(published.runs):
        run = results.runs[key]
        found = figures(run)
        state = "ok" if all(f.ok for f in found) else "off"
        seconds = sum(t.drained_s or t.published_s for load in run.loads.values() for t in (*load.plain, *load.captured))
        step = Step(title=TITLE, state=state, date=run.date, seconds=seconds, source=run.versions["hsnb source"], figures=found)
        published = published.with_step(key, published.runs[key], "speed", step)
    published.write(PUBLISHED)
    PUBLISHED.with_suffix(".md").write_text(page(published))


def main() -> int:
    """Replace every table, and the GPUs' page; return 0."""
    docs = PAGE.parent
    keep_gpu(Results.read(docs / FILE))
    put(PAGE, "server", tables(Results.read(docs / FILE)))
    put(PAGE, "client", client_tables(drain_results.DrainResults.read(docs / drain_results.FILE)))
    put(PAGE, "others", others_tables(others_results.Others.read(docs / others_results.FILE)))
    put(README, "others", beside(others_results.Others.read(docs / others_results.FILE)))
    put(PAGE, "parts", parts_table(parts_results.Parts.read(docs / parts_results.FILE)))
    put(PAGE, "grow", grow_tables(grow_results.Grow.read(docs / grow_results.FILE)))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
