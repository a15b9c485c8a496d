"""What becomes of requests when the workers die. Prompts of 8 tokens, blocks of 4."""

from __future__ import annotations

import pytest
from fake_model import completion
from scheduler_driver import Driver

from ringcore.errors import CapacityError, WorkerDiedError, error_from_wire

PROMPTS = {name: [10 * i + k for k in range(1, 9)] for i, name in enumerate("abcd")}


def make(names: str = "abc", *, max_tokens: int = 9, num_blocks: int = 40, **options) -> Driver:
    """A driver with these requests; the seed of each is its place in the alphabet."""
    engine = Driver(num_blocks=num_blocks, **options)
    for name in names:
        engine.add(name, PROMPTS[name], max_tokens=max_tokens, seed=seed(name))
    return engine


def seed(name: str) -> int:
    return ord(name) - ord("a")


def seeds_of_next_steps(engine: Driver, count: int) -> list[set[int]]:
    """Who is in each of the next steps."""
    seen = []
    for _ in range(count):
        engine.schedule()
        seen.append(set(engine.work_by_seed))
        engine.update()
    return seen


def finish(engine: Driver, names: str = "abc", max_tokens: int = 9) -> None:
    engine.drain()
    for name in names:
        assert engine.tokens(name) == completion(PROMPTS[name], max_tokens)
        assert engine.finish_reason(name) == "length"
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_usable_blocks


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("steps_before", range(8))
def test_no_token_is_lost_or_repeated(depth, caching, steps_before):
    engine = make(depth=depth, caching=caching, budget=11)
    for _ in range(steps_before):
        engine.step()
    engine.die()
    finish(engine)


class TestWithoutASuspect:
    def test_all_run_on_together(self):
        engine = make(depth=1)
        engine.step()
        engine.die()  # the step has come back: nobody computed anything when they died
        assert engine.schedule().finished_rows.tolist() == [], "the new workers know no row"
        assert engine.work == {0: 9, 1: 9, 2: 9}
        finish(engine)

    def test_a_step_that_no_worker_got_accuses_nobody(self):
        engine = make(depth=2)
        engine.schedule_unsent()
        engine.die()
        assert seeds_of_next_steps(engine, 1) == [{0, 1, 2}]
        finish(engine)

    def test_with_nothing_to_do(self):
        engine = make("")
        assert engine.die() == []
        engine.add("a", PROMPTS["a"], max_tokens=9)
        finish(engine, "a")

    def test_those_who_wait_keep_their_place(self):
        engine = make("abcd", max_num_seqs=2, depth=1)
        engine.step()
        engine.die()
        assert seeds_of_next_steps(engine, 1) == [{0, 1}]
        finish(engine, "abcd")

    def test_the_prefix_cache_is_empty_and_works_again(self):
        engine = make("a", max_tokens=1)
        engine.drain()
        engine.add("b", PROMPTS["a"], max_tokens=4)
        engine.step()
        assert engine.outputs["b"][-1].num_cached_tokens == 7
        engine.die()
        assert engine.launch() == {0: 9}, "what the cache had is gone"
        engine.update()
        engine.add("c", PROMPTS["a"], max_tokens=1)
        engine.drain()
        assert engine.outputs["c"][-1].num_cached_tokens == 7, "the names of blocks are those of the new cache"


