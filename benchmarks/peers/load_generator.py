"""What a service's clients do, in a process of its own: requests at random times, or so many at once.

Of ringcore's own environment. Its client is not that of `ringcore bench`, a library's, which takes longer for an event
than a service does for a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Any, TypedDict

from benchmarks.peers.http_streams import Answer, Event, HttpError, complete, read_answer
from benchmarks.peers.protocol import serve
from benchmarks.peers.queue_loops import percentiles
from benchmarks.peers.rows import Row, facts, forget_garbage
from ringcore.bench.load import arrival_times

__all__ = ["Load", "LoadGenerator", "Play", "Target", "saturated_rows"]


class Load(TypedDict):
    """One request: a text, and how many tokens are to follow it."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Target:
    port: int
    model: str
    path: str = "/v1/completions"

    async def complete(self, load: Load) -> list[Event]:
        fixed = {"model": self.model, "temperature": 0, "ignore_eos": True, "stream": True}
        return await complete(self.port, self.path, {**fixed, **load, "stream_options": {"include_usage": True}})


@dataclass
class Play:
    """What came of the requests, in the order in which they were given. Seconds of `time.perf_counter`."""

    due_s: list[float]  # when each was to be sent
    sent_s: list[float]
    events: list[list[Event]] = field(default_factory=list)


async def play(target: Target, loads: Sequence[Load], times: Sequence[float]) -> Play:
    """Sends each request at its time, however many are under way."""
    began_s = time.perf_counter()
    done = Play([began_s + at for at in times], [0.0] * len(loads))
    answers: list[Awaitable[list[Event]]] = []
    async with asyncio.TaskGroup() as group:
        for i, load in enumerate(loads):
            await asyncio.sleep(max(0.0, done.due_s[i] - time.perf_counter()))
            done.sent_s[i] = time.perf_counter()
            answers.append(group.create_task(target.complete(load)))
    done.events = [await answer for answer in answers]
    return done


async def play_together(target: Target, loads: Sequence[Load], concurrency: int) -> Play:
    """Sends the next request whenever one has ended, so that `concurrency` are always under way until none is left."""
    waiting = iter(range(len(loads)))
    done = Play([0.0] * len(loads), [0.0] * len(loads), [[] for _ in loads])

    async def follow(numbers: Iterable[int]) -> None:
        for i in numbers:
            done.due_s[i] = done.sent_s[i] = time.perf_counter()
            done.events[i] = await target.complete(loads[i])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(loads))):
            group.create_task(follow(waiting))
    return done


def read_answers(done: Play, loads: Sequence[Load]) -> list[Answer]:
    """Raises `HttpError` for any answer that is not as long as it was to be."""
    answers = [read_answer(events) for events in done.events]
    for load, answer in zip(loads, answers, strict=True):
        if answer.completion_tokens != load["max_tokens"]:
            raise HttpError(f"{load['max_tokens']} tokens were asked for, {answer.completion_tokens} came")
    return answers


def latency_rows(done: Play, answers: Sequence[Answer]) -> list[Row]:
    """From the moment at which a request was due, though it may have been sent later."""
    first = [1e3 * (answer.text_s[0] - due) for answer, due in zip(answers, done.due_s, strict=True)]
    whole = [1e3 * (answer.text_s[-1] - due) for answer, due in zip(answers, done.due_s, strict=True)]
    gaps = [1e3 * (b - a) for answer in answers for a, b in pairwise(answer.text_s)]
    rows = percentiles("time to first token", "ms", first)
    if gaps:
        rows += percentiles("between tokens", "ms", gaps)
    return rows + percentiles("whole answer", "ms", whole)


def rate_rows(done: Play, answers: Sequence[Answer]) -> list[Row]:
    """Over all of it, from the first request to the last token."""
    seconds = max(answer.text_s[-1] for answer in answers) - min(done.due_s)
    tokens = sum(answer.completion_tokens for answer in answers)
    return [("requests", "requests/s", len(answers) / seconds), ("output", "tokens/s", tokens / seconds)]


def saturated_rows(done: Play, answers: Sequence[Answer], concurrency: int) -> list[Row]:
    """While all places were taken and the first answers, which began together, had ended."""
    ends_s = sorted(answer.text_s[-1] for answer in answers)
    began_s, ended_s = ends_s[min(concurrency, len(ends_s)) - 1], max(done.sent_s)
    if concurrency >= len(ends_s) or ended_s <= began_s:
        raise HttpError(
            f"{len(answers)} requests are too few to keep {concurrency} under way; give three times as many"
        )
    tokens = sum(began_s < at_s <= ended_s for answer in answers for at_s in answer.text_s)
    events = sum(len(answer.text_s) for answer in answers)
    # An event may have several tokens, where a reader was slow, or none of a token that is part of a character.
    tokens_s = tokens * sum(answer.completion_tokens for answer in answers) / events / (ended_s - began_s)
    a_request = mean(answer.completion_tokens for answer in answers)
    return [("requests", "requests/s", tokens_s / a_request), ("output", "tokens/s", tokens_s)]


class LoadGenerator:
    """The commands. Each reply has rows, and what this process itself had of a core."""

    def commands(self) -> dict[str, Any]:
        return {"load": self.load, "arrive": self.arrive, "saturate": self.saturate}

    def load(self, model: str, settings: dict[str, Any]) -> Any:
        """There is nothing to load; the model is the service's."""
        return facts(())

    def arrive(
        self, target: dict[str, Any], loads: list[Load], rate: float, seed: int, limit_s: float
    ) -> dict[str, Any]:
        """Poisson arrivals of all requests, `rate` a second."""
        times = arrival_times(len(loads), rate, 1.0, seed)
        return self._reply(play(Target(**target), loads, times), loads, limit_s, None)

    def saturate(self, target: dict[str, Any], loads: list[Load], concurrency: int, limit_s: float) -> dict[str, Any]:
        """So many under way all the time."""
        return self._reply(play_together(Target(**target), loads, concurrency), loads, limit_s, concurrency)

    def _reply(self, playing: Any, loads: Sequence[Load], limit_s: float, concurrency: int | None) -> dict[str, Any]:
        forget_garbage()
        began_s, used_s = time.perf_counter(), time.process_time()
        try:
            done: Play = asyncio.run(_within(playing, limit_s))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        core_share = (time.process_time() - used_s) / (time.perf_counter() - began_s)
        answers = read_answers(done, loads)
        rows = rate_rows(done, answers) if concurrency is None else saturated_rows(done, answers, concurrency)
        if concurrency is None:
            rows += latency_rows(done, answers)
        return {
            "rows": rows,
            "core_share": core_share,
            "latest_ms": 1e3 * max(sent - due for sent, due in zip(done.sent_s, done.due_s, strict=True)),
            "texts": [answer.text for answer in answers],
            "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
            "completion_tokens": sum(answer.completion_tokens for answer in answers),
            "num_events": sum(len(answer.text_s) for answer in answers),
        }


async def _within(playing: Awaitable[Play], limit_s: float) -> Play:
    async with asyncio.timeout(limit_s):
        return await playing


if __name__ == "__main__":
    serve(LoadGenerator().commands())
