"""An engine without a model for the GPU benchmarks. FAKE_FAULT in its environment: "load" fails there; "short" gives a
token too few where many are asked for; a number is a batch at which it dies."""

from __future__ import annotations

import os
from collections.abc import Mapping
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

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        if self._fault == str(len(prompts)):
            os._exit(3)
        missing = int(self._fault == "short" and max(max_tokens) > 1)
        return [prompt[:1] * (new - missing) for prompt, new in zip(prompts, max_tokens, strict=True)]

    def forget_prefixes(self) -> None: ...

    def phases(self) -> dict[str, float]:
        return {"nothing": 0.5}


if __name__ == "__main__":
    run(FakeGpuEngine())
