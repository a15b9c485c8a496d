"""`ringcore serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.peers.service_process import MODEL_NAME, ServiceChild, run

__all__ = ["RingcoreService"]


class RingcoreService(ServiceChild):
    packages: ClassVar[tuple[str, ...]] = ("ringcore", "torch", "triton", "fastapi", "uvicorn", "uvloop", "httptools")

    def arguments(self, model: str, port: int, settings: Mapping[str, Any]) -> list[str]:
        """settings: engine options by name, where they are not left to the engine."""
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings["engine"].items()]
        fixed = [f"--port={port}", f"--served-model-name={MODEL_NAME}", "--no-access-log", "--drain-s=0"]
        return ["-m", "ringcore.cli", "serve", model, *fixed, *options]


if __name__ == "__main__":
    run(RingcoreService())
