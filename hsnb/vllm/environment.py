"""Where vLLM is installed, and the environment variables that it is started with."""

from __future__ import annotations

import os
from pathlib import Path

from hsnb.errors import HsnbError, ServerError
from hsnb.paths import project_root

VARIABLE = "HSNB_VLLM_PYTHON"
NEXT = "make setup-vllm"


def vllm_python() -> Path:
    """Return the Python that has vLLM: HSNB_VLLM_PYTHON, else .venv-vllm of the project.

    Raises ServerError, one line, when there is none, or when `make setup-vllm` did not come to its end.
    """
    if given := os.environ.get(VARIABLE):
        python = Path(given).expanduser()
        if not os.access(python, os.X_OK) or python.is_dir():
            raise _missing(f"{VARIABLE}={given}: no Python there", "the variable names an environment that is gone")
        return python
    try:
        venv = project_root() / ".venv-vllm"
    except HsnbError as error:
        raise _missing("no vLLM environment: " + error.got, error.likely, f"{error.next}, or set {VARIABLE}") from error
    python = venv / "bin" / "python"
    if not python.exists():
        raise _missing(f"no vLLM environment at {venv}", "it was not made yet")
    if not (venv / ".ready").exists():
        raise _missing(f"the vLLM environment at {venv} is not whole", "make setup-vllm was interrupted")
    return python  # not resolved: a venv is found by the path of the link


def _missing(got: str, likely: str, next: str = NEXT) -> ServerError:
    return ServerError(
        got=got, expected="a Python with vLLM (an environment of its own: it cannot share SGLang's)", likely=likely, next=next
    )


def build_env(*, on_cpu: bool) -> dict[str, str]:
    """Return vLLM's environment: this process's own, offline, quiet, and what a small CPU needs. What the user set is kept."""
    ours = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if on_cpu:
        # TORCHDYNAMO_DISABLE: eager mode alone still compiles small functions at the first forward, 20 s on two cores.
        # nobind: vLLM would bind its threads to cores that other processes (SGLang) use as well.
        cores = str(len(os.sched_getaffinity(0)))
        ours |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": cores}
    return {**ours, **os.environ, "HF_HUB_OFFLINE": "1"}  # models are folders
