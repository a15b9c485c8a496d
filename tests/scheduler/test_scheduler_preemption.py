"""Who gives way when blocks run out, and for whom. Blocks of 4 tokens, one of them the null block."""

from __future__ import annotations

import pytest
from fake_model import completion
from scheduler_driver import Driver

A = list(range(1, 9))  # two blocks
B = list(range(11, 19))


class TestPreemption:
    def test_the_second_makes_room_and_waits_at_the_front_with_nothing_computed(self):
        engine = Driver(num_blocks=6, caching=False)
        engine.add("a", A, max_tokens=3)
        engine.add("b", B, max_tokens=3)
        assert engine.step() == {0: 8, 1: 8}
        engine.add("c", [1], max_tokens=3)
        step = engine.schedule()  # a's third block is the last one
        assert engine.work == {0: 1}
        assert step.finished_rows.tolist() == [1]
        assert engine.scheduler.stats().num_preemptions == 1
        assert engine.scheduler.stats().num_waiting == 2
        engine.update()
        assert engine.step() == {0: 1}  # b's three blocks are not there, and c does not overtake it
        assert engine.finish_reason("a") == "length"
        step = engine.schedule()
        resumed, new = step.new_requests
        assert (resumed.token_ids.tolist(), resumed.num_computed_tokens) == (B + completion(B, 1), 0)
        assert resumed.num_prompt_tokens == 8
        assert new.token_ids.tolist() == [1]
        engine.update()
        engine.drain()
        assert {name: engine.tokens(name) for name in "ab"} == {"a": completion(A, 3), "b": completion(B, 3)}
        assert [engine.outputs[name][-1].num_preemptions for name in "abc"] == [0, 1, 0]

    def test_an_older_request_takes_the_blocks_of_the_newest(self):
        engine = Driver(num_blocks=6, caching=False)
        engine.add("a", A, max_tokens=9)  # four blocks in the end
        engine.add("b", [1, 2], max_tokens=9)
        for _ in range(4):
            engine.step()
        assert engine.scheduler.stats().num_free_blocks == 0  # a has three, b two
        assert engine.step() == {0: 1, 1: 1}  # the twelfth token of a
        assert engine.step() == {0: 1}
        assert engine.scheduler.stats().num_preemptions == 1
        engine.drain()
        assert engine.tokens("b") == completion([1, 2], 9)

    def test_a_resumed_request_takes_up_its_own_cached_blocks(self):
        engine = Driver(num_blocks=7)
        engine.add("a", A, max_tokens=7)  # 15 tokens, of which 14 are computed: four blocks
        engine.add("b", B, max_tokens=7)
        engine.drain()
        assert engine.scheduler.stats().num_preemptions == 1
        assert engine.tokens("b") == completion(B, 7)
        assert engine.worker.num_computed_tokens < 14 + 14 + 8, "what was computed once is not computed again"
        assert engine.outputs["b"][-1].num_cached_tokens == 0, "it found nothing when it first ran"

    def test_alone_it_ends_where_the_cache_does(self):
        engine = Driver(num_blocks=4)  # 12 slots
        engine.add("a", A, max_tokens=None)
        engine.drain()
        # 12 tokens are computed; the 13th needs no slot to be sampled.
        assert (engine.tokens("a"), engine.finish_reason("a")) == (completion(A, 5), "length")

    def test_nobody_starts_in_a_step_that_preempts(self):
        engine = Driver(num_blocks=6, caching=False, max_skip_ahead=4)
        engine.add("a", A, max_tokens=3)
        engine.add("b", B, max_tokens=3)
        engine.step()
        engine.add("c", [1], max_tokens=2)
        assert engine.step() == {0: 1}, "b's blocks are free, and c would fit"
        assert engine.step() == {0: 1, 1: 1}, "now c passes b, which wants three blocks of two"


