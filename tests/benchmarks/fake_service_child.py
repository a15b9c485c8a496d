"""The child of a service without a model. FAKE_FAULT "load": it ends before it is ready."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.service_process import ServiceChild, run


class FakeService(ServiceChild):
    packages: ClassVar[tuple[str, ...]] = ("msgspec",)

    def arguments(self, model: str, port: int, settings: Mapping[str, Any]) -> list[str]:
        if os.environ.get("FAKE_FAULT") == "load":
            return ["-c", "raise SystemExit('no such device')"]
        return [str(Path(__file__).with_name("fake_service.py")), str(port)]


if __name__ == "__main__":
    run(FakeService())
