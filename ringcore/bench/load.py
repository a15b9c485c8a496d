"""Requests at random times, or so many at once, and what came of each.

A latency counts from the moment at which a request was due, however late it was sent: a service that stands still
delays all requests that were due meanwhile, and a client that waited for it would leave them out (coordinated
omission).
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ringcore.bench.prompts import BenchRequest
from ringcore.errors import RingcoreError
from ringcore.host.collection import without_collection
from ringcore.http_client import HttpFailure

__all__ = ["Answer", "Failure", "Record", "Target", "arrival_times", "play"]


@dataclass(slots=True)
class Answer:
    """A completion as its reader sees it. Seconds of `time.perf_counter`."""

    text_s: list[float] = field(default_factory=list)  # when each piece with tokens came; of a whole answer its end
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    is_streamed: bool = True


@dataclass(frozen=True, slots=True)
class Failure:
    kind: str  # "timeout", "connection", "http 429", ..., or the type of an engine's error
    message: str


@dataclass(slots=True)
class Record:
    """One request: when it was due and sent, and its answer or failure."""

    request: BenchRequest
    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    outcome: Answer | Failure | None = None


class Target(Protocol):
    """Something that answers."""

    async def complete(self, request: BenchRequest) -> Answer:
        """Raises `RingcoreError`."""
        ...


def arrival_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the beginning: gaps of a gamma distribution with a mean of 1 / rate, one pattern a seed, stretched
    by the rate. burstiness: its shape, 1 for a Poisson process, less for bursts, more for evenness. An infinite rate:
    all at once."""
    if rate == float("inf"):
        return [0.0] * num
    gaps, now, times = random.Random(seed), 0.0, []
    for _ in range(num):
        now += gaps.gammavariate(burstiness, 1 / burstiness) / rate
        times.append(now)
    return times


async def play(
    target: Target,
    requests: Sequence[BenchRequest],
    times: Sequence[float] | None,
    concurrency: int | None = None,
    timeout_s: float | None = None,
) -> list[Record]:
    """Sends each request at its time; with `concurrency` at most so many are under way, and the others wait past it.
    Without times each is due when a place is free."""
    places = asyncio.Semaphore(concurrency or len(requests))
    gc.collect()
    with without_collection():  # a pause of the collector would be counted as the service's
        begin_s = time.perf_counter()
        records: list[Record] = []
        async with asyncio.TaskGroup() as group:
            for i, request in enumerate(requests):
                if times is None:
                    await places.acquire()
                    due_s = time.perf_counter()
                else:
                    due_s = begin_s + times[i]
                    if (left_s := due_s - time.perf_counter()) > 0:
                        await asyncio.sleep(left_s)
                records.append(Record(request, due_s))
                group.create_task(_send(target, records[-1], places, timeout_s, has_place=times is None))
    return records


async def _send(
    target: Target, record: Record, places: asyncio.Semaphore, timeout_s: float | None, *, has_place: bool
) -> None:
    if not has_place:
        await places.acquire()
    record.sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            record.outcome = await target.complete(record.request)
    except TimeoutError:
        record.outcome = Failure("timeout", f"no whole answer within {timeout_s} s")
    except RingcoreError as error:
        kind = error.kind if isinstance(error, HttpFailure) else type(error).__name__
        record.outcome = Failure(kind, error.message)
    finally:
        record.ended_s = time.perf_counter()
        places.release()
