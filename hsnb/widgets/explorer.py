"""What every explorer is: controls above, one static picture below that is drawn again when a control changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ipywidgets

from hsnb.errors import HsnbError
from hsnb.report.style import CSS, error_block
from hsnb.show import number


class Explorer(ipywidgets.VBox):
    """Controls by name, and `draw(**values)` that returns HTML. An HsnbError is shown where the picture would be.

    `again`: the words of a button that draws again what others may have changed meanwhile.
    """

    def __init__(self, controls: dict[str, ipywidgets.Widget], draw: Callable[..., str], again: str = ""):
        self.controls, self._draw = controls, draw
        self.area = ipywidgets.HTML()
        self._task: asyncio.Task | None = None
        self.again = ipywidgets.Button(description=again)
        self.again.on_click(lambda _: self.refresh())
        row = ipywidgets.HBox([*controls.values(), *[self.again] * bool(again)], layout=ipywidgets.Layout(flex_flow="row wrap"))
        super().__init__([row, self.area])
        for control in controls.values():
            control.observe(lambda _: self._changed(), "value")
        self.refresh()

    @property
    def html(self) -> str:
        """What is shown now."""
        return self.area.value

    @property
    def values(self) -> dict[str, Any]:
        """What is chosen now, by the controls' names."""
        return {name: control.value for name, control in self.controls.items()}

    def _changed(self) -> None:
        if self.values != self._shown:  # one control may have moved another one, which has drawn already
            self.refresh()

    def refresh(self) -> None:
        """Draw again."""
        self._shown = self.values
        try:
            self.area.value = self._draw(**self._shown)
        except HsnbError as error:
            self.area.value = f"<style>{CSS}</style>" + error_block(str(error), "This cannot be shown:")

    def follow(self, seconds: float, until: Callable[[], bool]) -> Explorer:
        """Draw again every `seconds` until `until()` or until it is closed; without an event loop (a script) it stays as it is."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self

        async def tick() -> None:
            while self.comm is not None and not until():
                await asyncio.sleep(seconds)
                self.refresh()

        self._task = loop.create_task(tick())
        return self

    def close(self) -> None:
        """Close it; a task that draws again ends."""
        if self._task is not None:
            self._task.cancel()
        super().close()


def choice(name: str, options: Any, value: Any = None) -> ipywidgets.Dropdown:
    """Return a drop-down list; the first option is chosen when no value is given."""
    options = list(options)
    first = options[0][1] if isinstance(options[0], tuple) else options[0]
    return ipywidgets.Dropdown(description=name, options=options, value=first if value is None else value)


def table_html(frame: Any) -> str:
    """Return a pandas table that scrolls on its own when it is wide, and never widens what it stands in (`contain`)."""
    made = frame.to_html(index=False, border=0, float_format=number, justify="left")
    for cell in ("th", "td"):  # ipywidgets has no style for tables
        made = made.replace(f"<{cell}>", f'<{cell} style="padding:.1rem .9rem .1rem 0;text-align:left;white-space:nowrap;line-height:1.5">')
    return f'<div style="overflow-x:auto;contain:inline-size">{made}</div>'
