"""Control Chromium over the DevTools protocol: clicks, keys, dropped files."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium


class Tab:
    """One page. `run` evaluates JavaScript in it and waits for promises."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._numbers, self._rest = itertools.count(1), b""
        self._session: str | None = None
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = session
        for domain in ("Page", "Runtime", "DOM", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._reading, 1 << 16)
            assert part, "Chromium is gone"
            self._rest += part
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"])[:500])
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])
        return message

    def run(self, script: str) -> Any:
        """Evaluate an expression, wait for promises, and return the value."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, (
                f"never true: {script}\n{self.run('document.body.innerText')}"
            )
            time.sleep(0.05)
        return found

    def open(self, address: str, width: int = 1200, height: int = 900) -> None:
        """Open an address in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in an input, as its dialog would."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(file)], nodeId=node)

    def drop(self, selector: str, file: Path) -> None:
        """Drag a file from outside and drop it on an element."""
        place = self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)})"
            ".getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for event in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=event, x=place[0], y=place[1], data=data)

    def key(self, name: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, "ArrowDown": 40, " ": 32}
        text = {"text": "\r"} if name == "Enter" else {}
        for event in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=event,
                key=name,
                code="Space" if name == " " else name,
                windowsVirtualKeyCode=codes[name],
                **(text if event == "keyDown" else {}),
            )

    def picture(self, file: Path) -> None:
        """Take a screenshot as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def tab(dark: bool = False) -> Iterator[Tab]:
    """Run a Chromium with one page."""
    program = chromium.find()
    assert program is not None, chromium.MISSING
    to_it, ours = os.pipe()
    theirs, from_it = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program,
            *chromium.FLAGS,
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_it, from_it)]

        def place() -> None:  # Chromium reads commands from 3 and writes answers to 4
            for fd, number in zip(high, (3, 4), strict=True):
                os.dup2(fd, number)

        process = subprocess.Popen(
            command,
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in high:
            os.close(fd)
        os.close(to_it)
        os.close(from_it)
        try:
            yield Tab(theirs, ours)
        finally:
            process.kill()
            process.wait()
            os.close(theirs)
            os.close(ours)
