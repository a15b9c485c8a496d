"""Tokens and the seconds between them, counted many messages at once as if one by one."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from ringcore.metrics import RequestLog
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import NO_STATS, EngineCoreOutput, OutputColumns, StartedRequest


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def message(rows, started=(), ended=(), num_steps=1):
    """rows: with num_steps tokens each. started, ended: rows, each the request of its number."""
    return OutputColumns(
        [StartedRequest(row, f"r{row}", 0, 0.0, 0) for row in started],
        int_array(rows),
        int_array([7] * num_steps * len(rows)),
        None,
        [EngineCoreOutput(f"r{row}", [7], finish_reason="length") for row in ended],
        NO_STATS,
    )


def gaps(log: RequestLog) -> tuple[int, float]:
    counts = log.totals().histograms["inter_token_latency_seconds"]
    return counts.num_values, counts.sum


def test_requests_that_decode_together():
    """More messages than are kept, and a question between."""
    clock = Clock()
    log = RequestLog(clock)
    log.received(message([0, 1], started=[0, 1]))
    for number in range(1, 3001):
        clock.now_s = number * 0.25
        log.received(message([0, 1]))
        assert len(log._runs[-1].times) <= 1024
        if number == 700:
            assert gaps(log) == (2 * 700, 2 * 700 * 0.25)
    clock.now_s += 1.0
    log.received(message([1], ended=[0]))
    log.received(message([1]))
    assert gaps(log) == (2 * 3001 + 1, 2 * (3000 * 0.25 + 1.0))
    assert log.totals().generation_tokens == 2 * 3001 + 2 + 1


def test_any_messages_beside_a_plain_reckoning():
    clock, log, choose = Clock(), RequestLog(), random.Random(7)
    log._clock = clock
    last_s: dict[int, float] = {}
    expected, num_tokens = [], 0
    for _ in range(4000):
        clock.now_s += choose.random()
        if choose.random() < 0.9 and last_s:  # as the message before, or another half of the rows
            rows = sorted(last_s)[:: choose.choice([1, 1, 1, 2])]
            started, ended = [], []
        else:
            started = [row for row in range(12) if row not in last_s and choose.random() < 0.2]
            ended = [row for row in last_s if choose.random() < 0.2]
            rows = [row for row in {*last_s, *started} if row not in ended]
        num_steps = choose.choice([1, 1, 1, 4])
        log.received(message(rows, started, ended, num_steps))
        expected += [clock.now_s - last_s[row] for row in {*rows, *ended} if row in last_s]
        num_tokens += num_steps * len(rows) + len(ended)
        for row in ended:
            del last_s[row]
        last_s |= dict.fromkeys(rows, clock.now_s)
        if choose.random() < 0.01:
            assert gaps(log)[0] == len(expected)
    assert len(expected) > 5000
    assert gaps(log) == (len(expected), pytest.approx(np.sum(expected)))
    assert log.totals().generation_tokens == num_tokens


def test_questions_of_another_thread_lose_nothing():
    log, is_over = RequestLog(), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            log.totals()

    asking = threading.Thread(target=ask)
    asking.start()
    log.received(message([0], started=[0]))
    num = 20_000
    for number in range(1, num):
        if number % 50 == 0:
            log.received(message([0, 1], started=[1]))
            log.received(message([0], ended=[1]))
        else:
            log.received(message([0]))
    is_over.set()
    asking.join()
    others = (num - 1) // 50
    assert log.totals().generation_tokens == num + 3 * others
    assert gaps(log)[0] == num - 1 + 2 * others
