"""`hsnb drafter`: convert a trained drafter for SGLang, check what it would be fed (or is), predict its accept length."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hsnb.demo import model_at
from hsnb.drafter.config import ENGINES, fed, read_drafter
from hsnb.errors import BoundaryError
from hsnb.params import read_config

_TEACHER_ROWS = 8  # answers that are looked at, whether they are the target's own


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    convert = _action(actions, "convert", "write a trained drafter (speculators, SpecForge's export) as SGLang loads it")
    convert.add_argument("drafter", type=Path, help="the trained drafter's folder")
    convert.add_argument("out", type=Path, help="the folder to write")
    _about(convert)
    convert.add_argument(
        "--sglang", default=ENGINES["sglang"], metavar="VERSION", help="the version that will serve (default: %(default)s)"
    )
    convert.add_argument("--dtype", default="bfloat16", help="the target's dtype at serving (default: %(default)s)")
    convert.set_defaults(action=_convert)

    check = _action(actions, "check", "say which boundaries an engine feeds to a drafter, from its config or from a running server")
    check.add_argument("drafter", type=Path, help="the drafter's folder, as it will be served")
    _about(check)
    check.add_argument("--engine", default="sglang", choices=sorted(ENGINES), help="who will serve it (default: %(default)s)")
    check.add_argument("--version", default="", help="the engine's version (default: the one that was read)")
    check.add_argument(
        "--report", type=Path, metavar="DIR", help="what a server with SGLANG_HS_DRAFTER_DIR=DIR wrote: ask that one instead"
    )
    check.set_defaults(action=_check)

    accept = _action(actions, "accept", "predict the accept length of greedy serving from a folder of states of the target's own answers")
    accept.add_argument("drafter", type=Path, help="the drafter's folder, trained or converted")
    accept.add_argument("states", type=Path, help="a folder of states in speculators' layout, its answers the target's greedy ones")
    _about(accept, states=False)
    accept.add_argument("--steps", type=int, default=3, metavar="N", help="drafts a verification (default: %(default)s)")
    accept.add_argument("--limit", type=int, default=0, metavar="N", help="at most so many answers (default: all)")
    accept.set_defaults(action=_accept)


def run(args: argparse.Namespace) -> dict[str, Any]:
    return args.action(args)


def text(result: dict[str, Any]) -> str:
    return result["text"]


def _action(actions, name: str, help: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object on stdout")
    return parser


def _about(parser: argparse.ArgumentParser, *, states: bool = True) -> None:
    """Add the options that say what a drafter was trained on and for."""
    parser.add_argument("--target", type=model_at, metavar="DIR", help="the target model's folder, or demo:NAME (default: the states' own)")
    parser.add_argument("--boundaries", type=int, nargs="+", default=[], metavar="K", help="the boundaries it was trained on")
    if states:
        parser.add_argument("--states", type=Path, metavar="DIR", help="the folder it was trained on: its hsnb.json names both")


def _known(args: argparse.Namespace) -> tuple[Path, tuple[int, ...]]:
    """Return (the target's folder, the boundaries, () when nobody said). Raises BoundaryError when no target is named."""
    if args.states:
        from hsnb.drafter.states import open_states

        states = open_states(args.states, boundaries=args.boundaries, model=args.target or "")
        return states.model, states.boundaries
    if not args.target:
        raise BoundaryError(
            got="neither --target nor --states",
            expected="the target model: its layers and family decide which ids mean which boundaries",
            likely="it was left out",
            next="--target MODEL, or --states outputs/RUN/data",
        )
    return args.target, tuple(sorted(args.boundaries))


def _convert(args: argparse.Namespace) -> dict[str, Any]:
    from hsnb.drafter.convert import convert

    target, boundaries = _known(args)
    got = convert(args.drafter, args.out, target=target, sglang=args.sglang, dtype=args.dtype, boundaries=boundaries)
    flags = " ".join(f"--{name} {value}" for name, value in got.flags().items())
    lines = [
        f"{got.path}: boundaries {list(got.boundaries)}, written as {list(got.ids)} for SGLang {got.sglang} ({got.family}); {got.bytes:,} bytes",
        f"serve it with: {flags}",
    ]
    return {**got.as_dict(), "flags": got.flags(), "text": "\n".join(lines)}


def _check(args: argparse.Namespace) -> dict[str, Any]:
    target, boundaries = _known(args)
    if args.report:
        from hsnb.drafter.served import check_served

        wanted = boundaries or fed(args.drafter, "sglang", args.version, target_config=read_config(target)).boundaries
        checks = check_served(args.report, args.drafter, wanted)
        lines = [f"{c.name}: {c.value}, expected {c.threshold}: {c.result}" for c in checks]
        return {"ok": all(c.ok for c in checks), "checks": [c.as_dict() for c in checks], "text": "\n".join(lines)}
    got = fed(read_drafter(args.drafter), args.engine, args.version, target_config=read_config(target))
    right = not boundaries or got.boundaries == boundaries
    lines = [f"{args.engine} {got.version} feeds it boundaries {list(got.boundaries)}: {got.why}"]
    if boundaries:
        lines.append(f"trained on {list(boundaries)}: " + ("the same" if right else "NOT the same"))
    return {"ok": right and got.loads, **got.as_dict(), "trained_on": list(boundaries), "text": "\n".join(lines)}


def _accept(args: argparse.Namespace) -> dict[str, Any]:
    from hsnb.drafter.accept import accept
    from hsnb.drafter.states import open_states
    from hsnb.drafter.teacher import RIGHT_BAR, teacher_top1

    states = open_states(args.states, model=args.target or "")
    got = accept(args.drafter, states, boundaries=args.boundaries, steps=args.steps, limit=args.limit)
    lines, taught = [f"{got.text()}; fed with boundaries {list(got.boundaries)}"], None
    if states.final == "pre":
        taught = teacher_top1(states, limit=min(args.limit or _TEACHER_ROWS, _TEACHER_ROWS)).right
        if taught < RIGHT_BAR:
            lines.append(f"teacher top-1 is {taught:.2f}: these are not the target's greedy answers, and serving will show another number")
    return {**got.as_dict(), "teacher_top1": taught, "text": "\n".join(lines)}
