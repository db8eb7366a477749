"""papermill's engine `hsnb`: parameters are checked before a kernel starts, and every run leaves an HTML report.

`papermill 03_extract.ipynb --p shard 4` is the line people type. papermill (read in 2.7.0) loads engines while it is imported,
before click looks at sys.argv; so when the running program is papermill and the notebook is one of ours, the line is
completed here: `--p` becomes `-p`, the engine is named, and the output goes to outputs/{run}/. Any other line is left as it is.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsnb import notebook
from hsnb.errors import HsnbError
from hsnb.keep import finish, output_for
from hsnb.progress import mirror

# How many words each option of papermill 2.7.0 takes (0 for those not listed); a test compares this with click's own table.
ARITY = {
    **dict.fromkeys(("-p", "--parameters", "--p", "-r", "--parameters_raw"), 2),
    **dict.fromkeys(("-f", "--parameters_file", "-y", "--parameters_yaml", "-b", "--parameters_base64"), 1),
    **dict.fromkeys(("--engine", "--autosave-cell-every", "-k", "--kernel", "-l", "--language", "--cwd"), 1),
    **dict.fromkeys(("--stdout-file", "--stderr-file", "--log-level"), 1),
    **dict.fromkeys(("--start-timeout", "--start_timeout", "--execution-timeout"), 1),
}
INJECTED_PATHS = {"PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"}  # papermill's --inject-paths


class HsnbEngine:
    """papermill's stock engine with a check before it and a report after it.

    It calls NBClientEngine instead of being one: papermill.engines loads this class while it is itself half imported, so a
    module that needs papermill.engines at its top could never be the one imported first.
    """

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, output_path: str | None = None, **kwargs: Any) -> Any:
        """Check the parameters, run `nb`, and write its report, whether it fails or not.

        Raises ParamsError before the output is written or a kernel started. An error inside a cell is left in `nb`, as
        papermill wants it; only a dead kernel, a timeout or an interrupt is raised.
        """
        from papermill.engines import NBClientEngine
        from papermill.iorw import write_ipynb

        from hsnb.report import error_line

        source = _absolute(kwargs.get("input_path") or "-")
        name = notebook.stem(source)
        with _project(project_of(source)):
            given = {key: value for key, value in nb.metadata.papermill["parameters"].items() if key not in INJECTED_PATHS}
            notebook.check(name, {**notebook.cell_values(nb, name), **given})
            # ipykernel 7 warns at each start that others on this machine might listen on its loopback sockets, as every Jupyter's.
            kwargs.setdefault("extra_arguments", ["--IPKernelApp.log_level=40"])
            html = _html_path(nb.metadata.papermill.get("output_path"))
            if html is not None:
                html.unlink(missing_ok=True)  # a run that is killed must not keep the report of an earlier one
                if is_papermill(sys.argv, sys.orig_argv):  # it writes once more after this; hsnb run does it itself
                    atexit.register(finish, html.with_suffix(".ipynb"), time.time())
            try:
                with mirror():
                    return NBClientEngine.execute_notebook(nb, kernel_name, output_path=output_path, **kwargs)
            except BaseException as error:
                # papermill leaves a cell whose kernel died marked "completed", so the file alone would look like a success.
                nb.metadata["hsnb"] = {"error": error_line(type(error).__name__, str(error))}
                if output_path:
                    write_ipynb(nb, output_path)
                raise
            finally:
                if html is not None:
                    _report(nb, html)

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> str:
        """Return the kernel's name, as papermill does."""
        from papermill.utils import nb_kernel_name

        return nb_kernel_name(nb, name)

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> str:
        """Return the notebook's language, as papermill does."""
        from papermill.utils import nb_language

        return nb_language(nb, language)


def _absolute(path: str) -> Path:
    """Return `path` as papermill reads it: with --cwd the process has changed folder, papermill's files have not."""
    from papermill.iorw import papermill_io

    handler = papermill_io.get_handler("local")
    base = handler.cwd(None)
    handler.cwd(base)
    return Path(base or ".").absolute() / path


def _html_path(output: str | None) -> Path | None:
    local = output is not None and output.endswith(".ipynb") and "://" not in output
    return _absolute(output).with_suffix(".html") if local else None


def _report(nb: Any, html: Path) -> None:
    """Write the report; one that cannot be written must not take hours of extraction down with it."""
    from papermill.log import logger

    from hsnb.report import write_html

    try:
        logger.info(f"Report:          {write_html(nb, html)}")
    except Exception as error:
        logger.error(f"Report not written: {type(error).__name__}: {error}")


@contextlib.contextmanager
def _project(root: Path | None) -> Iterator[None]:
    """Let this process and the kernel agree on the project: the one the notebook lies in, wherever the shell is."""
    if root is None or "HSNB_ROOT" in os.environ:
        yield
        return
    os.environ["HSNB_ROOT"] = str(root)
    try:
        yield
    finally:
        del os.environ["HSNB_ROOT"]


def project_of(path: str | Path) -> Path | None:
    """Return the project that the notebook at `path` belongs to (HSNB_ROOT if it is set); None for a notebook not ours."""
    file = Path(path).expanduser().absolute()
    folder = file.parent.resolve()
    ours = file.suffix == ".ipynb" and file.stem in notebook.TABLE and folder.name == "notebooks" and (folder.parent / "params").is_dir()
    return (Path(os.environ.get("HSNB_ROOT") or folder.parent)).resolve() if ours else None


