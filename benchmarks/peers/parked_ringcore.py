"""ringcore's `ParkedEngines`: keeps an engine parked for another child, with the same settings."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.peers.gpu_ringcore import engine_options
from benchmarks.peers.protocol import serve
from ringcore import ParkedEngines

with ExitStack() as pools:

    def park(model: str, settings: dict[str, Any]) -> None:
        """settings: of `benchmarks.peers.ringcore`, or of `gpu_ringcore`, which have a share of the memory."""
        options = engine_options(settings) if "memory_share" in settings else {"dtype": "float32", **settings}
        del options["start_from"]
        pools.enter_context(ParkedEngines(model, **options)).wait()

    serve({"park": park})
