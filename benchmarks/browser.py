"""Drive a headless Chromium over its own protocol (CDP): open a page, run JavaScript, press keys, take pictures.

Only websocket-client is needed, which JupyterLab brings. Used by the browser tests and by benchmarks.screenshots.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
REASON = "no chromium on this machine (apt-get install chromium)"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--hide-scrollbars", "--no-first-run",
    "--disable-dev-shm-usage", "--disable-background-networking", "--remote-allow-origins=*", "--remote-debugging-port=0",
)  # fmt: skip
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # this machine's own JupyterLab stays reachable


class Page:
    """One tab. `asked`: every URL that was requested; `said`: errors of the console, of scripts and of loading."""

    def __init__(self, url: str):
        import websocket

        self._socket = websocket.create_connection(url, timeout=60)
        self._last = 0
        self.asked: list[str] = []
        self.said: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)  # as a window in front has it

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile is noted. Raises RuntimeError for a refusal."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.said.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.said.append(" ".join(str(a.get("value") or a.get("description") or "") for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())

    def js(self, code: str) -> Any:
        """Return the value of an expression; a promise is waited for. Raises RuntimeError for what it throws."""
        answer = self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description") or answer["exceptionDetails"]["text"])
        return answer["result"].get("value")

    def wait(self, code: str, seconds: float, what: str = "") -> Any:
        """Wait until an expression is true and return its value. Raises TimeoutError, which says what it was last."""
        end = time.monotonic() + seconds
        while not (value := self.js(code)):
            if time.monotonic() > end:
                raise TimeoutError(f"{what or code}: still {value!r} after {seconds:g} s; {self.said[-3:]}")
            time.sleep(0.2)
        return value

    def open(self, url: str, seconds: float = 60) -> None:
        """Go to `url` and wait until it has loaded."""
        self.send("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url.split('?')[0])}) && document.readyState == 'complete'", seconds, url)

    def look(self, width: int, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        """Set the size of the window (CSS pixels) and whether the reader likes it dark; below 500 pixels it is a phone."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="screen", features=[scheme])

    def picture(self, file: Path, most: int = 2400, top: int = 0) -> Path:
        """Write what is shown as PNG: the page from `top` down, `most` pixels of it at most."""
        box = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": box["width"], "height": min(box["height"] - top, most), "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))
        return file

    def click(self, selector: str, text: str = "", seconds: float = 30) -> None:
        """Click in the middle of the first visible element of a CSS selector whose text starts with `text`, with a real mouse event."""
        find = (
            f"(() => {{ const e = [...document.querySelectorAll({json.dumps(selector)})].find(e => e.innerText.trim().startsWith({json.dumps(text)})"
            " && e.getClientRects().length); if (!e) return null; e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        x, y = self.wait(find, seconds, f"{selector} {text!r}")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str, code: int) -> None:
        """Press and let go a key that is no letter: ("ArrowDown", 40)."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@contextmanager
def browser(profile: Path, flags: Sequence[str] = (NO_NETWORK,), seconds: float = 90) -> Iterator[Page]:
    """Start Chromium with its profile in `profile` and yield its tab; it ends with the block. Raises RuntimeError without one."""
    if CHROMIUM is None:
        raise RuntimeError(REASON)
    profile.mkdir(parents=True, exist_ok=True)
    port_file = profile / "DevToolsActivePort"
    port_file.unlink(missing_ok=True)
    log = (profile / "chromium.log").open("w")
    process = subprocess.Popen([CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log)
    page = None
    try:
        end = time.monotonic() + seconds
        while not port_file.exists() or not port_file.read_text().strip():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"Chromium did not start: {(profile / 'chromium.log').read_text()[-1000:]}")
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        tabs: list[dict[str, Any]] = []
        while not tabs:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
        page = Page(tabs[0]["webSocketDebuggerUrl"])
        yield page
    finally:
        if page is not None:
            page.close()
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
