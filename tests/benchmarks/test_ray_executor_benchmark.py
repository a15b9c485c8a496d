"""The benchmark of the ray executor: its worker, and a round of it without a cluster."""

from __future__ import annotations

from benchmarks import ray_executor
from benchmarks.ray_executor import CASES, ELSEWHERE, EMPTY, HERE, IDLE, LONG, ON_RAY, STEP_S


def test_a_round(monkeypatch):
    monkeypatch.setattr(ray_executor, "NUM_STEPS", 20)
    monkeypatch.setattr(ray_executor, "NUM_LONG_STEPS", 3)
    side = ray_executor._Side(HERE, "")
    side.start()
    try:
        assert len(side.pids()) == 1
        found = ray_executor._round([side], 0)[HERE] | {IDLE: side.idle_percent(0.05)}
    finally:
        side.executor.shutdown()
    assert set(found) == set(CASES)
    assert 0 < found[EMPTY] < found[LONG]
    assert found[LONG] >= STEP_S * 1e6
    assert found[IDLE] >= 0


def test_what_is_said_of_the_rounds():
    added = ((1.0, 100.0), (-2.0, 150.0), (0.0, 900.0))
    rounds = [
        {HERE: {LONG: 5100.0}, ON_RAY: {LONG: 5100.0 + near}, ELSEWHERE: {LONG: 5100.0 + far}} for near, far in added
    ]
    assert [check.value for check in ray_executor._checks(rounds)] == ["0 µs, 0.0%", "150 µs, 3.0%"]
