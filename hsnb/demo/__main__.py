"""`make demo`: model, server, probe, shard 0 extracted, reports; ends with a table of what was measured."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hsnb.errors import HsnbError
from hsnb.params import Deployment
from hsnb.paths import run_dir

RUN, SHARD = "demo", 0


def main() -> int:
    """Run the notebooks on one server and print the table; return 1 when one of them failed, 2 when the server did not start."""
    from hsnb.report import report_run
    from hsnb.run import run_notebook
    from hsnb.server import Server
    from hsnb.session import starting

    before = time.monotonic()
    deployment = Deployment.load("params/demo.yaml")
    say(f"model: {deployment.model} in {deployment.model_path()}")
    folder = run_dir(RUN)
    results = []
    with starting() as tell:
        server = Server.start(deployment, log_dir=folder, progress=tell)
    with server:
        say(f"server: {server.url}, ready after {server.startup_seconds:.0f} s")
        for name, own in (("00_server", {}), ("01_probe", {}), ("03_extract", {"shard": SHARD})):
            say(f"{name}: running" + (" (a minute or two: 128 samples)" if name == "03_extract" else ""))
            results.append(run_notebook(name, {"run": RUN, "server_url": server.url, **own}))
            say(f"{name}: {'ok' if results[-1].ok else 'FAILED'} in {results[-1].seconds:.0f} s")
            if not results[-1].ok:
                break
    index = report_run(RUN).index
    print(table(folder, results, index, time.monotonic() - before))
    return 0 if all(r.ok for r in results) else 1


def table(folder: Path, results: list, index: Path, seconds: float) -> str:
    """Return the closing table, from what the notebooks wrote."""
    rows: list[tuple[str, str]] = []
    facts = [p for p in folder.glob(f"shard-{SHARD:04d}*.json") if p.name in (f"shard-{SHARD:04d}.json", f"shard-{SHARD:04d}.again.json")]
    shard = _read(max(facts, key=lambda p: p.stat().st_mtime)) if facts else {}  # a run with nothing to do is written beside
    if shard:
        rate = (
            f"{shard['tokens_per_s']:,.0f} (server's start not counted)"
            if shard["new_tokens"]
            else "none extracted now: all were done before"
        )
        rows += [
            ("samples", f"{shard['samples'] - len(shard['failed']):,} of {shard['samples']:,} ({shard['done_before']:,} done before)"),
            ("tokens", f"{shard['tokens']:,}"),
            ("bytes", f"{shard['bytes']:,} ({shard['bytes'] / 1e6:.1f} MB)"),
            ("tokens/s", rate),
        ]
    probe = _read(folder / "probe.json")
    if probe:
        passed = sum(c["ok"] for c in probe["checks"])
        rows.append(("probe", f"{probe['verdict']}, {passed} of {len(probe['checks'])} checks"))
    rows += [(f"failed: {r.notebook.stem}", r.error or "see its report") for r in results if not r.ok]
    rows += [("states", str(folder / "data" / "hidden_states")), ("reports", str(index))]
    rows += [("", str(r.html)) for r in results if r.html]
    rows.append(("time", f"{seconds:.0f} s"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", *(f"{name:<{width}}  {value}" for name, value in rows)])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HsnbError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: nothing is lost, make demo goes on where it stopped", file=sys.stderr)
        sys.exit(130)
