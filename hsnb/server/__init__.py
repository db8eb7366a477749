"""Start, watch, attach to and stop an SGLang server.

The names load when first used: `python -m hsnb.server.supervisor` imports this package and must stay light.
"""

from __future__ import annotations

import importlib

_LAZY = {
    "Server": "hsnb.server.server",
    "attach": "hsnb.server.attached",
    "Client": "hsnb.server.client",
    "Generated": "hsnb.server.client",
    "running_servers": "hsnb.server.state",
    "stop_server": "hsnb.server.state",
}
__all__ = [*_LAZY]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'hsnb.server' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
