"""What every prefix cache is measured with, and its rows.

Run by the Python of each peer's own environment: the standard library and numpy alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts, forget_garbage

__all__ = ["A_BLOCK", "BLOCK_SIZE", "PrefixChild", "median_us", "run"]

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
A_BLOCK = "µs a block"
POOL_PROMPTS = 4  # so many prompts' blocks are in the pool where blocks are taken and evicted
MIN_SECONDS, MIN_REPEATS = 0.02, 5  # of a sample


class PrefixChild(ABC):
    """One engine's prefix cache: its process, its commands and the loops."""

    packages: ClassVar[tuple[str, ...]]

    @abstractmethod
    def load(self) -> None:
        """Imports and prepares what no request needs again."""

    @abstractmethod
    def start(self, num_blocks: int, max_model_len: int) -> None:
        """An empty cache of so many usable blocks of `BLOCK_SIZE`."""

    @abstractmethod
    def request(self, prompt: np.ndarray) -> Any:
        """A request, none of whose blocks is hashed. prompt: [num_tokens] int32."""

    @abstractmethod
    def forget_hashes(self, request: Any) -> None: ...

    @abstractmethod
    def hash(self, request: Any) -> int:
        """Hashes the prompt's full blocks; how many there are."""

    @abstractmethod
    def lookup(self, request: Any) -> int:
        """Finds what is cached of a prompt that is hashed; tokens that need not be computed."""

    @abstractmethod
    def take(self, request: Any) -> None:
        """Gives a hashed request blocks for all its tokens, as if nothing were cached, and lets others find them."""

    @abstractmethod
    def free(self, request: Any) -> None:
        """Takes back the blocks of the request that `take` was called with last; they stay to be found."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets all that is cached."""

    # The commands.

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"load": self._load, "hashing": self.hashing, "looking": self.looking, "taking": self.taking}

    def _load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """`model` is not needed."""
        began_s = time.perf_counter()
        self.load()
        return facts(self.packages, construct_s=time.perf_counter() - began_s)

    def hashing(self, num_tokens: int) -> list[Row]:
        self._begin(num_tokens, num_prompts=1)
        request = self.request(next(self._prompts))

        def action() -> None:
            if self.hash(request) != num_tokens // BLOCK_SIZE:
                raise RuntimeError(f"not all blocks of {num_tokens} tokens were hashed")

        return with_blocks("hash", median_us(action, lambda: self.forget_hashes(request)), num_tokens)

    def looking(self, num_tokens: int, hit_percent: int) -> list[Row]:
        """The cache holds `hit_percent` of the prompt, and another prompt as long."""
        self._begin(num_tokens, num_prompts=2)
        prompt = next(self._prompts)
        num_cached = num_tokens * hit_percent // 100 // BLOCK_SIZE * BLOCK_SIZE
        for cached in (next(self._prompts), prompt[:num_cached]):
            if len(cached):
                self._put(cached)
        request = self.request(prompt)
        self.hash(request)
        most = min(num_cached, num_tokens - 1)  # the last token of a prompt is always computed

        def action() -> None:
            found = self.lookup(request)
            if not most // BLOCK_SIZE * BLOCK_SIZE <= found <= most:
                raise RuntimeError(f"{num_cached} of {num_tokens} tokens are cached; {found} were found")

        return with_blocks(f"lookup, {hit_percent}% cached", median_us(action), num_tokens)

    def taking(self, num_tokens: int) -> list[Row]:
        """Blocks taken and given back, of which nobody knew any, and of which all are cached and must be evicted."""
        self._begin(num_tokens, POOL_PROMPTS)
        rows = []
        for name, must_evict in (("none cached", False), ("all cached", True)):
            self.reset()
            for _ in range(POOL_PROMPTS if must_evict else 0):
                self._put(next(self._prompts))
            taken, freed = self._take_and_free(must_evict)
            rows += with_blocks(f"blocks taken and published, {name}", taken, num_tokens)
        return rows + with_blocks("blocks given back", freed, num_tokens)

    # What they share.

    def _begin(self, num_tokens: int, num_prompts: int) -> None:
        self._prompts = prompts(num_tokens)
        self.start(num_prompts * num_tokens // BLOCK_SIZE, max_model_len=num_tokens + 1)
        forget_garbage()

    def _put(self, prompt: np.ndarray) -> None:
        request = self.request(prompt)
        self.hash(request)
        self.take(request)
        self.free(request)

    def _take_and_free(self, must_evict: bool) -> tuple[float, float]:
        """Microseconds of each, of requests with other prompts every time."""
        taken_us, freed_us = list[float](), list[float]()
        while len(taken_us) <= MIN_REPEATS or sum(taken_us) < MIN_SECONDS * 1e6:
            if not must_evict:
                self.reset()
            request = self.request(next(self._prompts))
            self.hash(request)
            taken_us.append(_us(partial(self.take, request)))
            freed_us.append(_us(partial(self.free, request)))
        return median(taken_us[1:]), median(freed_us[1:])


def median_us(action: Callable[[], object], prepare: Callable[[], None] = lambda: None) -> float:
    """Median microseconds of `action`, `prepare` called before each and not counted; the first call warms up."""
    taken_us = list[float]()
    while len(taken_us) <= MIN_REPEATS or sum(taken_us) < MIN_SECONDS * 1e6:
        prepare()
        taken_us.append(_us(action))
    return median(taken_us[1:])


def _us(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return (time.perf_counter() - began_s) * 1e6


def with_blocks(name: str, us: float, num_tokens: int) -> list[Row]:
    """In all, and a block."""
    return [(name, "µs", us), (name, A_BLOCK, us * BLOCK_SIZE / num_tokens)]


def prompts(num_tokens: int) -> Iterator[np.ndarray]:
    """Prompts of random tokens that share no prefix, the same ones for every engine."""
    random = np.random.default_rng(0)
    while True:
        yield random.integers(0, VOCAB_SIZE, num_tokens, np.int32)


def run(child: PrefixChild) -> None:
    """Serves its commands until the parent says quit or is gone."""
    serve(child.commands())
