"""Any sequence of operations and deaths, on any sizes: nothing leaks, nothing hangs, every token is the model's."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from fake_model import expected_completion
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_driver import EOS, Driver

from ringcore.errors import InvalidRequestError

VOCAB_SIZE = 11  # small, so that the end of text comes by itself

SIZES = {
    "num_blocks": [6, 9, 12, 14, 4, 2],
    "block_size": [4, 2, 3, 5, 1],
    "max_num_seqs": [4, 3, 5, 2, 1],
    "budget": [16, 24, 8, 3, 1],
    "chunk": [None, 5, 3, 1],
    "caching": [True, True, False],
    "depth": [2, 1],
    "max_model_len": [1000, 20, 6],
}
REQUEST = {
    "num_shared": list(range(27)),  # prompts of one family, so that they begin alike
    "last": [1, 2, 3],
    "max_tokens": [30, 12, 7, 3, None],
    "min_tokens": [0, 1, 3],
    "stop_token_ids": [[], [], [], [4], [EOS, 7]],
    "ignore_eos": [True, True, False],
    "salt": [None, None, None, "a", ""],
    "kills_at": [None] * 9 + [0, 2],  # generated tokens at which it kills the workers
}


class Trial:
    """An engine of some sizes, and what each of its requests must come to."""

    def __init__(self, **sizes) -> None:
        self.engine = Driver(vocab_size=VOCAB_SIZE, **sizes)
        self.expected: dict[str, tuple[list[int], str]] = {}  # by id, in the order of arrival
        self.num_poisoned = 0
        self.num_other_deaths = 0  # of which no request is guilty
        self._completions: dict[str, dict] = {}  # what each request asks of the model

    def add(self, num_shared, last, salt, kills_at, **params) -> None:
        prompt = [*([1, 2, 1, 2, 3] * 6)[:num_shared], last]
        request_id = f"r{len(self.expected)}"
        limit, capacity = self.engine.max_model_len, self.engine.kv_cache.max_num_tokens
        servable = len(prompt) < limit and len(prompt) <= capacity
        try:
            self.engine.add(request_id, prompt, salt=salt, seed=len(self.expected), **params)
        except InvalidRequestError:
            assert not servable
            return
        assert servable
        if kills_at is not None:
            self.engine.worker.killers[len(self.expected)] = len(prompt) + kills_at
        self._completions[request_id] = {
            "prompt": prompt,
            "vocab_size": VOCAB_SIZE,
            "stop_token_ids": ([] if params["ignore_eos"] else [EOS]) + params["stop_token_ids"],
            "min_tokens": params["min_tokens"],
            "max_total_tokens": min(limit, len(prompt) + (params["max_tokens"] or limit)),
        }
        self._expect(request_id)

    def _expect(self, request_id: str) -> None:
        """A request ends where the smallest cache that it has met does, if not before."""
        what = self._completions[request_id]
        what["max_total_tokens"] = min(what["max_total_tokens"], self.engine.kv_cache.max_num_tokens + 1)
        self.expected[request_id] = expected_completion(**what)

    def abort(self, index: int) -> None:
        request_id = f"r{index % (len(self.expected) or 1)}"
        alive = request_id in self.expected and self.engine.finish_reason(request_id) is None
        outputs = self.engine.abort(request_id, "unknown", request_id)
        assert [output.finish_reason for output in outputs] == ["abort"] * alive

    def poison(self, index: int) -> None:
        if rows := sorted(self.engine.worker.rows):
            self.engine.worker.rows[rows[index % len(rows)]].poisoned = True
            self.num_poisoned += 1

    def die(self, num_blocks: int | None = None) -> None:
        """The workers die of something else. Another cache may come after them: what does not fit it is refused."""
        self.num_other_deaths += 1
        unfinished = self._unfinished()
        outputs = self.engine.die(num_blocks=num_blocks)
        refused = {output.request_id for output in outputs if output.error.type == "CapacityError"}
        capacity = self.engine.kv_cache.max_num_tokens
        for request_id in unfinished - {output.request_id for output in outputs} | refused:
            num_known = len(self._completions[request_id]["prompt"]) + len(self.engine.tokens(request_id))
            assert (request_id in refused) == (num_known > capacity)
        for request_id in self._unfinished():
            self._expect(request_id)

    def _unfinished(self) -> set[str]:
        return {request_id for request_id in self.expected if self.engine.finish_reason(request_id) is None}

    def check_refusals(self) -> None:
        """Who is refused for killing was in a step that was lost twice, the second time alone."""
        refused = set()
        for request_id, outputs in self.engine.outputs.items():
            if not outputs or outputs[-1].error is None or outputs[-1].error.type != "WorkerDiedError":
                continue
            refused.add(seed := int(request_id[1:]))
            among = [death for death in self.engine.deaths if any(seed in step for step in death.lost)]
            assert len(among) >= 2
            assert all(step == {seed} for step in among[-1].lost)
            if not self.num_other_deaths:
                assert among[-1].killer == seed
        kills = Counter(death.killer for death in self.engine.deaths if death.killer is not None)
        assert all(count <= 2 for count in kills.values()), "a killer was let in again"
        assert {seed for seed, count in kills.items() if count == 2} <= refused

    def reset_prefix_cache(self) -> None:
        stats = self.engine.scheduler.stats()
        assert self.engine.scheduler.reset_prefix_cache() == (stats.num_running == 0)
        self.engine.scheduler.check()

    def check_outputs(self) -> None:
        num_row_errors = 0
        for request_id, (expected, expected_reason) in self.expected.items():
            tokens, reason = self.engine.tokens(request_id), self.engine.finish_reason(request_id)
            assert tokens == expected[: len(tokens)]
            if reason in ("stop", "length"):
                assert (tokens, reason) == (expected, expected_reason)
            num_row_errors += reason == "error" and self.engine.outputs[request_id][-1].error.type == "WorkerError"
        assert num_row_errors <= self.num_poisoned
        self.check_refusals()
        # First come, first served: no request is first scheduled before one that arrived earlier.
        outputs = [self.engine.outputs[request_id] for request_id in self.expected]
        first = [o[-1].first_scheduled_s for o in outputs if o and o[-1].first_scheduled_s is not None]
        assert first == sorted(first)

    def finish(self) -> None:
        self.engine.drain()
        self.check_outputs()
        assert all(self.engine.finish_reason(request_id) for request_id in self.expected)
        assert self.engine.kv_cache.num_free_blocks == self.engine.kv_cache.num_usable_blocks
        stats = self.engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


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
        if len(self.trial.engine.in_flight) < self.trial.engine.depth:
            self.trial.engine.schedule()

    @rule()
    def update(self) -> None:
        if self.trial.engine.in_flight:
            self.trial.engine.update()

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
        if len(self.trial.engine.in_flight) < self.trial.engine.depth:
            self.trial.engine.schedule_unsent()
            self.trial.die()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.trial.reset_prefix_cache()

    @invariant()
    def outputs_are_right(self) -> None:
        if hasattr(self, "trial"):
            self.trial.check_outputs()

    def teardown(self) -> None:
        if hasattr(self, "trial"):
            self.trial.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase


def crowded_trial(seed: int, deaths: bool = False) -> Trial:
    """A crowd of requests with operations between their steps; denser than what shrinks well."""
    rng = random.Random(seed)
    trial = Trial(**{name: rng.choice(values) for name, values in SIZES.items()})
    for _ in range(rng.randint(1, 25)):
        for _ in range(rng.choice([0, 1, 1, 4])):
            trial.add(**{name: rng.choice(values) for name, values in REQUEST.items()})
        if rng.random() < 0.15:
            trial.abort(rng.randrange(100))
        if rng.random() < 0.04:
            trial.poison(rng.randrange(10))
        if rng.random() < 0.05:
            trial.reset_prefix_cache()
        if deaths and rng.random() < 0.1:
            trial.die(rng.choice([None, None, *SIZES["num_blocks"]]))
        for _ in range(rng.randint(0, 6)):
            if trial.engine.in_flight and (len(trial.engine.in_flight) == trial.engine.depth or rng.random() < 0.4):
                trial.engine.update()
            else:
                trial.engine.schedule()
    trial.finish()
    return trial


@pytest.mark.parametrize("first_seed", range(0, 120, 20))
@pytest.mark.parametrize("deaths", [False, True])
def test_crowds(first_seed, deaths):
    for seed in range(first_seed, first_seed + 20):
        crowded_trial(seed, deaths)


def test_crowds_meet_what_they_are_for():
    """Preemption, prefix hits and killers happen in the crowds; else they would prove little."""
    trials = [crowded_trial(seed) for seed in range(30)]
    for depth in (1, 2):
        stats = [t.engine.scheduler.stats() for t in trials if t.engine.depth == depth]
        assert sum(one.num_preemptions for one in stats) > 20
        assert sum(one.num_prefix_hit_tokens for one in stats) > 20
    reasons = {trial.engine.finish_reason(request_id) for trial in trials for request_id in trial.expected}
    assert reasons == {"stop", "length", "abort", "error"}
    kills = [Counter(death.killer for death in trial.engine.deaths) for trial in trials]
    assert sum(len(one) for one in kills) > 20
    assert sum(len(one) > 1 for one in kills) > 3, "several killers in one crowd"
