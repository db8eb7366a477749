"""The layouts that trainers read: one file a layout."""

from __future__ import annotations

from hsnb.errors import ParamsError
from hsnb.trainers import speculators

LAYOUTS = {"speculators": speculators}


def layout(name: str):
    """Return the module of a layout. Raises ParamsError for one that is not there."""
    if name not in LAYOUTS:
        raise ParamsError(
            got=f"layout is {name!r}",
            expected=f"one of {', '.join(LAYOUTS)}",
            likely="a typo",
            next="-p layout speculators",
        )
    return LAYOUTS[name]
