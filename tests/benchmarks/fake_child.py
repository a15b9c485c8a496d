"""An engine without a model: its tokens are a function of the prompt, and its settings make it misbehave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.peers.protocol import Engine, serve_engine


class FakeEngine(Engine):
    packages: ClassVar[tuple[str, ...]] = ("msgspec", "no-such-package")

    def __init__(self) -> None:
        self._helper: subprocess.Popen[bytes] | None = None
        self._shift = 0
        self._missing = 0

    def import_library(self) -> None:
        print("a library that prints while it is imported")

    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        self._shift, self._missing = settings.get("shift", 0), settings.get("missing", 0)
        if settings.get("helper"):
            self._helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def generate(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        match prompts[0]:
            case "raise":
                raise ValueError("a bad prompt")
            case "die":
                print("last words")
                os._exit(3)
            case "hang":
                time.sleep(60)
        return [[len(prompt) + self._shift + i for i in range(max_tokens - self._missing)] for prompt in prompts]

    def pids(self) -> dict[str, int]:
        helper = {"helper": self._helper.pid} if self._helper else {}
        return {"front end": os.getpid(), **helper}


if __name__ == "__main__":
    serve_engine(FakeEngine())
