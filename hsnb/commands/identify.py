"""`hsnb identify`: which boundaries a folder holds, and which ones a drafter would be fed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hsnb.divergence.identify import identify
from hsnb.drafter.config import ENGINES, Fed, fed
from hsnb.errors import HsnbError, ParamsError
from hsnb.params import read_config
from hsnb.trainers import open_folder


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="", help="training files of any tool, or a spool")
    parser.add_argument("--model", default="", metavar="DIR", help="the model that they are states of (default: what the folder says)")
    parser.add_argument("--drafter", default="", metavar="DIR", help="an EAGLE-3 drafter: say what engines would feed it")
    parser.add_argument(
        "--server", default="", metavar="URL", help="a running server as the reference, for a model too large for transformers"
    )
    parser.add_argument("--spool", default="", metavar="DIR", help="that server's spool (default: /dev/shm/hsnb/{port})")
    parser.add_argument("--sglang", default=ENGINES["sglang"], metavar="VERSION", help="the SGLang that will serve (default: %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if not (args.folder or args.drafter):
        raise ParamsError(
            got="neither a folder nor --drafter", expected="at least one", likely="an argument left out", next="hsnb identify DIR --model M"
        )
    model = _model(args)
    answer: dict[str, Any] = {"ok": True, "said": []}
    found = identify(Path(args.folder).expanduser(), model, server_url=args.server, spool=args.spool) if args.folder else None
    if found:
        answer |= {**found.as_dict(), "text": found.text()}
    if args.drafter:
        _add_drafter(answer, args, model, found)
    return answer


def _model(args: argparse.Namespace) -> Path:
    name = args.model or (open_folder(args.folder).claims.get("model") if args.folder else "") or ""
    if not name:
        raise ParamsError(
            got="no --model",
            expected="the folder of the model",
            likely="a folder that does not say whose states it holds",
            next="--model DIR",
        )
    from hsnb.demo import model_at

    return model_at(name)


def _add_drafter(answer: dict[str, Any], args: argparse.Namespace, model: Path, found) -> None:
    feeds, lines = {}, []
    for engine, version in (("sglang", args.sglang), ("vllm", ENGINES["vllm"])):
        try:
            said: Fed = fed(args.drafter, engine, version, target_config=read_config(model))
        except HsnbError as error:
            feeds[engine] = {"error": str(error)}
            answer["ok"] = answer["ok"] and engine != "sglang"  # the engine that it is to be served by
            lines.append(f"{engine} {version}: {error}")
            continue
        feeds[engine] = said.as_dict()
        lines.append(f"{engine} {version} would feed this drafter the boundaries {list(said.boundaries)} ({said.why}).")
        if found and None not in found.boundaries and tuple(found.boundaries) != said.boundaries:
            lines.append(
                f"That is not what the folder holds, {list(found.boundaries)}: trained on it, the drafter would see other layers there."
            )
            answer["ok"] = answer["ok"] and engine != "sglang"
    answer["fed"] = feeds
    answer["said"] = [*answer["said"], *lines]
    answer["text"] = "\n".join([*([answer["text"]] if "text" in answer else []), *lines])


def text(answer: dict[str, Any]) -> str:
    return answer["text"]
