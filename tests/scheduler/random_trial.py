"""An engine of random sizes, random operations on it, and what must come of them whatever the sizes and operations."""

from __future__ import annotations

import random
from collections import Counter

from fake_model import expected_completion
from scheduler_driver import EOS, Driver

from ringcore.errors import InvalidRequestError

VOCAB_SIZE = 11  # small, so that the end of text comes by itself

SIZES = {
    "num_blocks": [9, 14, 12, 20, 6, 4],
    "groups": [
        [(4, None)],
        [(4, None), (4, 6)],
        [(2, None)],
        [(2, 5)],
        [(4, None), (2, 3)],
        [(3, None), (6, 4)],
        [(1, None)],
        [(2, None), (2, 4), (2, 9)],
    ],
    "max_num_seqs": [4, 3, 5, 2, 1],
    "budget": [16, 24, 8, 5, 3, 1],
    "chunk": [None, None, 5, 3, 1],
    "caching": [True, True, False],
    "depth": [2, 1],
    "num_stages": [1, 1, 2, 3],
    "max_steps": [1, 1, 4],
    "policy": ["fcfs", "priority"],
    "preempt_lower_priority": [False, True],
    "max_skip_ahead": [0, 16, 2, 1],
    "max_model_len": [30, 20, 6],
    "max_gain": [1, 1, 2, 5, 16],
    "speculative": [None, None, {"method": "mtp", "num_drafts": 4}],  # only for its positions behind a step
    "num_stored": [0, 0, 3, 20, 200],
    "failure_rate": [0.0, 0.0, 0.3],
}
REQUEST = {
    "num_shared": list(range(18)),  # prompts of one family, so that they begin alike
    "last": [1, 2, 3],
    "max_tokens": [8, 5, 3, None],
    "min_tokens": [0, 1, 3],
    "stop_token_ids": [[], [], [], [4], [EOS, 7]],
    "ignore_eos": [False, True],
    "prompt_logprobs": [None, None, None, 0, 2],
    "salt": [None, None, None, "a", ""],
    "priority": [0, 1, 2],
    "arrival_s": [0.0, 1.0],
    "kills_at": [None] * 14 + [0, 2],  # generated tokens at which it kills the workers
}


