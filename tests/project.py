"""A copy of the project's tree to run notebooks in, so that a test leaves nothing in the user's outputs/."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.helpers import prompt_ids

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def make_project(folder: Path) -> Path:
    """Copy notebooks/ and params/ to `folder`; .venv is a link to the one that runs the tests."""
    for name in ("notebooks", "params"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    (folder / "outputs").mkdir()
    (folder / ".venv").symlink_to(BIN.parent)
    if (ROOT / ".venv-vllm").exists():
        (folder / ".venv-vllm").symlink_to((ROOT / ".venv-vllm").resolve())
    return folder


def tiny_params(project: Path, samples: int, tokens: int, name: str = "tiny") -> Path:
    """Write params/{name}.yaml for the tiny model in float32 over `samples` samples of about `tokens` token ids."""
    data = project / f"{name}.jsonl"
    with open(data, "w") as out:
        for n in range(samples):
            ids = prompt_ids(tokens + n % 7, 500, seed=n)
            out.write(json.dumps({"input_ids": ids, "loss_mask": [0, *[1] * (len(ids) - 1)]}) + "\n")
    tree = {
        "name": name,
        "model": "demo:tiny-deepseek",
        "server": {"device": "cpu", "dtype": "float32"},
        "capture": {"boundaries": [2, 4, 6]},
        "data": {"source": str(data)},
    }
    (project / "params" / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    return project / "params" / f"{name}.yaml"


def environment() -> dict[str, str]:
    """Return the environment of a user's shell in the copy: nothing of this process's project."""
    return {k: v for k, v in os.environ.items() if k != "HSNB_ROOT" and not k.startswith("PYTEST")}


def shell(*command: str | Path, cwd: Path, timeout: float = 600, **options) -> subprocess.CompletedProcess:
    """Run a command as a user would; its output is text."""
    return subprocess.run([str(c) for c in command], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, **options)
