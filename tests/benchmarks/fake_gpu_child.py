"""An engine without a model for the GPU benchmarks. FAKE_FAULT in its environment: "load" fails there; "short" gives a
token too few where many are asked for; a number is a batch at which it dies; "sleep" fails to sleep; "forgets" has
other weights after it. What it has of a device's memory, in MiB, it writes to the file FAKE_GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.gpu_loops import EngineChild, run


class FakeGpuEngine(EngineChild):
    packages: ClassVar[tuple[str, ...]] = ("msgspec",)

    def import_library(self) -> None:
        self._fault = os.environ.get("FAKE_FAULT", "")

    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        if self._fault == "load":
            raise ValueError("no such device")
        print(f"settings {settings}")
        self._sleeps = settings.get("enable_sleep_mode", False)
        self._shift = 0
        self._hold(1000)

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        if self._fault == str(len(prompts)):
            os._exit(3)
        missing = int(self._fault == "short" and max(max_tokens) > 1)
        return [[prompt[0] + self._shift] * (new - missing) for prompt, new in zip(prompts, max_tokens, strict=True)]

    def forget_prefixes(self) -> None: ...

    def sleep(self, level: int) -> None:
        if not self._sleeps or self._fault == "sleep":
            raise RuntimeError("no memory to keep the weights in")
        self._shift += int(level == 2 or self._fault == "forgets")
        self._hold(220 if level == 1 else 210)

    def wake_up(self) -> None:
        self._hold(1000)

    def num_kv_tokens(self) -> int:
        return 1000

    def _hold(self, mib: int) -> None:
        if path := os.environ.get("FAKE_GPU"):
            Path(path).write_text(f"{os.getpid()} {mib}")

    def close(self) -> None:
        self._hold(0)

    def phases(self) -> dict[str, float]:
        return {"nothing": 0.5}


if __name__ == "__main__":
    run(FakeGpuEngine())
