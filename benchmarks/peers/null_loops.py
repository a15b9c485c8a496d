"""What every engine without a model is measured with, and its rows.

Run by the Python of each peer's own environment: the standard library and numpy alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, Protocol

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts, forget_garbage

__all__ = ["BLOCK_SIZE", "PROMPT_TOKENS", "Engine", "Load", "NullChild", "run"]

BLOCK_SIZE = 16
PROMPT_TOKENS = 16
MAX_NUM_BATCHED_TOKENS = 1 << 16  # all prompts are computed in the step that they arrive in
NUM_LAPS = 8
STEP_BUDGET, MIN_STEPS, MAX_STEPS = 1 << 12, 8, 256  # of a lap


@dataclass(frozen=True)
class Load:
    """What an engine is made for. `num_steps`: of a lap."""

    num_requests: int
    num_steps: int
    has_process: bool  # whether the engine has a process of its own
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS

    @classmethod
    def of(cls, num_requests: int, has_process: bool) -> Load:
        return cls(num_requests, min(max(STEP_BUDGET // num_requests, MIN_STEPS), MAX_STEPS), has_process)

    @property
    def max_tokens(self) -> int:
        """More than are counted: the engine is ahead of who counts, and nothing ends meanwhile."""
        return 2 * NUM_LAPS * self.num_steps + 256

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

    @abstractmethod
    def load(self, model: str) -> None:
        """Imports what engines need. `model`: a folder with a config.json."""

    @abstractmethod
    def start(self, load: Load) -> Engine: ...

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"load": self._load, "decode": self.decode}

    def _load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        began_s = time.perf_counter()
        self.load(model)
        return facts(self.packages, construct_s=time.perf_counter() - began_s)

    def decode(self, num_requests: int, has_process: bool) -> list[Row]:
        """All requests decode, from the first tokens of all on; then the engine is ended."""
        load = Load.of(num_requests, has_process)
        engine = self.start(load)
        forget_garbage()
        try:
            prompt = list(range(PROMPT_TOKENS))
            engine.add([[i % 1000, *prompt[1:]] for i in range(num_requests)], load.max_tokens)
            _count(engine, num_requests * BLOCK_SIZE)
            a_token_us = median(_lap(engine, num_requests * load.num_steps) for _ in range(NUM_LAPS))
        finally:
            engine.close()
        return [("steps", "steps/s", 1e6 / a_token_us / num_requests), ("a token", "µs", a_token_us)]


def _lap(engine: Engine, num_tokens: int) -> float:
    """Microseconds a token."""
    began_s = time.perf_counter()
    num_tokens = _count(engine, num_tokens)
    return (time.perf_counter() - began_s) * 1e6 / num_tokens


def _count(engine: Engine, at_least: int) -> int:
    """Takes outputs with at least so many tokens; how many there were."""
    num_tokens = 0
    while num_tokens < at_least:
        num_tokens += engine.get()
    return num_tokens


def run(child: NullChild) -> None:
    """Serves its commands until the parent says quit or is gone."""
    serve(child.commands())
