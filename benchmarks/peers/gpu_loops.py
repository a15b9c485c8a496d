"""What engines on a GPU are measured with, tokens in and tokens out, and its rows.

Run by the Python of each peer's own environment: the standard library alone.
"""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts

__all__ = [
    "OFFLINE_TEMPERATURE",
    "SHARED_REQUESTS",
    "SHARED_TOKENS",
    "EngineChild",
    "offline_lengths",
    "offline_workload",
    "run",
    "shared_lengths",
    "shared_workload",
]

OFFLINE_TEMPERATURE = 0.6
_OFFLINE_SEED, _OFFLINE_LOW, _OFFLINE_HIGH, _OFFLINE_TOP_TOKEN = 0, 100, 1024, 10_000
# A service with a system prompt: how many requests, what all prompts begin with, what follows, and what is generated.
SHARED_REQUESTS, SHARED_TOKENS, _OWN_TOKENS, _SHARED_NEW = 512, 1000, (20, 300), (8, 128)
_FIRST_PROMPT = 16


class EngineChild(ABC):
    """One engine in this process: its commands and their loops."""

    packages: ClassVar[tuple[str, ...]]

    @abstractmethod
    def import_library(self) -> None:
        """Everything a user's script imports before it builds the engine."""

    @abstractmethod
    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        """Builds the engine on a folder with a config.json, with random weights, ready for a first request.

        settings: device, dtype, max_model_len, memory_share (of the device's memory), tensor_parallel_size; and
        enable_sleep_mode, where it shall sleep, and pipeline_parallel_size, where it has stages. Of vLLM also
        block_size, num_blocks (on the device) and host_kv_gib.
        """

    @abstractmethod
    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        """The new tokens of each prompt, as many as asked for, end of text or not."""

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Gives the memory of weights and KV cache back. level: 1 keeps the weights on the host, 2 keeps nothing."""

    @abstractmethod
    def wake_up(self) -> None:
        """Takes all of it again."""

    @abstractmethod
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache has memory for."""

    def memory_parts(self) -> dict[str, float]:
        """What the last sleep or wake-up came to, bytes and seconds by name, where the engine tells."""
        return {}

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of start-up, where the engine tells."""
        return {}

    def close(self) -> None:  # noqa: B027 - an engine may end with its process
        """Ends what `construct` started."""

    # -----------------------------------------------------------------------------------------------------------
    # Commands.

    def commands(self) -> dict[str, Callable[..., Any]]:
        own = {"load": self.load, "first_token": self.first_token, "phases": self.phases}
        asleep = {"sleep": self.timed_sleep, "wake_up": self.timed_wake_up, "num_kv_tokens": self.num_kv_tokens}
        asleep["memory_parts"] = self.memory_parts
        loads = {"greedy": self.greedy, "decode": self.decode, "offline": self.offline, "prefill": self.prefill}
        loads |= {"shared": self.shared, "turn": self.turn}
        return {**own, **asleep, **loads}

    def load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        began_s = time.perf_counter()
        self.import_library()
        imported_s = time.perf_counter()
        self.construct(model, settings)
        constructed_s = time.perf_counter()
        self._vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        return facts(self.packages, imported_s - began_s, constructed_s - imported_s)

    def first_token(self) -> float:
        """Seconds of a request of one token."""
        return self._timed(self._prompts(1, _FIRST_PROMPT, seed=0), [1])

    def decode(self, batch: int, prompt_tokens: int, new_tokens: int) -> list[Row]:
        """A step, from two runs of the same greedy requests whose prompts are cached: one of a token each, and one of
        `new_tokens`. Their difference is new_tokens - 1 steps, whatever prompts and the way of a request take."""
        prompts = self._prompts(batch, prompt_tokens, seed=batch)
        self._timed(prompts, [1] * batch)  # the prompts are in the prefix cache from here on
        one_s = self._timed(prompts, [1] * batch)
        all_s = self._timed(prompts, [new_tokens] * batch)
        step_ms = (all_s - one_s) * 1e3 / (new_tokens - 1)
        return [("a step", "ms", step_ms), ("a request of one token, prompt cached", "ms", one_s * 1e3)]

    def offline(self, num_requests: int, turn: int) -> list[Row]:
        """nano-vllm's benchmark; each turn has other tokens, so that no prefix is found again."""
        prompts, max_tokens = offline_workload(num_requests, turn, self._vocab_size)
        self.forget_prefixes()
        seconds = self._timed(prompts, max_tokens, OFFLINE_TEMPERATURE)
        return [("all requests", "s", seconds), ("output", "tokens/s", sum(max_tokens) / seconds)]

    def shared(self, num_requests: int, turn: int) -> list[Row]:
        """Greedy requests that begin with the same tokens, all sent at once; the first computes them."""
        prompts, max_tokens = shared_workload(num_requests, turn, self._vocab_size)
        self.forget_prefixes()
        seconds = self._timed(prompts, max_tokens)
        return [("all requests", "s", seconds), ("output", "tokens/s", sum(max_tokens) / seconds)]

    def prefill(self, num_prompts: int, prompt_tokens: int, turn: int) -> list[Row]:
        """Prompts that share nothing, one token each."""
        prompts = self._prompts(num_prompts, prompt_tokens, seed=1000 + turn)
        self.forget_prefixes()
        seconds = self._timed(prompts, [1] * num_prompts)
        return [("prompts", "tokens/s", num_prompts * prompt_tokens / seconds)]

    def turn(self, prompt: list[int]) -> float:
        """Seconds to its first token."""
        return self._timed([prompt], [1])

    def greedy(self, batch: int, prompt_tokens: int, new_tokens: int) -> list[list[int]]:
        """The same requests whenever it is called; their tokens."""
        return self.generate(self._prompts(batch, prompt_tokens, seed=batch), [new_tokens] * batch, 0.0)

    def timed_sleep(self, level: int) -> float:
        """Seconds."""
        began_s = time.perf_counter()
        self.sleep(level)
        return time.perf_counter() - began_s

    def timed_wake_up(self, then_ask: bool) -> list[float]:
        """Seconds, and those of a request of one token right behind it where it `then_ask`s."""
        began_s = time.perf_counter()
        self.wake_up()
        seconds = time.perf_counter() - began_s
        return [seconds, self.first_token()] if then_ask else [seconds]

    def _timed(self, prompts: list[list[int]], max_tokens: list[int], temperature: float = 0.0) -> float:
        began_s = time.perf_counter()
        tokens = self.generate(prompts, max_tokens, temperature)
        seconds = time.perf_counter() - began_s
        if [len(new) for new in tokens] != max_tokens:
            got = sum(map(len, tokens))
            raise RuntimeError(f"{len(prompts)} requests were to give {sum(max_tokens)} tokens, and gave {got}")
        return seconds

    def _prompts(self, count: int, num_tokens: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [draw.choices(range(self._vocab_size), k=num_tokens) for _ in range(count)]


def offline_workload(num_requests: int, turn: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and how many new tokens each gets: nano-vllm's bench.py, its draws in its order."""
    draw = random.Random(_OFFLINE_SEED)
    prompts = []
    for _ in range(num_requests):
        length = draw.randint(_OFFLINE_LOW, _OFFLINE_HIGH)
        drawn = [draw.randint(0, _OFFLINE_TOP_TOKEN) for _ in range(length)]
        prompts.append([(token + turn * (1 + i)) % vocab_size for i, token in enumerate(drawn)])
    return prompts, [draw.randint(_OFFLINE_LOW, _OFFLINE_HIGH) for _ in range(num_requests)]


def offline_lengths(num_requests: int) -> Sequence[tuple[int, int]]:
    """Of each request of `offline_workload`: prompt tokens, new tokens."""
    prompts, new = offline_workload(num_requests, 0, _OFFLINE_TOP_TOKEN + 1)
    return [(len(prompt), count) for prompt, count in zip(prompts, new, strict=True)]


def shared_workload(num_requests: int, turn: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompts that begin with the same SHARED_TOKENS tokens, and how many new tokens each gets; the lengths are the
    same in every turn."""
    draw = random.Random(1 + turn)
    prefix = draw.choices(range(vocab_size), k=SHARED_TOKENS)
    lengths = shared_lengths(num_requests)
    return [prefix + draw.choices(range(vocab_size), k=own) for own, _ in lengths], [new for _, new in lengths]


def shared_lengths(num_requests: int) -> Sequence[tuple[int, int]]:
    """Of each request of `shared_workload`: prompt tokens after the shared ones, new tokens."""
    draw = random.Random(0)
    return [(draw.randint(*_OWN_TOKENS), draw.randint(*_SHARED_NEW)) for _ in range(num_requests)]


def run(child: EngineChild) -> None:
    """Serves its commands until the parent says quit or is gone."""
    try:
        serve(child.commands())
    finally:
        child.close()
