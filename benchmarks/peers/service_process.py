"""A service over HTTP as its users start it: a process beside this one, which waits until it answers.

Run by the Python of each peer's own environment: the standard library alone.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import facts

__all__ = ["ServiceChild", "run"]

READY_TIMEOUT_S = 540.0
END_TIMEOUT_S = 10.0


class ServiceChild(ABC):
    """Commands: load, which starts the service; target, which says how to reach it; pid, its process."""

    packages: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @abstractmethod
    def arguments(self, model: str, port: int, settings: Mapping[str, Any]) -> list[str]:
        """Of this Python: the service's command line. It listens at 127.0.0.1."""

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"load": self.load, "target": self.target, "pid": self.pid}

    def load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        began_s = time.perf_counter()
        self._port = free_port()
        command = [sys.executable, *self.arguments(model, self._port, settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # what it prints goes to this one's log
        self._wait_ready()
        return facts(self.packages, construct_s=time.perf_counter() - began_s)

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"the service ended with exit code {self._process.returncode} before it was ready")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5.0):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"the service was not ready within {READY_TIMEOUT_S:.0f} s")

    def target(self) -> dict[str, Any]:
        return {"port": self._port, "model": MODEL_NAME}

    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


MODEL_NAME = "model"


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(child: ServiceChild) -> None:
    """Serves its commands until the parent says quit or is gone, and ends the service."""
    try:
        serve(child.commands())
    finally:
        child.close()