@dataclass(frozen=True)
class Line:
    """A papermill command line, cut as click cuts it: options are (index, name, values)."""

    positionals: list[int]
    options: list[tuple[int, str, list[str]]]

    def values(self, *names: str) -> list[list[str]]:
        """Return the values of every option called one of `names`, in order; an option whose values were cut off is left out."""
        return [values for _, name, values in self.options if name in names and len(values) == ARITY[name]]

    def has(self, option: str) -> bool:
        """Tell whether `option` is on the line."""
        return any(name == option for _, name, _ in self.options)


def read_line(args: Sequence[str]) -> Line:
    """Cut `args` (without the program) into positionals and options; unknown options count as flags, click will refuse them."""
    line, i = Line([], []), 0
    while i < len(args):
        word = args[i]
        if word == "--":
            line.positionals.extend(range(i + 1, len(args)))
            break
        if not word.startswith("-") or word == "-":
            line.positionals.append(i)
            i += 1
            continue
        if word.startswith("--"):
            name, equals, rest = word.partition("=")
            have = [rest] if equals else []
        else:  # -p a b, -pa b, and flags before it: -hp a b
            at = next((k for k in range(1, len(word)) if "-" + word[k] in ARITY), 1)
            name, have = "-" + word[at], [word[at + 1 :]] if word[at + 1 :] else []
        more = max(ARITY.get(name, 0) - len(have), 0)
        line.options.append((i, name, [*have, *args[i + 1 : i + 1 + more]]))
        i += 1 + more
    return line


def given_parameters(line: Line) -> dict[str, Any]:
    """Return the parameters a line gives, in papermill's order; what cannot be read is left out (papermill reports it)."""
    import yaml
    from papermill.iorw import NoDatesSafeLoader, read_yaml_file

    def parse(text: str | bytes) -> Any:
        return yaml.load(text, Loader=NoDatesSafeLoader)

    sources = [(lambda v=v: parse(base64.b64decode(v))) for (v,) in line.values("-b", "--parameters_base64")]
    sources += [(lambda v=v: read_yaml_file(v)) for (v,) in line.values("-f", "--parameters_file")]
    sources += [(lambda v=v: parse(v)) for (v,) in line.values("-y", "--parameters_yaml")]
    merged: dict[str, Any] = {}
    for read in sources:
        with contextlib.suppress(OSError, ValueError, TypeError, yaml.YAMLError):
            merged.update(read() or {})
    for name, text in line.values("-p", "--parameters", "--p"):
        merged[name] = int(text) if text.removeprefix("-").isdecimal() else text
    return merged | dict(line.values("-r", "--parameters_raw"))


def output_path(root: Path, source: Path, given: dict[str, Any]) -> Path:
    """Return outputs/{run}/{name}.ipynb, or a name beside it when a good run is there. A run or shard that is not valid gives the default's
    name: the engine refuses it."""
    import nbformat

    name = notebook.stem(source)
    known = notebook.declared(name)
    with contextlib.suppress(OSError, ValueError, HsnbError):  # a default edited in the notebook counts
        known |= notebook.cell_values(nbformat.read(source, as_version=4), name)
    run, shard = given.get("run", known["run"]), given.get("shard", known.get("shard"))
    if not isinstance(run, str) or run != Path(run).name or run.startswith(".") or not run:
        run = notebook.declared(name)["run"]
    shard = shard if type(shard) is int and shard >= 0 else 0
    return output_for(root / "outputs" / run / notebook.output_name(name, {"shard": shard}))


def complete(args: Sequence[str]) -> list[str]:
    """Return the line with --p as -p, --engine hsnb and the output path; unchanged unless its notebook is ours."""
    line, words = read_line(args), list(args)
    source = Path(args[line.positionals[0]]) if line.positionals else Path()
    root = project_of(source)
    if root is None:
        return words
    for i, name, _ in line.options:
        if name == words[i] == "--p":
            words[i] = "-p"
    if len(line.positionals) == 1:
        # Two paths also keep a pipe and a terminal alike: with a piped stdin papermill takes a lone path for the output's.
        output = output_path(root, source, given_parameters(line))
        if line.has("--prepare-only"):  # no engine runs, and papermill makes no folder
            output.parent.mkdir(parents=True, exist_ok=True)
        words.insert(line.positionals[0] + 1, str(output).replace("{", "{{").replace("}", "}}"))  # papermill formats paths
    return words if line.has("--engine") else ["--engine", "hsnb", *words]


def is_papermill(argv: Sequence[str], orig_argv: Sequence[str]) -> bool:
    """Tell whether this process is the papermill program: its script, or `python -m papermill`."""
    if argv and argv[0] == "-m":  # runpy imports the package before it puts the file's name into sys.argv[0]
        before = orig_argv[: len(orig_argv) - len(argv) + 1]
        return list(before[-2:]) == ["-m", "papermill"] or list(before[-1:]) == ["-mpapermill"]
    program = Path(argv[0]) if argv else Path()
    return program.name in ("papermill", "papermill.exe") or program.parts[-2:] == ("papermill", "__main__.py")


def _plain_errors() -> None:
    """Show an HsnbError of the papermill program, or of a cell that it ran, as its one line (the exit status stays 1)."""
    previous = sys.excepthook

    def line_of(value: BaseException) -> str:
        """Return the error's own line, "" for one that is not hsnb's: then the traceback is wanted."""
        if isinstance(value, HsnbError):
            return str(value)
        from hsnb.report.outcome import error_line, parts_of

        line = error_line(getattr(value, "ename", ""), getattr(value, "evalue", ""))  # papermill's PapermillExecutionError has both
        return line if parts_of(line) else ""

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if line := line_of(value):
            sys.stderr.write(f"{line}\n")
        else:
            previous(kind, value, trace)

    sys.excepthook = hook


if is_papermill(sys.argv, sys.orig_argv):
    sys.argv[1:] = complete(sys.argv[1:])
    _plain_errors()
