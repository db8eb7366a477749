"""Keep a good run's executed notebook and report when its shard is run again.

A shard that is whole may be run again to be sure, or by a slip, or with a server that fails. That run is written beside, as
{name}.again.ipynb, and takes the good one's place only when it did something: passed, and wrote the shard's JSON anew.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hsnb.shard import again, was_whole

MARK = ".again"
log = logging.getLogger(__name__)


def output_for(target: Path) -> Path:
    """Return where a run of the notebook that belongs at `target` is written."""
    return again(target) if (facts := _facts(target)) and was_whole(facts) and passed(target) else target


def promote(output: Path, since: float) -> Path:
    """Let a run that was written beside take the good one's place when it did something since `since` (seconds, epoch).

    Return where the executed notebook lies then. Call it when nothing writes to `output` any more.
    """
    if not output.stem.endswith(MARK):
        return output
    target = output.with_name(output.stem.removesuffix(MARK) + output.suffix)
    facts = _facts(target)
    if not facts or not facts.exists() or facts.stat().st_mtime < since or not passed(output):
        return output
    for suffix in (".html", output.suffix):
        if (made := output.with_suffix(suffix)).exists():
            made.replace(target.with_suffix(suffix))
    return target


def finish(output: Path, since: float) -> Path:
    """Do what comes after a run once nothing writes to `output` any more: `promote` it, and bring its run's index up to date.

    Return where the executed notebook lies. An index that cannot be written is told and takes no run down with it.
    """
    from hsnb.report.index import is_run, update_index

    target = promote(output, since)
    if is_run(target.parent):
        try:
            update_index(target.parent)
        except Exception as error:
            log.error(f"Index not written: {type(error).__name__}: {error}")
    return target


def passed(notebook: Path) -> bool:
    """Say whether an executed notebook ran to its end."""
    import nbformat

    from hsnb.report.outcome import Outcome

    try:
        return Outcome.of(nbformat.read(notebook, as_version=4)).status == "passed"
    except (OSError, ValueError, AttributeError, nbformat.ValidationError):  # none, half of one, or no notebook
        return False


def _facts(notebook: Path) -> Path | None:
    """Return the JSON of the shard that a notebook is of, None when it is of none: 03_extract-shard-0004 has shard-0004.json."""
    name, dash, number = notebook.stem.rpartition("-shard-")
    return notebook.with_name(f"shard-{number}.json") if dash and name else None
