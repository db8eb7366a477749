"""The command line. A subcommand is one line of COMMANDS; its module is imported when it is the one asked for.

The reference names a module, or "module:object", with `add(parser)`, which declares the arguments, and `run(args) -> dict`,
whose dict is the answer: printed as one JSON object with --json, through `text(dict) -> str` (optional) without. "ok": False in
it gives exit status 1; an HsnbError gives 2. run() prints nothing itself; what takes long is told through the logger "hsnb".
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hsnb.errors import HsnbError, ParamsError


@dataclass(frozen=True)
class Command:
    """One subcommand, for modules that hold several; a module that holds one can have the three functions itself."""

    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], dict[str, Any]]
    text: Callable[[dict[str, Any]], str] | None = None


COMMANDS: dict[str, tuple[str, str]] = {  # name: (help, reference)
    "serve": ("start a server; it runs until Ctrl-C, or with --detach until hsnb stop", "hsnb.server.commands:SERVE"),
    "stop": ("stop servers that hsnb started", "hsnb.server.commands:STOP"),
    "probe": ("probe a running server, or one started for it, and exit by the verdict", "hsnb.commands.probe"),
    "plan": ("say how large a run is, whether it fits here, and with --measure how long it takes", "hsnb.commands.plan"),
    "prepare": ("write a run's data set, every sample's row fixed, before any shard", "hsnb.commands.prepare"),
    "identify": ("say which boundaries a folder of training files holds, and what a drafter would be fed", "hsnb.commands.identify"),
    "export": ("write a folder of training files in another trainer's layout", "hsnb.commands.export"),
    "training": ("say how to train on a folder, and write its draft vocabulary", "hsnb.commands.training"),
    "drafter": ("convert a trained drafter for SGLang, check what it is fed, predict its accept length", "hsnb.commands.drafter"),
    "run": ("run a notebook, or one after the other for a range of shards", "hsnb.run"),
    "verify": ("re-check every file of a data set, checksums included, and exit by what was found", "hsnb.commands.verify"),
    "redo": ("extract what is owed: samples that failed, and those that verify took off", "hsnb.commands.redo"),
    "report": ("render a run's notebooks to HTML, with an index", "hsnb.report"),
}


class _Parser(argparse.ArgumentParser):
    """Says usage errors in four parts, like every other error."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> Any:
        raise ParamsError(
            got=message.replace("\n", " "),
            expected=" ".join(self.format_usage().split()).removeprefix("usage: "),
            likely="a typo, or an argument left out",
            next=f"{self.prog} --help",
        )


def load(reference: str) -> Any:
    """Import what a line of COMMANDS refers to."""
    module, _, name = reference.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; args.impl is the subcommand's. Only the module of the one asked for is imported. Raises ParamsError."""
    asked = next((word for word in argv if not word.startswith("-")), "")
    if asked and asked not in COMMANDS:
        near = difflib.get_close_matches(asked, COMMANDS, n=1)
        raise ParamsError(
            got=f"unknown command {asked!r}",
            expected=f"one of: {', '.join(COMMANDS)}",
            likely=f"a typo for {near[0]!r}" if near else "a command of another version",
            next=f"hsnb {near[0]}" if near else "hsnb --help",
        )
    parser = _Parser(prog="hsnb", description="Hidden states out of SGLang's own forward pass, proved and extracted from notebooks.")
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object on stdout, and nothing else there")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help, reference) in COMMANDS.items():
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object on stdout")
        if name == asked:
            impl = load(reference)
            impl.add(sub)
            sub.set_defaults(impl=impl)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hsnb argv...` and return the exit status: 0, 1 (done, and not all is well), 2 (refused), 130 (interrupted)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in argv
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("hsnb").setLevel(logging.INFO)
    try:
        args = parse(argv)
        # Libraries that print must not get into the JSON.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            result = args.impl.run(args)
    except HsnbError as error:
        if as_json:
            print(json.dumps({"error": {"type": type(error).__name__, **error.as_dict()}}))
        else:
            print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    text = getattr(args.impl, "text", None)
    print(json.dumps(result, default=str) if as_json or text is None else text(result))
    return 0 if result.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
