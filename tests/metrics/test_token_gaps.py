"""Seconds between the outputs of a request, whatever row it is at."""

from __future__ import annotations

import random

import pytest

from ringcore.metrics.token_gaps import TokenGaps
from ringcore.protocol.codec import int_array
from ringcore.protocol.requests import StartedRequest


def started(row: int, request_id: str, num_preemptions: int = 0) -> StartedRequest:
    return StartedRequest(row, request_id, 0, 0.0, num_preemptions)


def taken(gaps: TokenGaps) -> list[float]:
    return [seconds for seconds, count in zip(*gaps.take(), strict=True) for _ in range(count)]


def test_gaps_of_two_requests():
    gaps = TokenGaps()
    gaps.start([started(0, "a"), started(1, "b")])
    gaps.tokens(int_array([0]), 1.0)
    gaps.tokens(int_array([1, 0]), 1.5)
    assert taken(gaps) == [0.5]
    gaps.tokens(int_array([1]), 4.0)  # a gap over two calls of `take`
    gaps.end("b", 4.25, has_tokens=True)
    gaps.end("a", 9.0, has_tokens=False)
    assert taken(gaps) == [2.5, 0.25]
    gaps.end("unknown", 9.0, has_tokens=True)
    assert taken(gaps) == []


def test_another_request_at_the_row_begins_anew():
    gaps = TokenGaps()
    gaps.start([started(3, "a")])
    gaps.tokens(int_array([3]), 1.0)
    gaps.end("a", 2.0, has_tokens=True)
    gaps.start([started(3, "b")])
    gaps.tokens(int_array([3]), 7.0)
    gaps.tokens(int_array([3]), 7.5)
    assert taken(gaps) == [1.0, 0.5]


@pytest.mark.parametrize("row_is_taken", [False, True])
def test_a_preempted_request_has_the_gap_that_its_reader_saw(row_is_taken: bool):
    gaps = TokenGaps()
    gaps.start([started(0, "a")])
    gaps.tokens(int_array([0]), 1.0)
    if row_is_taken:
        gaps.start([started(0, "b")])
        gaps.tokens(int_array([0]), 2.0)
    gaps.start([started(5, "a", num_preemptions=1)])
    gaps.tokens(int_array([5]), 4.0)
    assert taken(gaps) == [3.0]


def test_another_engine_begins_anew_at_the_same_rows():
    gaps = TokenGaps()
    gaps.start([started(0, "a")])
    gaps.tokens(int_array([0]), 1.0)
    gaps.start([started(0, "b")])  # "a" has died with its engine
    gaps.tokens(int_array([0]), 2.0)
    gaps.tokens(int_array([0]), 2.5)
    assert taken(gaps) == [0.5]


def test_random_requests_beside_a_plain_reckoning():
    """Starts, tokens, ends and preemptions at random, and `take` at random moments."""
    random_, gaps = random.Random(5), TokenGaps()
    rows: dict[int, str] = {}
    preempted: dict[str, int] = {}
    last_s: dict[str, float] = {}
    expected, got, now, number = [], [], 0.0, 0

    def has_tokens(request_id: str) -> None:
        if request_id in last_s:
            expected.append(now - last_s[request_id])
        last_s[request_id] = now

    for _ in range(3000):
        now += random_.random()
        for row in [row for row in rows if random_.random() < 0.05]:
            preempted[rows.pop(row)] = 1
        free = [row for row in range(100) if row not in rows]
        starting = []
        for row in random_.sample(free, random_.randrange(3)):
            if preempted and random_.random() < 0.5:
                request_id = random_.choice(list(preempted))
                starting.append(started(row, request_id, preempted.pop(request_id)))
            else:
                number += 1
                starting.append(started(row, f"r{number}"))
            rows[row] = starting[-1].request_id
        gaps.start(starting)
        busy = [row for row in rows if random_.random() < 0.8 or number % 7]
        ending = [row for row in busy if random_.random() < 0.1]
        for row in busy:
            has_tokens(rows[row])
        gaps.tokens(int_array([row for row in busy if row not in ending]), now)
        for row in ending:
            gaps.end(rows.pop(row), now, has_tokens=True)
        if random_.random() < 0.1:
            got += taken(gaps)
    got += taken(gaps)
    assert len(expected) > 10_000
    assert sorted(got) == pytest.approx(sorted(expected))
