"""Run a notebook through papermill, or one after the other for a range of shards: `hsnb run`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsnb import notebook as contract
from hsnb.errors import ParamsError
from hsnb.paths import project_root

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """What one run left: the executed notebook, its report, and whether every cell passed."""

    notebook: Path
    html: Path | None  # None: the report could not be written
    ok: bool
    error: str  # the failed cell's error in one line, or ""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json."""
        return asdict(self) | {"notebook": str(self.notebook), "html": str(self.html) if self.html else None}


def run_notebook(name_or_path: str | Path, parameters: Mapping[str, Any], *, cwd: str | Path | None = None) -> RunResult:
    """Run one notebook into outputs/{run}/ and render its report.

    The kernel starts in `cwd` (the current folder by default, as under papermill). Raises ParamsError before a kernel starts;
    an error of the notebook itself is in the result.
    """
    from papermill import PapermillExecutionError, execute_notebook

    from hsnb.keep import finish
    from hsnb.papermill_engine import output_path, project_of
    from hsnb.report import error_line

    source = locate(name_or_path)
    contract.check(source, parameters)
    target = output_path(project_of(source) or project_root(source.parent), source, dict(parameters))
    html = target.with_suffix(".html")
    html.unlink(missing_ok=True)
    start, since = time.monotonic(), time.time()
    try:
        execute_notebook(
            _literal(source),
            _literal(target),
            dict(parameters),
            engine_name="hsnb",
            progress_bar=sys.stderr.isatty(),
            cwd=None if cwd is None else str(cwd),
        )
        error = ""
    except ParamsError:
        raise  # of the notebook's own parameters cell: the engine refused it, nothing ran
    except PapermillExecutionError as failure:
        error = error_line(failure.ename, failure.evalue)
    except Exception as failure:  # a dead kernel or a timeout: they leave an executed notebook too
        error = error_line(type(failure).__name__, str(failure))
    target = finish(target, since)
    html = target.with_suffix(".html")
    return RunResult(target, html if html.is_file() else None, not error, error, time.monotonic() - start)


def locate(name_or_path: str | Path) -> Path:
    """Return the notebook meant by "03_extract", "03_extract.ipynb" or a path; names are looked up in notebooks/."""
    name = contract.stem(name_or_path)
    typed = Path(name_or_path).expanduser()
    if typed.suffix == ".ipynb" and typed.is_file():
        return typed.resolve()
    file = project_root() / "notebooks" / f"{name}.ipynb"
    if typed.parent != Path() or not file.is_file():
        here = sorted(p.stem for p in file.parent.glob("*.ipynb"))
        raise ParamsError(
            got=f"no notebook {typed if typed.parent != Path() else file}",
            expected=f"one of: {', '.join(here) or 'none'} in {file.parent}",
            likely="a wrong path, or another clone",
            next=f"hsnb run {name}",
        )
    return file


def parse_shards(text: str) -> list[int]:
    """Return "0-15,20" as [0, 1, ..., 15, 20]. Raises ParamsError for anything else, and for a shard named twice."""
    shards: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise _bad_shards(text, f"{part!r} is no shard", "a typo")
        if dash and int(last) < int(first):
            raise _bad_shards(text, f"{part!r} counts down", "the ends were swapped")
        shards.extend(range(int(first), int(last if dash else first) + 1))
    if twice := sorted({shard for shard in shards if shards.count(shard) > 1}):
        raise _bad_shards(text, f"{', '.join(map(str, twice))} named twice", "ranges that overlap")
    return shards