class TestTrials:
    def test_alone_in_order_then_all_together_as_before(self):
        engine = make("abcd", max_num_seqs=3, depth=1)
        engine.step()
        engine.schedule()
        engine.die()
        # Each computes its 8 + 1 tokens again, alone; then the three run on, and "d" waits as it did.
        assert seeds_of_next_steps(engine, 4) == [{0}, {1}, {2}, {0, 1, 2}]
        finish(engine, "abcd")

    def test_a_trial_ends_where_the_lost_steps_would_have(self):
        engine = make("ab", depth=2)
        engine.schedule()
        engine.schedule()
        engine.die()  # two steps: 8 tokens and 1
        assert [engine.launch() for _ in range(2)] == [{0: 8}, {0: 1}]
        assert engine.schedule() is None, "neither further, nor the next one while these are in flight"
        engine.update()
        engine.update()
        assert seeds_of_next_steps(engine, 3) == [{1}, {1}, {0, 1}]
        finish(engine, "ab")

    def test_a_part_of_a_prompt_is_a_target_too(self):
        engine = make("ab", depth=1, budget=6)
        engine.schedule()
        engine.die()
        assert engine.launch() == {0: 6}
        engine.update()
        assert engine.tokens("a") == []
        finish(engine, "ab")

    def test_little_is_computed_again_after_a_trial(self):
        engine = make("ab", depth=1)
        engine.schedule()
        engine.die()
        seeds_of_next_steps(engine, 2)
        assert engine.launch() == {0: 1, 1: 1}, "9 tokens each, of which the cache has 8"

    def test_a_trial_takes_nothing_from_the_prefix_cache(self):
        engine = Driver(num_blocks=40, depth=1)
        engine.add("a", PROMPTS["a"], max_tokens=3)
        engine.step()
        engine.add("b", PROMPTS["a"], max_tokens=3)
        assert engine.launch() == {0: 1, 1: 1}
        engine.die()
        assert engine.launch() == {0: 9}
        engine.update()
        assert engine.launch() == {0: 8}, "what another computed proves nothing"
        engine.update()
        assert engine.launch() == {0: 2, 1: 1}, "now it does no harm"
        engine.update()
        engine.drain()

    def test_only_who_was_in_a_step_is_tried(self):
        engine = make("ab", depth=1, budget=8)
        engine.schedule()
        engine.die()
        assert seeds_of_next_steps(engine, 1) == [{0}]
        assert engine.schedule().num_tokens == 8
        finish(engine, "ab")

    def test_new_requests_wait_for_the_trials(self):
        engine = make("abc", depth=1)
        engine.schedule()
        engine.die()
        engine.add("d", PROMPTS["d"], max_tokens=9, seed=seed("d"))
        assert engine.scheduler.stats().num_waiting == 4
        assert seeds_of_next_steps(engine, 4) == [{0}, {1}, {2}, {0, 1, 2, 3}]
        finish(engine, "abcd")

    def test_a_death_between_the_steps_of_a_trial_is_nobodys(self):
        engine = make("ab", depth=1, chunk=4)
        engine.schedule()
        engine.update()
        engine.schedule()
        engine.die()
        engine.schedule()
        engine.update()
        assert engine.die() == []
        assert seeds_of_next_steps(engine, 4) == [{0}, {0}, {1}, {1}]
        finish(engine, "ab")

    def test_a_reset_of_the_cache_interrupts_a_trial(self):
        engine = make("ab")
        engine.schedule()
        engine.die()
        engine.schedule()
        assert engine.scheduler.reset_prefix_cache(preempt_running=True)
        engine.check()
        assert engine.schedule() is None, "it begins again when nothing of it is in flight"
        engine.update()
        assert seeds_of_next_steps(engine, 3) == [{0}, {1}, {0, 1}]
        finish(engine, "ab")

    def test_one_that_is_preempted_with_its_step_in_flight_is_a_suspect(self):
        """5 usable blocks for two requests: the newer one loses its blocks when the older one needs the last."""
        engine = Driver(num_blocks=6, depth=2, caching=False)
        engine.add("a", PROMPTS["a"], max_tokens=9, seed=0)
        engine.add("b", PROMPTS["b"], max_tokens=9, seed=1)
        while not engine.scheduler.stats().num_preemptions:
            if len(engine.in_flight) == 2:
                engine.update()
            engine.schedule()
        engine.die()
        assert set.union(*engine.deaths[0].lost) == {0, 1}
        tried = []
        while not tried or tried[-1] == {0}:
            tried += seeds_of_next_steps(engine, 1)
        assert tried[-1] == {1}
        assert engine.finish_reason("a") is None, "after the other's trial, not after its end"
        finish(engine, "ab")