class TestTheVictim:
    """A third block is asked for where none is left."""

    def test_is_the_one_with_least_to_compute_again(self):
        engine = Driver(num_blocks=6, caching=False, budget=100)
        engine.add("a", [1, 2, 3], max_tokens=9, seed=0)  # one block, until the fifth token is computed
        engine.add("b", A, max_tokens=9, seed=1)  # two blocks, a third with the ninth
        engine.add("c", B[:7], max_tokens=9, seed=2)  # two blocks
        engine.step()
        engine.step()
        assert engine.given_back == {0}, "3 tokens, less than 8 and 7, though it was the first to come"
        engine.drain()
        assert [engine.tokens(name) for name in "abc"] == [completion(p, 9) for p in ([1, 2, 3], A, B[:7])]

    def test_of_equals_is_the_last_to_arrive(self):
        engine = Driver(num_blocks=7, caching=False)
        for seed, name in enumerate("abc"):
            engine.add(name, [10 * seed + n for n in range(1, 9)], max_tokens=2, seed=seed)
        engine.step()
        engine.step()
        assert (engine.given_back, engine.work_by_seed) == ({2}, {0: 1, 1: 1}), "six blocks: all want a third"

    def test_goes_back_to_its_place_in_the_queue(self):
        engine = Driver(num_blocks=6, caching=False, max_num_seqs=2)
        engine.add("a", [1, 2, 3], max_tokens=12, seed=0)
        engine.add("b", A + B[:4], max_tokens=9, seed=1)
        engine.add("c", [5], max_tokens=9, seed=2)
        while engine.scheduler.stats().num_preemptions == 0:
            engine.step()
        assert engine.given_back == {0}
        engine.abort("b")
        engine.step()
        assert list(engine.work_by_seed) == [0, 2], "before c, which came after it"

    def test_the_worst_priority_goes_first(self):
        engine = Driver(num_blocks=6, caching=False, policy="priority")
        engine.add("a", A, max_tokens=3, priority=1, seed=0)
        engine.add("b", B, max_tokens=3, priority=0, seed=1)
        engine.step()
        engine.step()
        assert engine.given_back == {0}
        engine.drain()
        assert [engine.tokens(name) for name in "ab"] == [completion(A, 3), completion(B, 3)]

    def test_of_one_priority_the_one_with_least_to_compute_again(self):
        engine = Driver(num_blocks=6, caching=False, policy="priority")
        engine.add("a", A[:5], max_tokens=9, priority=1, seed=0)
        engine.add("b", B, max_tokens=9, priority=1, seed=1)
        engine.add("c", [9], max_tokens=9, priority=0, seed=2)
        engine.step()
        engine.step()
        assert engine.given_back == {0}

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_two_in_one_step(self, policy):
        """a, b and c have a block each of three and want another."""
        engine = Driver(num_blocks=4, caching=False, policy=policy)
        for seed, name in enumerate("abc"):
            engine.add(name, [10 * seed + n for n in range(1, 5)], max_tokens=3, seed=seed)
        engine.step()
        engine.step()
        assert (engine.given_back, engine.work_by_seed) == ({1, 2}, {0: 1})
        engine.drain()
        assert engine.scheduler.stats().num_preemptions == 2


class TestPriority:
    def test_the_order_is_priority_then_arrival_then_the_order_of_adding(self):
        engine = Driver(max_num_seqs=1, policy="priority")
        for seed, (priority, arrival_s) in enumerate([(1, 0.0), (0, 5.0), (0, 3.0), (0, 3.0), (-1, 9.0)]):
            engine.add(f"r{seed}", [seed], max_tokens=1, priority=priority, arrival_s=arrival_s, seed=seed)
        order = []
        while engine.step():
            order += engine.work_by_seed
        assert order == [4, 2, 3, 1, 0]

    def test_means_nothing_to_first_come_first_served(self):
        engine = Driver(max_num_seqs=1)
        engine.add("a", [1], max_tokens=1, priority=1, arrival_s=2.0, seed=0)
        engine.add("b", [2], max_tokens=1, priority=0, arrival_s=1.0, seed=1)
        engine.step()
        assert engine.work_by_seed == {0: 1}

    def test_a_better_one_does_not_take_a_row(self):
        engine = Driver(max_num_seqs=1, policy="priority")
        engine.add("a", [1], max_tokens=3, priority=1, seed=0)
        engine.step()
        engine.add("b", [2], max_tokens=3, priority=0, seed=1)
        engine.step()
        assert engine.work_by_seed == {0: 1}


