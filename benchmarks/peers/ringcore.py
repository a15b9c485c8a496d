"""ringcore's own `LLM`, as a user's script calls it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.peers.protocol import Engine, serve_engine


class Ringcore(Engine):
    packages: ClassVar[tuple[str, ...]] = ("ringcore", "torch", "numpy", "tokenizers")

    def __init__(self) -> None:
        self._llm: Any = None

    def import_library(self) -> None:
        from ringcore import LLM, SamplingParams

        self._llm_class, self._sampling_class = LLM, SamplingParams

    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        self._llm = self._llm_class(model, **{"dtype": "float32", **settings})

    def generate(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        greedy = self._sampling_class(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self._llm.generate(prompts, greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def pids(self) -> dict[str, int]:
        return {"front end": os.getpid(), **self._llm.ready.pids}

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()


if __name__ == "__main__":
    serve_engine(Ringcore())
