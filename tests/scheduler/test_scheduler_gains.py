"""Rows that gain several tokens in a step: bounds when it is scheduled, numbers with its output. Blocks of 4."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import completion, num_accepted
from random_trial import random_trial
from scheduler_driver import Driver

from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.scheduler.running_table import RunningTable

A = list(range(1, 9))  # two blocks
B = list(range(11, 19))


def gains(seed: int, num_prompt_tokens: int, num_tokens: int, max_gain: int) -> list[int]:
    """What each step adds to a request that runs alone, one step in flight, without a limit of blocks or budget."""
    position, end, found = num_prompt_tokens + 1, num_prompt_tokens + num_tokens, [1]
    while position < end:
        found.append(1 + num_accepted(seed, position, min(max_gain, end - position) - 1))
        position += found[-1]
    return found


def lengths(engine: Driver, name: str) -> list[int]:
    return [len(output.new_token_ids) for output in engine.outputs[name]]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_gain", [2, 3, 6])
def test_the_tokens_are_those_of_one_at_a_time(depth, max_gain):
    engine = Driver(num_blocks=40, depth=depth, max_gain=max_gain)
    for seed, prompt in enumerate([A, B, A[:5]]):
        engine.add(f"{seed}", prompt, seed=seed, max_tokens=20)
    engine.drain()
    assert [engine.tokens(f"{seed}") for seed in range(3)] == [completion(p, 20) for p in (A, B, A[:5])]
    assert engine.worker.num_accepted_drafts > 10


def test_each_step_adds_what_the_model_accepts():
    engine = Driver(num_blocks=40, max_gain=4)
    engine.add("a", A, seed=1, max_tokens=20)
    engine.drain()
    assert lengths(engine, "a") == gains(1, 8, 20, 4)
    assert len(set(lengths(engine, "a"))) > 2
    assert engine.tokens("a") == completion(A, 20)


def test_a_step_without_drafts_says_nothing_of_them():
    engine = Driver(max_gain=4)
    engine.add("a", A, seed=3, max_tokens=3)  # this one gains one token at a time
    steps = []
    while engine.scheduler.has_unfinished:
        steps.append(engine.schedule())
        assert engine.in_flight[0][1].num_gained is None
        engine.update()
    assert [step.max_gained for step in steps] == [None] * 3


def test_the_most_that_each_row_may_gain():
    engine = Driver(num_blocks=40, max_gain=4)
    engine.add("a", A, seed=1, max_tokens=20)
    engine.add("b", B, seed=3, max_tokens=20)
    assert engine.schedule().max_gained is None, "prompts have no drafts"
    engine.update()
    step = engine.schedule()
    assert step.max_gained.tolist() == [4, 1]
    assert (step.num_scheduled_tokens, step.num_tokens, step.num_steps) == (None, 2, 1)


def test_a_chunk_has_no_drafts():
    engine = Driver(num_blocks=40, budget=6, max_gain=4)
    engine.add("a", A, seed=1, max_tokens=9)
    assert engine.schedule().max_gained is None
    engine.update()
    assert engine.schedule().max_gained is None
    engine.update()
    assert engine.schedule().max_gained.tolist() == [4]


def test_never_past_the_last_token():
    engine = Driver(num_blocks=40, max_gain=16)
    engine.add("a", A, seed=1, max_tokens=6)
    engine.schedule()
    engine.update()
    assert engine.schedule().max_gained.tolist() == [5]
    engine.drain()
    assert engine.tokens("a") == completion(A, 6)


def test_the_next_step_does_not_wait_for_the_number():
    """Two in flight: the second one has blocks for the case that the first accepts everything."""
    engine = Driver(num_blocks=40, depth=2, max_gain=4)
    engine.add("a", A, seed=1, max_tokens=20)
    engine.schedule()
    assert engine.schedule().max_gained.tolist() == [4]  # tokens 9 to 12 at most
    engine.update()
    step = engine.schedule()
    assert step.max_gained.tolist() == [4]
    assert sum(len(new.block_ids) for new in step.new_blocks) == 1  # for 16 tokens at most
    engine.drain()
    assert engine.tokens("a") == completion(A, 20)


def test_near_its_end_it_waits_for_the_number():
    engine = Driver(num_blocks=40, depth=2, max_gain=4)
    engine.add("a", A, seed=1, max_tokens=5)
    engine.add("b", B, seed=3, max_tokens=5)
    engine.schedule()
    assert engine.schedule().max_gained.tolist() == [4, 1]
    engine.update()
    assert engine.launch() == {1: 1}, "a may have all of its tokens"
    engine.drain()
    assert [engine.tokens(name) for name in "ab"] == [completion(A, 5), completion(B, 5)]


class TestOthersAreNotSlowed:
    def test_drafts_take_what_is_left_of_the_budget(self):
        engine = Driver(num_blocks=40, budget=16, max_gain=16)
        for seed, name in [(1, "a"), (3, "b")]:
            engine.add(name, A if name == "a" else B, seed=seed, max_tokens=40)
        engine.step()
        engine.add("c", list(range(20, 29)), seed=7, max_tokens=2)
        step = engine.schedule()
        assert engine.work == {0: 1, 1: 1, 2: 9}
        assert step.max_gained.tolist() == [6, 1, 1], "16 - 11 drafts"

    def test_the_oldest_first(self):
        engine = Driver(num_blocks=40, budget=16, max_gain=10)
        engine.add("a", A, seed=1, max_tokens=40)
        engine.add("b", B, seed=2, max_tokens=40)
        engine.step()
        assert engine.schedule().max_gained.tolist() == [10, 6]

    def test_no_more_than_a_row_computes_in_a_step(self):
        engine = Driver(num_blocks=40, chunk=3, max_gain=10)
        engine.add("a", A, seed=1, max_tokens=40)
        for _ in range(3):
            engine.step()
        assert engine.schedule().max_gained.tolist() == [3]

    def test_drafts_preempt_nobody(self):
        """Five usable blocks, all in use: three of a and two of b. Each drafts into the slots that it has."""
        engine = Driver(num_blocks=6, max_gain=9)
        engine.add("a", [*A, 9], seed=1, max_tokens=4)
        engine.add("b", B[:7], seed=2, max_tokens=2)
        engine.step()
        assert engine.scheduler.stats().num_free_blocks == 0
        assert engine.schedule().max_gained.tolist() == [3, 1]
        engine.drain()
        assert engine.scheduler.stats().num_preemptions == 0

    def test_without_the_blocks_of_all_each_fills_its_own(self):
        """One block is free and two rows would need one: neither gets it, and both draft up to their last slot."""
        engine = Driver(num_blocks=6, max_gain=9)
        engine.add("a", A[:6], seed=1, max_tokens=9)
        engine.add("b", B[:6], seed=2, max_tokens=9)
        engine.step()
        assert engine.scheduler.stats().num_free_blocks == 1
        step = engine.schedule()
        assert (step.max_gained.tolist(), step.new_blocks) == ([2, 2], [])


HEAD = {"method": "mtp", "num_drafts": 3}  # which drafts at 2 positions behind a step's


class TestLookahead:
    """A head drafts for the next step behind the drafts of this one: it writes there too."""

    def capacity(self, engine: Driver) -> list[int]:
        """After the second step, in which a has 9 tokens and 3 drafts."""
        engine.step()
        engine.schedule()
        return engine.kv_cache.capacity[: len(engine.outputs)].tolist()

    @pytest.mark.parametrize(("speculative", "blocks"), [(HEAD, 4), ({"method": "suffix"}, 3)])
    def test_positions_behind_drafts_have_blocks(self, speculative, blocks):
        engine = Driver(num_blocks=40, max_gain=4, speculative=speculative)
        engine.add("a", A, seed=1, max_tokens=20)
        assert self.capacity(engine) == [4 * blocks]

    def test_a_step_with_them_has_at_most_the_tokens_of_a_row(self):
        """For which a row with a window was admitted: here 4, which are its last token and 3 drafts."""
        engine = Driver(num_blocks=40, max_gain=4, speculative=HEAD, chunk=4)
        engine.add("a", A, seed=1, max_tokens=20)
        for _ in range(2):  # its prompt
            engine.step()
        assert engine.schedule().max_gained.tolist() == [4]
        assert engine.kv_cache.capacity[:1].tolist() == [12]

    def test_not_behind_the_end(self):
        engine = Driver(num_blocks=40, max_gain=4, speculative=HEAD)
        engine.add("a", A, seed=1, max_tokens=4)
        assert self.capacity(engine) == [12]

    def test_drafts_come_first(self):
        """One block is free: the drafts have it, and behind them is nothing."""
        engine = Driver(num_blocks=4, max_gain=4, speculative=HEAD)
        engine.add("a", A, seed=1, max_tokens=20)
        engine.step()
        assert engine.scheduler.stats().num_free_blocks == 1
        assert engine.schedule().max_gained.tolist() == [4]
        assert engine.scheduler.stats().num_free_blocks == 0

    @pytest.mark.parametrize("depth", [1, 2])
    def test_the_tokens_stay_the_same(self, depth):
        engine = Driver(num_blocks=12, depth=depth, max_gain=4, speculative=HEAD)
        for seed, prompt in enumerate([A, B, A[:5]]):
            engine.add(f"{seed}", prompt, seed=seed, max_tokens=20)
        engine.drain()
        assert [engine.tokens(f"{seed}") for seed in range(3)] == [completion(p, 20) for p in (A, B, A[:5])]


class TestEnds:
    def first_gain_of_three(self) -> tuple[int, int]:
        """A seed whose second step adds at least three tokens, and how many tokens it has before that."""
        return next((seed, 1) for seed in (1, 2, 4, 5, 6) if gains(seed, 8, 20, 6)[1] >= 3)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_stop_token_in_the_middle(self, depth):
        seed, before = self.first_gain_of_three()
        stop = completion(A, 20)[before + 1]
        engine = Driver(num_blocks=40, depth=depth, max_gain=6)
        engine.add("a", A, seed=seed, max_tokens=20, stop_token_ids=[stop])
        engine.drain()
        assert engine.tokens("a") == completion(A, before + 2)
        assert engine.finish_reason("a") == "stop"
        assert lengths(engine, "a") == [1, 2]

    def test_min_tokens_in_the_middle(self):
        """The same stop token, masked until one token later: the text differs, and ends where it may."""
        seed, before = self.first_gain_of_three()
        stop = completion(A, 20)[before + 1]
        texts = []
        for max_gain in (1, 6):
            engine = Driver(num_blocks=40, max_gain=max_gain)
            engine.add("a", A, seed=seed, max_tokens=20, stop_token_ids=[stop], min_tokens=before + 3)
            engine.drain()
            texts.append((engine.tokens("a"), engine.finish_reason("a")))
        assert texts[0] == texts[1]
        assert texts[0][0][: before + 2] != completion(A, before + 2)

    def test_a_failing_row_gains_nothing(self):
        engine = Driver(num_blocks=40, max_gain=4)
        engine.add("a", A, seed=1, max_tokens=20)
        engine.add("b", B, seed=2, max_tokens=20)
        engine.step()
        engine.worker.rows[0].poisoned = True
        engine.drain()
        assert (engine.finish_reason("a"), engine.tokens("a")) == ("error", completion(A, 1))
        assert engine.tokens("b") == completion(B, 20)

    def test_an_abort_with_drafts_in_flight(self):
        engine = Driver(num_blocks=8, depth=2, max_gain=6)
        engine.add("a", A, seed=1, max_tokens=15)
        engine.schedule()
        engine.schedule()
        engine.abort("a")
        engine.add("b", list(range(20, 44)), seed=2, max_tokens=2)  # in the same row and blocks
        engine.drain()
        assert (engine.tokens("a"), engine.tokens("b")) == ([], completion(list(range(20, 44)), 2))


def test_a_prefix_has_no_rejected_draft():
    """The second request hits the text of the first one, which had rejected drafts in its slots."""
    engine = Driver(num_blocks=40, max_gain=6)
    engine.add("a", A, seed=2, max_tokens=13)
    engine.drain()
    text = A + completion(A, 13)
    engine.add("b", [*text, 40], seed=1, max_tokens=3)
    engine.step()
    assert engine.worker.rows[0].num_cached_tokens == 20
    engine.drain()
    assert engine.tokens("b") == completion([*text, 40], 3)


@pytest.mark.parametrize(
    ("num_gained", "num_tokens"), [([5, 1], 6), ([1, 2], 3), ([0, 1], 1), ([2, 1], 2), ([3], 3)], ids=str
)
def test_an_output_that_no_worker_may_give(num_gained, num_tokens):
    """The first row may gain one to four tokens, the second one; anything else is our bug, and noticed at once."""
    engine = Driver(num_blocks=40, max_gain=4)
    engine.add("a", A, seed=1, max_tokens=20)
    engine.add("b", B, seed=3, max_tokens=20)
    engine.step()
    step = engine.scheduler.schedule()
    wrong = ModelRunnerOutput(step.step, None, int_array(range(num_tokens)), num_gained=int_array(num_gained))
    with pytest.raises(AssertionError, match=rf"^step {step.step}: "):
        engine.scheduler.update(step, wrong)


def _wrong_gains(count_of):
    def confirm_gains(table, positions, most, gained):
        counted = np.minimum(count_of(gained), most)
        table.computed[positions] -= most - counted
        table.total[positions] -= most - counted
        table.confirmed[positions] += counted - 1

    return confirm_gains


@pytest.mark.parametrize("change", [1, -1])
def test_a_miscount_does_not_go_unnoticed(monkeypatch, change):
    """One too many, or too few, of the tokens that rows gained: the random schedules would find it."""
    monkeypatch.setattr(RunningTable, "confirm_gains", _wrong_gains(lambda gained: gained + change))
    found = 0
    for seed in range(60):
        try:
            random_trial(seed, deaths=False)
        except (AssertionError, IndexError):
            found += 1
    assert found > 5
