"""The steps that every scheduler is measured with, and their rows.

Run by the Python of each peer's own environment: the standard library and numpy alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import Row, facts, forget_garbage

__all__ = ["BLOCK_SIZE", "TOKEN_ID", "VOCAB_SIZE", "Load", "Outcome", "SchedulerChild", "run"]

BLOCK_SIZE = 16
VOCAB_SIZE, TOKEN_ID = 32_000, 7  # the token that every request gets
MAX_MODEL_LEN = 1024
MAX_NUM_BATCHED_TOKENS = 1 << 18  # every prompt is computed whole, in the step that admits it
STEADY_PROMPT, CHURN_PROMPT, CHURN_TOKENS = 128, 512, 10
MIN_LAPS, MAX_LAPS, ROW_STEPS = 5, 32, 1 << 15  # a lap: as many steps as a block has tokens
PARTS = ("add", "schedule()", "messages", "update()", "outputs")


@dataclass(frozen=True)
class Load:
    """What a scheduler is made for."""

    max_num_seqs: int
    num_blocks: int  # usable: a null block comes on top
    steps_in_flight: int
    block_size: int = BLOCK_SIZE
    max_model_len: int = MAX_MODEL_LEN
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS


@dataclass(frozen=True)
class Outcome:
    """What a step gave, as the front end has it in the end."""

    num_tokens: int
    finished: Sequence[str]  # the requests that ended


class SchedulerChild(ABC):
    """One engine's scheduler with its KV cache: its process, its commands and the loops.

    A step is `schedule`, `send`, `take`, `update`, `deliver`. What the workers do in between, `execute`, is not
    measured, nor is `arrive`, what the wire does with a request before the scheduler has it.
    """

    packages: ClassVar[tuple[str, ...]]

    @abstractmethod
    def load(self, model: str) -> None:
        """Imports and prepares what no step needs to do again. `model`: a folder with a config.json."""

    @abstractmethod
    def start(self, load: Load) -> None:
        """A new scheduler with an empty cache in the place of the one before."""

    @abstractmethod
    def arrive(self, request_id: str, prompt: list[int], max_tokens: int) -> Any:
        """A greedy request that ignores the end of text, as the engine decodes it from the wire."""

    @abstractmethod
    def add(self, request: Any) -> None: ...

    @abstractmethod
    def schedule(self) -> Any:
        """The next step; None where there is nothing to compute."""

    @abstractmethod
    def send(self, step: Any) -> int:
        """Encodes the message to the workers; its bytes."""

    @abstractmethod
    def execute(self, step: Any) -> bytes:
        """The workers' encoded reply: a token for each request whose tokens are all computed."""

    @abstractmethod
    def take(self, reply: bytes) -> Any:
        """The reply decoded."""

    @abstractmethod
    def update(self, step: Any, reply: Any) -> Any: ...

    @abstractmethod
    def deliver(self, outputs: Any) -> Outcome:
        """Encodes the outputs as for the front end, decodes them as there, and reads them request by request."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """How many run and how often any was preempted: "running", "preemptions"."""

    # The commands.

    def commands(self) -> dict[str, Callable[..., Any]]:
        return {"load": self._load, "steady": self.steady, "churn": self.churn}

    def _load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        began_s = time.perf_counter()
        self.load(model)
        return facts(self.packages, construct_s=time.perf_counter() - began_s)

    def steady(self, num_running: int, steps_in_flight: int) -> list[Row]:
        """Pure decode: every step gives each request one token, and a sixteenth of them a block."""
        num_laps = laps_of(num_running)
        num_tokens = (3 + num_laps) * BLOCK_SIZE + steps_in_flight
        num_blocks = num_running * -(-(STEADY_PROMPT + num_tokens) // BLOCK_SIZE)
        self._begin(Load(num_running, num_blocks, steps_in_flight), STEADY_PROMPT, num_tokens)
        for first in range(BLOCK_SIZE):
            self._add(len(range(first, num_running, BLOCK_SIZE)))
            self._step()
        for _ in range(BLOCK_SIZE):
            self._step()
        laps = [self._lap(num_running) for _ in range(num_laps)]
        rows = [("step", "µs", median(sum(lap.us(part) for part in PARTS[1:4]) for lap in laps))]
        if steps_in_flight == 1:
            rows += [(part, "µs", median(lap.us(part) for lap in laps)) for part in PARTS[1:]]
            rows.append(("message to the workers", "B", sum(lap.num_bytes for lap in laps) / num_laps / BLOCK_SIZE))
        return rows

    def _lap(self, num_running: int) -> Meter:
        """Steps in which every request fills a block once."""
        meter = self._meter = Meter(BLOCK_SIZE)
        for _ in range(BLOCK_SIZE):
            outcome = self._step()
            if outcome.num_tokens != num_running or outcome.finished:
                raise RuntimeError(f"a step of {num_running} requests gave {outcome}")
        return meter

    def churn(self, num_running: int, pool_share: float, is_burst: bool, num_laps: int) -> dict[str, Any]:
        """Requests of `CHURN_TOKENS` tokens; a new one arrives for each that has finished.

        They begin evenly spread over time, or all at once (`is_burst`): then their blocks run out in the same step.
        The pool has `pool_share` of the blocks that `num_running` requests hold in the end. A lap has as many steps as
        a request that is never preempted. Rows, and counts a step.
        """
        num_blocks = num_running * -(-(CHURN_PROMPT + CHURN_TOKENS) // BLOCK_SIZE)
        self._begin(Load(num_running, int(num_blocks * pool_share), 1), CHURN_PROMPT, CHURN_TOKENS)
        waves = 1 if is_burst else CHURN_TOKENS
        for first in range(CHURN_TOKENS):
            self._add(len(range(first, num_running, waves)) if first < waves else 0)
            self._churn_step()
        for _ in range(2 * CHURN_TOKENS):  # by now the pool has been filled more than once
            self._churn_step()
        step_us, finished, running, before = [], [], [], self.counts()["preemptions"]
        for _ in range(num_laps):
            meter, num_finished = Meter(CHURN_TOKENS), 0
            self._meter = meter
            for _ in range(CHURN_TOKENS):
                num_finished += self._churn_step()
                running.append(self.counts()["running"])
            step_us.append(sum(meter.us(part) for part in PARTS[:-1]))
            finished.append(num_finished / CHURN_TOKENS)
        a_finished_us = median(us / count for us, count in zip(step_us, finished, strict=True))
        return {
            "rows": [("step", "µs", median(step_us)), ("a finished request", "µs", a_finished_us)],
            "running": sum(running) / len(running),
            "finished": sum(finished) / num_laps,
            "preempted": (self.counts()["preemptions"] - before) / num_laps / CHURN_TOKENS,
        }

    # Steps.

    def _begin(self, load: Load, prompt_tokens: int, max_tokens: int) -> None:
        self.start(load)
        forget_garbage()
        self._steps_in_flight, self._meter = load.steps_in_flight, Meter(1)
        self._in_flight: deque[tuple[Any, bytes]] = deque()
        self._prompts = prompts(prompt_tokens)
        self._max_tokens, self._num_added = max_tokens, 0

    def _add(self, count: int) -> None:
        ids = [str(self._num_added + i) for i in range(count)]
        arrived = [self.arrive(f"request-{id_}", next(self._prompts), self._max_tokens) for id_ in ids]
        self._num_added += count
        with self._meter.part("add"):
            for request in arrived:
                self.add(request)

    def _churn_step(self) -> int:
        """A step, and an arrival for each request that finished in it; how many did."""
        finished = self._step().finished
        self._add(len(finished))
        return len(finished)

    def _step(self) -> Outcome:
        """Schedules a step; takes in the oldest where as many are in flight as may be."""
        meter = self._meter
        with meter.part("schedule()"):
            step = self.schedule()
        if step is not None:
            with meter.part("messages"):
                meter.num_bytes += self.send(step)
            self._in_flight.append((step, self.execute(step)))
            if len(self._in_flight) < self._steps_in_flight:
                return Outcome(0, ())
        step, encoded = self._in_flight.popleft()
        with meter.part("messages"):
            reply = self.take(encoded)
        with meter.part("update()"):
            outputs = self.update(step, reply)
        with meter.part("outputs"):
            return self.deliver(outputs)


class Meter:
    """Seconds of `num_steps` steps, by part. `num_bytes`: those sent to the workers."""

    def __init__(self, num_steps: int) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_steps = num_steps
        self.num_bytes = 0

    def part(self, name: str) -> _Part:
        return _Part(self._seconds, name)

    def us(self, part: str) -> float:
        """A step."""
        return self._seconds[part] * 1e6 / self._num_steps


class _Part:
    """A class rather than a generator: what it costs, some 0.3 µs, is a part of what is measured."""

    __slots__ = ("_began_s", "_name", "_seconds")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._began_s


def laps_of(num_running: int) -> int:
    """Laps of one sample: many where they are short."""
    return min(max(ROW_STEPS // num_running // BLOCK_SIZE, MIN_LAPS), MAX_LAPS)


def prompts(num_tokens: int) -> Iterator[list[int]]:
    """Prompts of random tokens that share no prefix, the same ones for every engine."""
    random = np.random.default_rng(0)
    while True:
        yield random.integers(0, VOCAB_SIZE, num_tokens, np.int32).tolist()


def run(child: SchedulerChild) -> None:
    """Serves its commands until the parent says quit or is gone."""
    serve(child.commands())