class Trial:
    """An engine of some sizes, and what each of its requests must come to."""

    def __init__(self, checks: bool = True, **sizes) -> None:
        sizes["preempt_lower_priority"] &= sizes["policy"] == "priority"
        self.engine = Driver(vocab_size=VOCAB_SIZE, checks=checks, **sizes)
        self.expected: dict[str, tuple[list[int], str]] = {}  # by id, in the order of arrival
        self.num_steps = 0
        self.num_poisoned = 0
        self.was_cleared = False
        self.num_other_deaths = 0  # of which no request is guilty
        self._completions: dict[str, dict] = {}  # what each request asks of the model
        self._places: dict[str, tuple] = {}  # where each request stands in the queue

    # Operations.

    def add(self, num_shared, last, salt, kills_at, priority, arrival_s, **params) -> None:
        prompt = [*([1, 2, 1, 2, 3] * 6)[:num_shared], last]
        number = len(self.expected)
        request_id = f"r{number}"
        limit, capacity = self.engine.max_model_len, self.engine.kv_cache.max_num_tokens
        servable = len(prompt) < limit and len(prompt) <= capacity
        try:
            self.engine.add(
                request_id, prompt, salt=salt, priority=priority, arrival_s=arrival_s, seed=number, **params
            )
        except InvalidRequestError:
            assert not servable
            return
        assert servable
        if kills_at is not None:
            self.engine.worker.killers[number] = len(prompt) + kills_at
        by_priority = self.engine.config.scheduling_policy == "priority"
        self._places[request_id] = (priority, arrival_s, number) if by_priority else (number,)
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

    def schedule(self) -> None:
        if len(self.engine.in_flight) < self.engine.depth:
            self.num_steps += self.engine.schedule() is not None

    def update(self) -> None:
        self.engine.finish_loads()
        if self.engine.in_flight:
            self.engine.update()

    def abort(self, index: int) -> None:
        request_id = f"r{index % (len(self.expected) or 1)}"
        alive = request_id in self.expected and self.engine.finish_reason(request_id) is None
        outputs = self.engine.abort(request_id, "unknown", request_id)
        assert [output.finish_reason for output in outputs] == ["abort"] * alive

    def poison(self, index: int) -> None:
        if rows := sorted(self.engine.worker.rows):
            self.engine.worker.rows[rows[index % len(rows)]].poisoned = True
            self.num_poisoned += 1

    def reset_prefix_cache(self, preempt_running: bool) -> None:
        none_runs = self.engine.scheduler.stats().num_running == 0
        assert self.engine.scheduler.reset_prefix_cache(preempt_running) == (none_runs or preempt_running)
        if preempt_running:
            if self.engine.scheduler.store is not None:
                self.engine.scheduler.store.clear()
            self.was_cleared = True
        self.engine.check()

    def pause(self, mode: str | None) -> None:
        if mode is None:
            self.engine.scheduler.resume()
        else:
            self.engine.scheduler.pause(mode)
        self.engine.check()

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

    def die_before_a_step_is_sent(self) -> None:
        if len(self.engine.in_flight) < self.engine.depth:
            self.engine.schedule_unsent()
            self.die()

    def _unfinished(self) -> set[str]:
        return {request_id for request_id in self.expected if self.engine.finish_reason(request_id) is None}

    # What must hold.

    def check_outputs(self) -> None:
        num_row_errors = 0
        for request_id, (expected, expected_reason) in self.expected.items():
            tokens, reason = self.engine.tokens(request_id), self.engine.finish_reason(request_id)
            assert tokens == expected[: len(tokens)]
            if reason in ("stop", "length"):
                assert (tokens, reason) == (expected, expected_reason)
            num_row_errors += reason == "error" and self.engine.outputs[request_id][-1].error.type == "WorkerError"
        assert num_row_errors <= self.num_poisoned
        self._check_refusals()
        self._check_order()

    def _check_refusals(self) -> None:
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

    def _check_order(self) -> None:
        """Of later requests that stand behind it in the queue, at most max_skip_ahead run before one first runs."""
        outputs = {request_id: outputs for request_id in self.expected if (outputs := self.engine.outputs[request_id])}
        ran = {request_id: own[-1].first_scheduled_s for request_id, own in outputs.items()}
        first = [(s, request_id) for request_id, s in ran.items() if s is not None]
        for number, request_id in enumerate(self.expected):
            began = ran.get(request_id)
            if request_id not in outputs or began is None:
                continue  # unknown yet, or it never ran
            place = self._places[request_id]
            earlier = [other for s, other in first if s < began and int(other[1:]) > number]
            num_passed = sum(self._places[other] > place for other in earlier)
            if self.engine.num_stored:
                continue  # while it loads, any number of others run
            assert num_passed <= self.engine.config.max_skip_ahead, f"{request_id} was passed {num_passed} times"

    def finish(self) -> None:
        self.engine.scheduler.resume()
        self.engine.drain()
        self.check_outputs()
        assert all(self.engine.finish_reason(request_id) for request_id in self.expected)
        assert self.engine.kv_cache.num_free_blocks == self.engine.kv_cache.num_usable_blocks
        assert self.was_cleared or not self.engine.worker.num_lost, "the store evicted what was being loaded"
        stats = self.engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        self.num_steps = stats.step


def random_trial(seed: int, *, deaths: bool, num_rounds: int = 6, checks: bool = True) -> Trial:
    """A schedule: rounds of arrivals, other operations and a few steps, then drained."""
    rng = random.Random(seed)
    trial = Trial(checks, **{name: rng.choice(values) for name, values in SIZES.items()})
    for _ in range(rng.randint(1, num_rounds)):
        for _ in range(rng.choice([0, 1, 1, 3])):
            request = {name: rng.choice(values) for name, values in REQUEST.items()}
            trial.add(**request | ({} if deaths else {"kills_at": None}))
        match rng.randrange(40):
            case 0 | 1 | 2 | 3 | 4:
                trial.abort(rng.randrange(100))
            case 5:
                trial.poison(rng.randrange(10))
            case 6 | 7:
                trial.reset_prefix_cache(rng.random() < 0.5)
            case 8 | 9:
                trial.pause(rng.choice(["new", "all", None]))
            case 10 | 11 if deaths:
                trial.die(rng.choice([None, None, *SIZES["num_blocks"]]))
            case 12 if deaths:
                trial.die_before_a_step_is_sent()
            case _:
                trial.pause(None)
        for _ in range(rng.randint(0, 6)):
            if len(trial.engine.in_flight) == trial.engine.depth or rng.random() < 0.4:
                trial.update()
            else:
                trial.schedule()
    trial.finish()
    return trial
