"""hsnb: hidden states out of SGLang's own forward pass, proved and extracted from notebooks.

Importing the package costs nothing: the names below load what they need when they are first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_LAZY = {
    "HsnbError": "hsnb.errors",
    "Deployment": "hsnb.params",
    "Server": "hsnb.server",
    "open_dump": "hsnb.dumps",
    "probe": "hsnb.probe",
    "prepare": "hsnb.data",
    "extract": "hsnb.extract",
    "StatesDataset": "hsnb.trainers",
}
__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'hsnb' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    return module if _LAZY[name] == f"hsnb.{name}" else getattr(module, name)