def run_shards(name: str | Path, parameters: Mapping[str, Any], shards: Sequence[int], ray: str = "") -> list[RunResult]:
    """Run the notebook once per shard, going on after one that fails. All are checked before the first is run.

    `ray`: the address of a cluster whose nodes share the work; empty: here, one after the other.
    """
    if "shard" not in contract.declared(name) or "shard" in parameters:
        raise ParamsError(
            got=f"--shards with {'-p shard' if 'shard' in parameters else contract.stem(name)}",
            expected="03_extract, and the shards named once",
            likely="two ways of saying the same" if "shard" in parameters else "the wrong notebook",
            next="leave out one of the two" if "shard" in parameters else "hsnb run 03_extract --shards ...",
        )
    each = [{**parameters, "shard": shard} for shard in shards]
    for given in each:
        contract.check(name, given)
    if ray:
        from hsnb.cluster import run_on_cluster

        return run_on_cluster(locate(name), parameters, shards, ray)
    results = []
    for given in each:
        result = run_notebook(name, given)
        log.info(f"shard {given['shard']}: {'ok' if result.ok else result.error} ({result.seconds:.1f} s)")
        results.append(result)
    return results


def merge(files: Sequence[str], values: Sequence[tuple[str, str]], raw: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Return the parameters of -f, -p and -r, read as papermill reads them; later ones win. Raises ParamsError for a bad file."""
    import yaml
    from papermill.cli import _resolve_type
    from papermill.iorw import read_yaml_file

    merged: dict[str, Any] = {}
    for file in files:
        try:
            tree = read_yaml_file(file)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise _bad_file(file, " ".join(str(error).split()), "a wrong path, or a slip of the indentation") from error
        if not isinstance(tree, dict):
            raise _bad_file(file, f"a {type(tree).__name__}", "an empty file")
        merged.update(tree)
    return merged | {name: _resolve_type(value) for name, value in values} | dict(raw)


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hsnb run`."""
    parser.add_argument("notebook", metavar="NOTEBOOK", help="03_extract, 03_extract.ipynb or a path")
    parser.add_argument("-f", dest="files", metavar="YAML", action="append", default=[], help="a file of notebook parameters")
    parser.add_argument("-p", "--p", dest="values", nargs=2, metavar=("NAME", "VALUE"), action="append", default=[], help="a parameter")
    parser.add_argument("-r", dest="raw", nargs=2, metavar=("NAME", "TEXT"), action="append", default=[], help="one kept as text")
    parser.add_argument("--shards", metavar="0-15,20", help="run 03_extract for each of these shards")
    parser.add_argument(
        "--ray", metavar="ADDRESS", default="", help="with --shards: on the nodes of a Ray cluster (auto: the one of this machine)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do `hsnb run`: the results, the names of those that failed, and ok."""
    source = locate(args.notebook)
    parameters = merge(args.files, args.values, args.raw)
    one = args.shards is None
    if one and args.ray:
        raise ParamsError(got=f"--ray {args.ray} without --shards", expected="both", likely="one left out", next="--shards 0-15")
    results = [run_notebook(source, parameters)] if one else run_shards(source, parameters, parse_shards(args.shards), args.ray)
    failed = [result.notebook.stem for result in results if not result.ok]
    return {"ok": not failed, "failed": failed, "notebooks": [result.as_dict() for result in results]}


def text(result: dict[str, Any]) -> str:
    """Return what `hsnb run` prints."""
    lines = [f"{row['html'] or row['notebook']}  {row['seconds']:.1f} s{'  FAILED' * (not row['ok'])}" for row in result["notebooks"]]
    lines += [f"  {row['error']}" for row in result["notebooks"] if len(result["notebooks"]) == 1 and row["error"]]
    if result["failed"]:
        lines.append(f"{len(result['failed'])} of {len(result['notebooks'])} failed: {', '.join(result['failed'])}")
    return "\n".join(lines)


def _literal(path: Path) -> str:
    """Return `path` so that papermill, which formats paths with str.format, leaves it as it is."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _bad_shards(text: str, got: str, likely: str) -> ParamsError:
    return ParamsError(got=f"--shards {text}: {got}", expected="ranges and numbers such as 0-15,20", likely=likely, next="--shards 0-15")


def _bad_file(file: str, got: str, likely: str) -> ParamsError:
    return ParamsError(got=f"-f {file}: {got}", expected="a YAML file of NAME: VALUE lines", likely=likely, next="see papermill's -f")
