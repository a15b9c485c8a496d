"""What every engine without a model is measured with, and its rows.

Run by the Python of each peer's own environment: the standard library and numpy alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Protocol

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts, forget_garbage

__all__ = ["BLOCK_SIZE", "PROMPT_TOKENS", "VOCAB_SIZE", "Engine", "Load", "NullChild", "run"]

BLOCK_SIZE = 16
PROMPT_TOKENS = 16
VOCAB_SIZE = 1000
MAX_NUM_BATCHED_TOKENS = 1 << 16  # all prompts are computed in the step that they arrive in
TOKEN_BUDGET, MIN_TOKENS, MAX_TOKENS = 1 << 18, 256, 2048  # new ones: of all requests, and of one


@dataclass(frozen=True)
class Load:
    """What an engine is made for."""

    num_requests: int
    has_process: bool  # whether the engine has a process of its own
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS

    @property
    def max_tokens(self) -> int:
        """Of each request: many, so that the first step, which computes the prompts, hardly counts."""
        return min(max(TOKEN_BUDGET // self.num_requests, MIN_TOKENS), MAX_TOKENS)

    @property
    def max_model_len(self) -> int:
        return PROMPT_TOKENS + self.max_tokens

    @property
    def num_blocks(self) -> int:
        """Usable ones: no request waits for blocks."""
        return self.num_requests * -(-self.max_model_len // BLOCK_SIZE)


class Engine(Protocol):
    """One engine that is ready, and its client."""

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Requests that are greedy and go past any end of text."""
        ...

    def get(self) -> int:
        """Waits for the next outputs, as objects request by request; how many tokens they have."""
        ...

    def close(self) -> None: ...


class NullChild(ABC):
    """Starts engines of one kind: its process, its commands and the loops."""

    packages: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._load: Load | None = None  # the engine's
        self._numbers = count()

    @abstractmethod
    def load(self, model: str) -> None:
        """Imports what engines need. `model`: a folder with a config.json."""

    @abstractmethod
    def start(self, load: Load) -> Engine: ...

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"load": self.prepare, "decode": self.decode}

    def prepare(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        began_s = time.perf_counter()
        self.load(model)
        return facts(self.packages, construct_s=time.perf_counter() - began_s)

    def decode(self, num_requests: int, has_process: bool) -> list[Row]:
        """Requests that all arrive and end together. The engine stays until there is to be another one."""
        load = Load(num_requests, has_process)
        if load != self._load:
            self.close()
            self._engine, self._load = self.start(load), load
        forget_garbage()
        a_step_us = self._run(load)
        return [("steps", "steps/s", 1e6 / a_step_us), ("a token", "µs", a_step_us / num_requests)]

    def _run(self, load: Load) -> float:
        """Microseconds a step, from the arrival of the requests to the last token of all: whoever is the slowest, the
        engine or its client, sets the pace, and none is ahead in the end."""
        assert self._engine is not None
        prompts = [self._next_prompt() for _ in range(load.num_requests)]
        began_s = time.perf_counter()
        self._engine.add(prompts, load.max_tokens)
        num_tokens = 0
        while num_tokens < load.num_requests * load.max_tokens:
            num_tokens += self._engine.get()
        return (time.perf_counter() - began_s) * 1e6 / load.max_tokens

    def _next_prompt(self) -> list[int]:
        """One that shares no prefix with those before."""
        number = next(self._numbers)
        return [number // VOCAB_SIZE % VOCAB_SIZE, number % VOCAB_SIZE, *range(PROMPT_TOKENS - 2)]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._load = None


def run(child: NullChild) -> None:
    """Serves its commands until the parent says quit or is gone."""
    try:
        serve(child.commands())
    finally:
        child.close()