class TestKillers:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("num_tokens", [1, 8, 9, 12, 16])
    def test_is_refused_after_two_deaths_and_its_neighbours_complete(self, depth, num_tokens):
        engine = make(depth=depth)
        engine.worker.killers = {seed("b"): num_tokens}
        finish_with_refused(engine, "b", "ac")
        assert [death.killer for death in engine.deaths] == [seed("b")] * 2
        assert engine.deaths[0].lost[-1] == {0, 1, 2}
        assert engine.deaths[1].lost == [{1}] * len(engine.deaths[1].lost), "the second time alone"
        num_known = max(num_tokens - 8 - (depth - 1), 0)  # at depth 2 the token before is lost with it, both times
        assert engine.tokens("b") == completion(PROMPTS["b"], 9)[:num_known], "what it had before was given out"

    def test_alone_it_is_tried_before_it_is_refused(self):
        engine = make("a")
        engine.worker.killers = {0: 10}
        finish_with_refused(engine, "a", "")
        assert len(engine.deaths) == 2

    def test_the_error_says_who_how_often_and_why(self):
        engine = make("ab")
        engine.worker.killers = {0: 8}
        engine.drain()
        error = error_from_wire({f: getattr(engine.outputs["a"][-1].error, f) for f in ("type", "message", "details")})
        assert isinstance(error, WorkerDiedError)
        assert "request 'a' is refused" in error.message
        assert "died twice" in error.message
        assert "worker 0 was killed" in error.message
        assert error.details == {"process": "worker 0", "rank": 0, "request_id": "a", "num_deaths": 2}

    def test_several_are_all_found(self):
        engine = make("abcd")
        engine.worker.killers = {seed("b"): 8, seed("d"): 11}
        engine.drain()
        assert [engine.finish_reason(name) for name in "abcd"] == ["length", "error", "length", "error"]
        assert [death.killer for death in engine.deaths] == [1, 1, 3, 3]

    def test_one_that_was_cleared_begins_anew(self):
        """An earlier death was another's: it does not count."""
        engine = make("ab", depth=1)
        engine.schedule()
        engine.die()
        seeds_of_next_steps(engine, 3)
        engine.schedule()
        assert engine.die() == []
        assert seeds_of_next_steps(engine, 3) == [{0}, {1}, {0, 1}]
        finish(engine, "ab")


def finish_with_refused(engine: Driver, refused: str, others: str) -> None:
    finish(engine, others)
    assert engine.outputs[refused][-1].error.type == "WorkerDiedError"


class TestAborts:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("in_flight", [False, True])
    def test_of_the_one_on_trial(self, depth, in_flight):
        engine = make(depth=depth)
        engine.schedule()
        engine.die()
        engine.schedule()
        if not in_flight:
            engine.update()
        assert [output.finish_reason for output in engine.abort("a")] == ["abort"]
        if in_flight:
            assert engine.schedule() is None, "what it left in flight must not be laid to the next one's charge"
            engine.update()
        assert seeds_of_next_steps(engine, 3) == [{1}, {2}, {1, 2}]
        finish(engine, "bc")

    def test_what_one_aborted_on_trial_left_in_flight_accuses_nobody(self):
        engine = make("ab")
        engine.schedule()
        engine.die()
        engine.schedule()
        engine.abort("a")
        assert engine.die() == []
        assert seeds_of_next_steps(engine, 2) == [{1}, {1}]
        finish(engine, "b")

    def test_of_those_who_wait_for_their_trial_or_for_its_end(self):
        engine = make("abcd", depth=1)
        engine.schedule()
        engine.die()
        seeds_of_next_steps(engine, 1)
        assert len(engine.abort("a", "c")) == 2, "one cleared, one not tried yet"
        assert seeds_of_next_steps(engine, 3) == [{1}, {3}, {1, 3}]
        finish(engine, "bd")

    def test_of_all(self):
        engine = make("ab")
        engine.schedule()
        engine.die()
        engine.schedule()
        engine.abort("a", "b")
        engine.add("c", PROMPTS["c"], max_tokens=9)
        finish(engine, "c")

    def test_an_id_may_be_used_again(self):
        engine = make("ab", depth=1)
        engine.schedule()
        engine.die()
        engine.abort("a")
        engine.add("a", PROMPTS["a"], max_tokens=9, seed=7)
        assert seeds_of_next_steps(engine, 2) == [{1}, {1, 7}]
        finish(engine, "ab")


