"""Capture hidden states with vLLM: a second engine, in an environment and in processes of its own, to compare SGLang's with.

`capture` runs in the caller's process and starts `inside/driver.py` in `.venv-vllm` (`make setup-vllm`). vLLM is never imported
here, and is never needed for an extraction.
"""

from __future__ import annotations

import importlib

_LAZY = {
    "Captured": "hsnb.vllm.captured",
    "capture": "hsnb.vllm.run",
    "vllm_python": "hsnb.vllm.environment",
}
__all__ = [*_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'hsnb.vllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
