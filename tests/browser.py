"""A headless Chromium, driven over its DevTools pipe without any package."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """The path of a Chromium on this machine."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Tab:
    """One tab; `events` are all (method, parameters) that it told so far."""

    def __init__(self, send: int, receive: int) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._send = send
        self._receive = os.fdopen(receive, "rb")
        self._count = 0
        self._rest = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools method."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._receive.fileno(), 1 << 16)
            assert more, "the browser ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message

    def open(self, path: Path, width: int, height: int, mobile: bool) -> None:
        """Load the page at `path` into a window of this size, and wait for it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._read()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, for five seconds at most."""
        late = time.monotonic() + 5
        while not self.run(condition):
            assert time.monotonic() < late, f"not so after five seconds: {condition}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that fits, as a hand does."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where it is in the window, after it was scrolled there."""
        x, y = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        return x, y

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def pinch(self, selector: str, start: float, end: float) -> None:
        """Two fingers on an element, `start` pixels apart and then `end`."""
        x, y = self.middle(selector)

        def fingers(apart: float) -> list[dict[str, float]]:
            return [{"x": x, "y": y - apart / 2}, {"x": x, "y": y + apart / 2}]

        for kind, points in (
            ("touchStart", fingers(start)),
            ("touchMove", fingers(start + 1)),
            ("touchMove", fingers((start + end) / 2)),
            ("touchMove", fingers(end)),
            ("touchEnd", []),
        ):
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)


@contextmanager
def browser(path: str, profile: Path) -> Iterator[Tab]:
    """A tab of the browser at `path`, whose profile is kept in the folder `profile`."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    # Above 3 and 4, where the browser expects them, so that no copy overwrites another.
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 20) for each in (theirs_in, theirs_out)]

    def hand_over() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=hand_over,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for each in (theirs_in, theirs_out, *high):
        os.close(each)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait(20)
        os.close(ours_out)
