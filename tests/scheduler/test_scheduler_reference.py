"""The columnar scheduler and the one of `reference_scheduler.py` decide the same, step by step."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_scheduler import ReferenceRequest, ReferenceScheduler
from samples import num_examples
from scheduler_driver import Driver

OPTIONS = {
    "num_blocks": [6, 8, 11, 4, 3],
    "block_size": [4, 2, 3, 1],
    "max_num_seqs": [4, 8, 3, 2, 1],
    "budget": [16, 8, 5, 3, 1],
    "chunk": [None, 5, 3, 1],
    "policy": ["fcfs", "priority"],
    "preempt_lower_priority": [False, True],
    "max_skip_ahead": [0, 1, 2, 16],
}


class Pair:
    """Both schedulers, given the same."""

    def __init__(self, options: dict) -> None:
        self.by_priority = options["policy"] == "priority"
        options["preempt_lower_priority"] &= self.by_priority
        self.engine = Driver(caching=False, max_model_len=40, vocab_size=50, checks=False, **options)
        self.reference = ReferenceScheduler(self.engine.config, options["num_blocks"], options["block_size"])
        self.num_requests = 0
        self.num_preemptions = 0

    def add(self, num_tokens: int, max_tokens: int, priority: int, arrival_s: int) -> None:
        """A request, if it can ever fit."""
        capacity = self.engine.kv_cache.max_num_tokens
        if num_tokens > capacity:
            return
        sequence = self.num_requests
        self.num_requests += 1
        self.engine.add(
            f"r{sequence}",
            [sequence % 50] * num_tokens,
            max_tokens=max_tokens,
            priority=priority,
            arrival_s=float(arrival_s),
            seed=sequence,
        )
        place = {"priority": priority, "arrival_s": float(arrival_s)} if self.by_priority else {}
        max_total_tokens = min(num_tokens + max_tokens, capacity + 1, 40)
        self.reference.waiting.append(ReferenceRequest(sequence, num_tokens, max_total_tokens, **place))

    def abort(self, number: int) -> None:
        if self.num_requests:
            sequence = number % self.num_requests
            self.engine.abort(f"r{sequence}")
            self.reference.remove({sequence})

    def step(self) -> None:
        """A step of each, and all that they decided compared."""
        running_before = {request.sequence for request in self.reference.running}
        self.reference.schedule()
        scheduled = self.engine.schedule()
        if scheduled is None:
            assert not self.reference.work
            return
        assert list(self.engine.work_by_seed.items()) == list(self.reference.work.items()), "who, how much, in order"
        self.num_preemptions += len(self.reference.preempted)
        assert self.engine.scheduler.stats().num_preemptions == self.num_preemptions
        preempted = {seed for seed in self.engine.given_back if self.engine.finish_reason(f"r{seed}") is None}
        assert preempted == self.reference.preempted <= running_before
        finished = {output.request_id for output in self.engine.update() if output.finish_reason}
        assert finished == {f"r{sequence}" for sequence in self.reference.update()}
        assert self.engine.scheduler.stats().num_running == len(self.reference.running)
        num_free = self.reference.num_usable - sum(request.num_blocks for request in self.reference.running)
        assert self.engine.kv_cache.num_free_blocks == num_free

    def drain(self) -> None:
        for _ in range(3000):
            if not self.engine.scheduler.has_unfinished:
                break
            self.step()
        assert not self.reference.running
        assert not self.reference.waiting


request_numbers = st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.integers(0, 2))
operations = st.one_of(
    st.lists(request_numbers, min_size=1, max_size=4),
    st.integers(0, 20),  # an abort
    st.none(),  # a step
)


@given(options=st.fixed_dictionaries({k: st.sampled_from(v) for k, v in OPTIONS.items()}), what=st.lists(operations))
@settings(max_examples=num_examples(80, 200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_agree_on_any_operations(options, what):
    pair = Pair(options)
    for one in what:
        match one:
            case None:
                pair.step()
            case int():
                pair.abort(one)
            case _:
                for numbers in one:
                    pair.add(*numbers)
    pair.drain()


def crowd(rng: random.Random, options: dict) -> Pair:
    pair = Pair({name: rng.choice(values) for name, values in OPTIONS.items()} | options)
    for _ in range(rng.randint(1, 12)):
        for _ in range(rng.choice([0, 1, 1, 4])):
            pair.add(rng.randint(1, 20), rng.randint(1, 12), rng.randrange(3), rng.randrange(3))
        if rng.random() < 0.1:
            pair.abort(rng.randrange(100))
        for _ in range(rng.randint(0, 5)):
            pair.step()
    pair.drain()
    return pair


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "fcfs"},
        {"policy": "priority", "preempt_lower_priority": False},
        {"policy": "priority", "preempt_lower_priority": True},
    ],
    ids=["fcfs", "priority", "preempt_lower_priority"],
)
def test_agree_on_crowds(options):
    rng = random.Random(str(options))
    pairs = [crowd(rng, options) for _ in range(150)]
    assert sum(pair.num_preemptions for pair in pairs) > 50, "else it would prove little"
