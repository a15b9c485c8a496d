"""A headless Chromium, driven by its DevTools protocol over a pair of pipes.

The browser ends when its pipe does, so it outlives nobody. After `close` nothing is left of its processes.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # nothing but the service can be reached
)
# The browser reads its commands from descriptor 3 and writes to 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_browser() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of it. `events` are the protocol's, in the order in which they came."""

    def __init__(self, program: str, folder: Path) -> None:
        commands, self._commands = (_high(fd) for fd in os.pipe())
        self._answers, answers = (_high(fd) for fd in os.pipe())
        self._folder = str(folder)
        self._held, self._num_sent, self._session = b"", 0, {}
        self.events: list[dict] = []
        start = [sys.executable, "-c", _START, str(commands), str(answers)]
        self._process = subprocess.Popen(
            [*start, program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        )
        os.close(commands)
        os.close(answers)
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params} | self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next_message(deadline)
            assert answer is not None, f"{method}: no answer within {DEADLINE_S:g} s"
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next_message(self, deadline: float) -> dict | None:
        while b"\0" not in self._held:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            read = os.read(self._answers, 1 << 16)
            assert read, "the browser ended"
            self._held += read
        data, _, self._held = self._held.partition(b"\0")
        message = json.loads(data)
        if "method" in message:
            self.events.append(message)
        return message

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, once it is there if it is a promise."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def until(self, expression: str, holds: Callable[[Any], bool] = bool) -> Any:
        """The first value of an expression that holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds(value := self.run(expression)):
            assert time.monotonic() < deadline, f"never: {expression}; it is {value!r}\n{self.run(_SHOWN)}"
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def text(self, selector: str) -> str:
        """What a person sees of the elements that there are."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.run(f"{found}.filter(one => one.checkVisibility()).map(one => one.innerText).join('\\n')")

    def wait_text(self, selector: str, part: str) -> str:
        found = f"document.querySelector({json.dumps(selector)})"
        return self.until(f"{found}?.checkVisibility() ? {found}.innerText : ''", lambda text: part in text)

    def click(self, selector: str) -> None:
        """As a person does: in the middle of what can be seen of it."""
        box = f"document.querySelector({json.dumps(selector)})?.getBoundingClientRect()"
        self.until(f"{box}?.width > 0")
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'nearest'}})")
        x, y = self.run(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
        code, text = codes[key]
        params = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **params)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def look(self, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """The window's size and the person's colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def requested_urls(self) -> list[str]:
        self.run("0")  # what was asked for before has been told by now
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions that nobody caught, and what the page's policy refused."""
        self.run("0")
        return [json.dumps(event["params"]) for event in self.events if _is_complaint(event)]

    def close(self) -> None:
        os.close(self._commands)  # at which the browser ends
        os.close(self._answers)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        finally:
            self._kill_all()
            self._process.wait(DEADLINE_S)

    def processes(self) -> list[psutil.Process]:
        """All that are of the browser: of its session, or with its environment, as its crash handlers have a session
        of their own, and its renderers write over theirs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                is_session = os.getsid(process.pid) == self._process.pid
                if is_session or process.environ().get("XDG_CACHE_HOME") == self._folder:
                    found.append(process)
            except (OSError, psutil.Error):
                pass  # it has ended, or is somebody else's
        return found

    def _kill_all(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while left := self.processes():
            assert time.monotonic() < deadline, f"cannot be killed: {left}"
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.01)


_SHOWN = "document.body.innerText.slice(-2000)"


def _is_complaint(event: dict) -> bool:
    match event["method"], event["params"]:
        case "Runtime.exceptionThrown", _:
            return True
        case "Runtime.consoleAPICalled", {"type": "error" | "warning" | "assert"}:
            return True
        case "Log.entryAdded", {"entry": {"level": "error" | "warning"}}:
            return True
    return False


def _high(fd: int) -> int:
    """The same at another number, which is not one of those that the browser is to have."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return high
