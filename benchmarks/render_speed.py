"""Write the tables of docs/performance.md from docs/speed-results.json: python -m benchmarks.render_speed."""

from __future__ import annotations

import statistics
import sys

from benchmarks.gpu_site import ROOT
from benchmarks.speed_results import FILE, Load, Results

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- tables: make bench -->\n", "<!-- end of tables -->"


def spread(values: list[float]) -> str:
    """Return "median (smallest to largest)"."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def row(name: str, load: Load) -> str:
    """Return one load as a row."""
    plain, captured = (statistics.median(t.rate for t in turns) for turns in (load.plain, load.captured))
    cells = [
        name, load.prompts, str(load.turns), f"{plain:,.0f}", f"{captured:,.0f}", spread(load.ratios()), spread(load.ratios("cpu_s")),
        f"{captured * load.token_bytes / 1e9:.2f}", f"{load.ring_full_ms:,}", f"{load.memory_growth_mib:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def tables(results: Results) -> str:
    """Return every run's tables."""
    head = (
        "| load | prompts | n | plain, tokens/s | captured, tokens/s | ratio (spread) | schedulers' CPU a token, ratio (spread)"
        " | GB/s into the spool | forward waited for the ring, ms | memory grown, MiB |\n" + "| --- " * 10 + "|\n"
    )
    parts = []
    for key, run in sorted(results.runs.items()):
        rows = [row(name, load) for name, load in run.loads.items() if load.turns]
        parts.append(f"### {key}\n\n{run.card}, {run.cores} cores, {run.date}, hsnb source {run.versions['hsnb source']}\n\n")
        parts.append(head + "\n".join(rows) + "\n\n" if rows else "")
        parts.append("| ceiling | GB/s |\n| --- | --- |\n" + "".join(f"| {k} | {v:.2f} |\n" for k, v in run.ceilings.items()) + "\n")
    return "".join(parts)


def main() -> int:
    """Replace what stands between the two marks; return 0."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + tables(Results.read(PAGE.with_name(FILE))) + END + after)
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