class TestAnotherCache:
    def test_who_can_never_fit_is_refused_and_the_others_go_on(self):
        engine = Driver(num_blocks=20, depth=1)
        engine.add("a", PROMPTS["a"], max_tokens=9)
        engine.add("b", [1] * 13, max_tokens=9)
        engine.add("c", [2] * 13, max_tokens=9)
        engine.abort("c")
        engine.schedule()
        (refused,) = engine.die(num_blocks=4)
        assert (refused.request_id, refused.finish_reason) == ("b", "error")
        error = error_from_wire({f: getattr(refused.error, f) for f in ("type", "message", "details")})
        assert isinstance(error, CapacityError)
        assert "'b': its 13 tokens need 4 blocks of the KV cache, which has 3" in error.message
        engine.drain()
        # 12 slots: the last token of 13 is never computed.
        assert engine.tokens("a") == completion(PROMPTS["a"], 9)[:5]
        assert engine.finish_reason("a") == "length"

    def test_new_requests_are_checked_against_it(self):
        engine = make("a")
        engine.step()
        engine.die(num_blocks=100)
        engine.add("long", [3] * 300, max_tokens=2)
        engine.drain()
        assert len(engine.tokens("long")) == 2

    def test_the_slots_of_lost_tokens_are_not_asked_of_a_cache_without_them(self):
        engine = make("a", depth=1)
        engine.schedule()  # 8 tokens, and one that is lost
        assert engine.die(num_blocks=3) == []
        engine.drain()
        assert (engine.tokens("a"), engine.finish_reason("a")) == (completion(PROMPTS["a"], 1), "length")

    def test_smaller_but_large_enough(self):
        engine = make("abcd", num_blocks=40)
        for _ in range(3):
            engine.step()
        engine.schedule()
        engine.die(num_blocks=6)
        finish(engine, "abcd")


class TestWhatStays:
    def test_seeds(self):
        def seeds(dies: bool) -> list[int]:
            engine = Driver(num_blocks=40)
            engine.add("a", PROMPTS["a"])
            engine.add("b", PROMPTS["b"])
            engine.step()
            if dies:
                engine.die()
            engine.add("c", PROMPTS["c"])
            found = {}
            while engine.scheduler.has_unfinished:
                engine.step()
                found |= {bytes(row.tokens[:8]): row.seed for row in engine.worker.rows.values()}
            return [found[bytes(PROMPTS[name])] for name in "abc"]

        calm = seeds(dies=False)
        assert len(set(calm)) == 3
        assert seeds(dies=True) == calm

    def test_steps_are_numbered_on(self):
        engine = make("a", depth=1)
        assert engine.schedule().step == 0
        engine.die()
        assert engine.schedule().step == 1

    def test_a_recovery_counts_as_a_preemption(self):
        engine = make("ab", depth=1)
        engine.step()
        engine.die()
        assert engine.scheduler.stats().num_preemptions == 2
        engine.step()
        assert engine.outputs["a"][-1].num_preemptions == 1


def test_the_longest_wait_for_a_row():
    now = [100.0]
    engine = Driver(max_num_seqs=1, depth=1)
    engine.scheduler._clock = lambda: now[0]
    assert engine.scheduler.view.oldest_waiting_s(100.0) is None
    engine.add("a", PROMPTS["a"])  # arrived at 0
    assert engine.scheduler.view.oldest_waiting_s(100.0) == 100.0
    engine.step()
    assert engine.scheduler.view.oldest_waiting_s(100.0) is None
    now[0] = 130.0
    engine.die()
    assert engine.scheduler.view.oldest_waiting_s(137.0) == 7.0, "since it lost its row"
    engine.add("b", PROMPTS["b"])
    assert engine.scheduler.view.oldest_waiting_s(137.0) == 137.0
