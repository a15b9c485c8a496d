"""Any sequence of operations and deaths, on any sizes: nothing leaks, nothing hangs, every token is the model's.

`Scheduler.check` is called after every operation. A schedule is one random engine with its requests and operations, run
until it is drained. The long form (`--chaos-long`, or RINGCORE_CHAOS_LONG=1) goes on to a million steps.
"""

from __future__ import annotations

import math
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from random_trial import REQUEST, SIZES, Trial, random_trial
from samples import num_examples

NUM_SCHEDULES, NUM_PARTS = 480, 4
NUM_STEPS_LONG = 1_000_000


def one_each(table: dict) -> st.SearchStrategy:
    """One value a name, all from one drawn integer (many draws would cost more than the scheduler); 0 is the firsts."""

    def choose(number: int) -> dict:
        chosen = {}
        for name, values in table.items():
            number, index = divmod(number, len(values))
            chosen[name] = values[index]
        return chosen

    return st.integers(0, math.prod(map(len, table.values())) - 1).map(choose)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(sizes=one_each(SIZES))
    def start(self, sizes) -> None:
        self.trial = Trial(**sizes)

    @rule(requests=st.lists(one_each(REQUEST), min_size=1, max_size=5))
    def add(self, requests) -> None:
        for request in requests:
            self.trial.add(**request)

    @rule(index=st.integers(0, 30))
    def abort(self, index) -> None:
        self.trial.abort(index)

    @rule()
    def schedule(self) -> None:
        self.trial.schedule()

    @rule()
    def update(self) -> None:
        self.trial.update()

    @rule(count=st.integers(3, 20))
    def several_steps(self, count) -> None:
        for _ in range(count):
            self.trial.engine.step()

    @rule(index=st.integers(0, 10))
    def poison(self, index) -> None:
        self.trial.poison(index)

    @rule(num_blocks=st.sampled_from([None, None, *SIZES["num_blocks"]]))
    def die(self, num_blocks) -> None:
        self.trial.die(num_blocks)

    @rule()
    def die_before_a_step_is_sent(self) -> None:
        self.trial.die_before_a_step_is_sent()

    @rule(preempt_running=st.booleans())
    def reset_prefix_cache(self, preempt_running) -> None:
        self.trial.reset_prefix_cache(preempt_running)

    @rule(mode=st.sampled_from(["new", "all", None, None]))
    def pause(self, mode) -> None:
        self.trial.pause(mode)

    @invariant()
    def outputs_are_right(self) -> None:
        if hasattr(self, "trial"):
            self.trial.check_outputs()

    def teardown(self) -> None:
        if hasattr(self, "trial"):
            self.trial.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=num_examples(40, 100),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long_form) for part in range(1, NUM_PARTS))]
)
def test_random_schedules(part):
    """One in four with deaths of the workers."""
    size = NUM_SCHEDULES // NUM_PARTS
    for seed in range(part * size, (part + 1) * size):
        random_trial(seed, deaths=seed % 4 == 0)


@pytest.mark.timeout(4 * 3600)
def test_a_million_steps(is_long):
    """Each schedule is named by its seed: RINGCORE_CHAOS_SEED begins with another one."""
    if not is_long:
        pytest.skip("the long form: --chaos-long")
    seed = NUM_SCHEDULES + int(os.environ.get("RINGCORE_CHAOS_SEED") or 0)
    num_steps = 0
    while num_steps < NUM_STEPS_LONG:
        num_steps += random_trial(seed, deaths=seed % 4 == 0, num_rounds=40).num_steps
        seed += 1


def test_random_schedules_meet_what_they_are_for():
    """Preemptions, prefix hits, ends of every kind and killers happen in them; else they would prove little."""
    trials = [random_trial(seed, deaths=seed % 4 == 0, checks=False) for seed in range(200)]  # the first of them
    for depth in (1, 2):
        for has_windows in (False, True):
            of_kind = [t.engine for t in trials if t.engine.config.steps_in_flight == depth]
            of_kind = [engine for engine in of_kind if engine.kv_cache.has_windows == has_windows]
            stats = [engine.scheduler.stats() for engine in of_kind]
            assert sum(one.num_preemptions for one in stats) > 20
            assert sum(one.num_prefix_hit_tokens for one in stats) > 20
            assert sum(engine.worker.num_accepted_drafts for engine in of_kind) > 20
            assert sum(engine.worker.num_rejected_drafts for engine in of_kind) > 20
    reasons = {trial.engine.finish_reason(request_id) for trial in trials for request_id in trial.expected}
    assert reasons == {"stop", "length", "abort", "error"}
    kills = [Counter(death.killer for death in trial.engine.deaths) for trial in trials]
    assert sum(len(one) for one in kills) > 20
    assert sum(len(one) > 1 for one in kills) > 3, "several killers in one of them"