class TestPreemptLowerPriority:
    def make(self, **options) -> Driver:
        return Driver(policy="priority", preempt_lower_priority=True, caching=False, **options)

    def test_takes_a_row(self):
        engine = self.make(max_num_seqs=2)
        engine.add("a", A, max_tokens=3, priority=2, seed=0)
        engine.add("b", B, max_tokens=3, priority=1, seed=1)
        engine.step()
        engine.add("c", [7], max_tokens=3, priority=0, seed=2)
        engine.step()
        assert (engine.given_back, engine.work_by_seed) == ({0}, {1: 1, 2: 1}), "the worst gives way, at once"
        engine.drain()
        assert [engine.tokens(name) for name in "abc"] == [completion(A, 3), completion(B, 3), completion([7], 3)]

    def test_takes_blocks_as_many_as_it_needs(self):
        engine = self.make(num_blocks=7)
        for seed, name in enumerate("abc"):
            prompt = [10 * seed + n for n in range(1, 8)]  # two blocks of six each
            engine.add(name, prompt, max_tokens=9, priority=3, seed=seed)
        engine.step()
        engine.add("d", [1] * 11, max_tokens=1, priority=2, seed=3)  # three blocks
        engine.step()
        assert (engine.given_back, engine.work_by_seed) == ({1, 2}, {0: 1, 3: 11}), "not the first of equals"

    def test_not_from_equals_or_better(self):
        engine = self.make(num_blocks=5)
        engine.add("a", A[:7], max_tokens=2, priority=1, seed=0)
        engine.add("b", B[:7], max_tokens=2, priority=0, seed=1)
        engine.step()
        engine.add("c", [7], max_tokens=3, priority=1, seed=2)
        engine.step()
        assert engine.work_by_seed == {0: 1, 1: 1}
        assert engine.scheduler.stats().num_preemptions == 0

    def test_not_where_it_would_not_be_enough(self):
        engine = self.make(num_blocks=5)
        engine.add("a", A[:7], max_tokens=2, priority=1, seed=0)
        engine.add("b", B[:7], max_tokens=2, priority=0, seed=1)
        engine.step()
        engine.add("c", [1] * 9, max_tokens=3, priority=0, seed=2)  # three blocks, of which b does not give one
        engine.step()
        assert engine.work_by_seed == {0: 1, 1: 1}

    def test_off_unless_asked_for(self):
        engine = Driver(max_num_seqs=1, policy="priority")
        engine.add("a", [1], max_tokens=2, priority=1)
        engine.step()
        engine.add("b", [2], max_tokens=2, priority=0)
        engine.step()
        assert engine.scheduler.stats().num_preemptions == 0

    def test_blocks_that_another_shares_are_not_gained(self):
        """a and b begin alike and share their first two blocks of seven; c wants five."""
        engine = Driver(num_blocks=8, policy="priority", preempt_lower_priority=True)
        engine.add("a", [*A, 9, 10], max_tokens=9, priority=2, seed=0)
        engine.step()
        engine.add("b", [*A, 11, 12], max_tokens=9, priority=0, seed=1)
        engine.step()
        assert engine.kv_cache.num_free_blocks == 3
        engine.add("c", [1] * 17, max_tokens=3, priority=1, seed=2)
        engine.step()
        assert engine.scheduler.stats().num_preemptions == 0, "a would give one block, and one more is missing"

    def test_what_the_first_one_finds_in_a_victims_blocks_is_not_gained_twice(self):
        """c begins as a does, and takes a's first block: when a gives its two, c may have one of them as new."""
        engine = Driver(num_blocks=5, policy="priority", preempt_lower_priority=True)
        engine.add("a", A[:7], max_tokens=9, priority=2, seed=0)
        engine.add("b", B[:6], max_tokens=2, priority=0, seed=1)
        engine.step()
        engine.add("c", [*A[:4], *B], max_tokens=3, priority=1, seed=2)  # three blocks, one of them a's first
        engine.step()
        assert engine.scheduler.stats().num_preemptions == 0
        assert engine.work_by_seed == {0: 1, 1: 1}

    def test_each_that_comes_to_stand_first_asks(self):
        """a and b run, c and d take the last rows, and then e is the first one waiting."""
        engine = self.make(max_num_seqs=4)
        engine.add("a", [1], max_tokens=9, priority=0, seed=0)
        engine.add("b", [2], max_tokens=9, priority=1, seed=1)
        engine.step()
        for seed, name in enumerate("cde", 2):
            engine.add(name, [seed], max_tokens=9, priority=0, seed=seed)
        engine.step()
        assert set(engine.work_by_seed) == {0, 1, 2, 3}
        engine.step()
        assert set(engine.work_by_seed) == {0, 2, 3, 4}

    def test_asks_again_when_what_it_found_is_gone(self):
        """Seven of ten blocks are free, as c wants; but in the same step b takes one of them."""
        engine = self.make(num_blocks=11, block_size=2, max_skip_ahead=2)
        engine.add("a", [1] * 9, max_tokens=1, priority=0, seed=0)
        engine.add("b", [2] * 6, max_tokens=7, priority=2, seed=1)
        engine.add("c", [3] * 14, max_tokens=2, priority=0, seed=2)
        assert engine.step() == {0: 9, 1: 6}
        engine.step()
        engine.step()
        assert engine.work_by_seed == {2: 14}, "b gave way, at the latest now"

    def test_asks_again_when_it_has_waited_for_a_prefix(self):
        engine = Driver(num_blocks=20, max_num_seqs=2, chunk=4, policy="priority", preempt_lower_priority=True)
        engine.add("a", A, max_tokens=9, priority=0, seed=0)
        engine.add("b", B, max_tokens=9, priority=2, seed=1)
        engine.step()
        engine.add("c", A, max_tokens=9, priority=1, seed=2)
        engine.step()
        assert engine.work_by_seed == {0: 4, 1: 4}, "a computes what c begins with"
        engine.step()
        assert engine.work_by_seed == {0: 1, 2: 1}
