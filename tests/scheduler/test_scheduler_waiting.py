"""Who may start: the gate, going ahead of one that has to wait, pauses. Blocks of 4 tokens."""

from __future__ import annotations

import pytest
from fake_model import completion
from scheduler_driver import Driver

from ringcore.errors import InvalidRequestError

A = list(range(1, 9))  # two blocks
B = list(range(11, 19))


class TestTheGate:
    def test_all_of_a_prompt_has_its_blocks_before_its_first_chunk(self):
        engine = Driver(num_blocks=6, budget=4, caching=False)
        engine.add("a", A, max_tokens=1, seed=0)
        engine.add("b", [1] * 16, max_tokens=1, seed=1)  # four blocks: three are there while a runs
        assert [engine.step() for _ in range(3)] == [{0: 4}, {0: 4}, {0: 4}]
        assert engine.work_by_seed == {1: 4}
        assert engine.kv_cache.num_free_blocks == 1, "of five: all its four blocks were taken with its first chunk"

    @pytest.mark.parametrize(("num_tokens", "fits"), [(20, True), (21, False)])
    def test_what_can_never_fit_is_refused_at_once_with_the_numbers(self, num_tokens, fits):
        engine = Driver(num_blocks=6)
        if fits:
            engine.add("a", [1] * num_tokens, max_tokens=1)
            engine.drain()
            return
        with pytest.raises(InvalidRequestError, match="21 tokens needs 6 blocks of the KV cache, which has 5") as error:
            engine.add("a", [1] * num_tokens)
        assert {"needed_blocks": 6, "usable_blocks": 5}.items() <= error.value.details.items()

    def test_two_groups_need_more(self):
        """12 tokens are three blocks in each group; 13 are four. In the one with a window of 4 it cannot be fewer:
        the 3 tokens that the next one sees, two steps of 4, and 3 slots before these in the first block are 14."""
        engine = Driver(num_blocks=7, groups=[(4, None), (4, 4)], budget=4, depth=2)
        engine.add("a", [1] * 12, max_tokens=None)
        engine.drain()
        assert len(engine.tokens("a")) == 1, "a 13th token, and no slot for it"
        with pytest.raises(InvalidRequestError, match="13 tokens needs 8 blocks of the KV cache, which has 6"):
            engine.add("b", [1] * 13)

    def test_a_preempted_request_waits_for_its_tokens_and_those_that_were_on_the_way(self):
        engine = Driver(num_blocks=5, depth=2, caching=False)
        engine.add("a", A[:7], max_tokens=9)
        engine.add("b", B[:7], max_tokens=9)
        for _ in range(20):
            engine.step()
        assert engine.scheduler.stats().num_preemptions == 1, "not resumed to be preempted again at once"
        engine.drain()
        assert engine.tokens("b") == completion(B[:7], 9)


class TestWhatIsLeftOfAStep:
    """Steps of 16 tokens, of which an eighth are 2."""

    def make(self, *lengths: int, **options) -> Driver:
        engine = Driver(num_blocks=40, budget=16, caching=False, **options)
        for seed, length in enumerate(lengths):
            engine.add(str(seed), [1 + seed] * length, max_tokens=8, seed=seed)
        return engine

    def test_a_prompt_does_not_begin_with_a_token_that_others_left(self):
        engine = self.make(15, 12)
        assert [engine.step() for _ in range(2)] == [{0: 15}, {0: 1, 1: 12}]

    def test_an_eighth_is_enough(self):
        engine = self.make(14, 12)
        assert [engine.step() for _ in range(2)] == [{0: 14, 1: 2}, {0: 1, 1: 10}]

    def test_what_fits_begins_and_may_pass(self):
        engine = self.make(15, 12, 1, max_skip_ahead=1)
        engine.step()
        assert engine.work_by_seed == {0: 15, 2: 1}
        engine.step()
        assert engine.work_by_seed == {0: 1, 2: 1, 1: 12}

    def test_what_fits_of_a_threshold_begins(self):
        engine = self.make(15, 12, chunk=1)
        assert engine.step() == {0: 1, 1: 1}

    def test_beside_those_that_only_decode_whatever_there_is(self):
        engine = self.make(*[1] * 15, max_num_seqs=16)
        engine.step()
        engine.add("late", [30] * 3, max_tokens=1, seed=15)
        assert engine.step() == dict.fromkeys(range(16), 1)


class TestSkippingAhead:
    """a holds four of five blocks; b wants two, and c, d, e ... one each."""

    def make(self, max_skip_ahead: int, **options) -> Driver:
        engine = Driver(num_blocks=6, caching=False, max_skip_ahead=max_skip_ahead, **options)
        engine.add("a", [1] * 13, max_tokens=3, seed=0)
        engine.add("b", B, max_tokens=1, seed=1)
        for seed, name in enumerate("cde", 2):
            engine.add(name, [seed], max_tokens=1, seed=seed)
        return engine

    def seeds(self, engine: Driver, num_steps: int) -> list[set[int]]:
        seen = []
        for _ in range(num_steps):
            engine.step()
            seen.append(set(engine.work_by_seed))
        return seen

    def test_not_at_all(self):
        assert self.seeds(self.make(0), 4) == [{0}, {0}, {0}, {1, 2, 3, 4}]

    def test_as_often_as_allowed(self):
        assert self.seeds(self.make(1), 4) == [{0, 2}, {0}, {0}, {1, 3, 4}]
        assert self.seeds(self.make(2), 4) == [{0, 2}, {0, 3}, {0}, {1, 4}]
        assert self.seeds(self.make(16), 4) == [{0, 2}, {0, 3}, {0, 4}, {1}]

    def test_each_that_is_passed_is_counted_for_itself(self):
        engine = Driver(num_blocks=6, caching=False, max_skip_ahead=2)
        engine.add("a", [1] * 13, max_tokens=8, seed=0)  # 20 tokens are computed: five blocks in the end
        engine.add("b", B, max_tokens=1, seed=1)
        engine.add("c", [2], max_tokens=1, seed=2)
        assert self.seeds(engine, 1) == [{0, 2}], "c passes b"
        engine.add("d", A, max_tokens=1, seed=3)
        engine.add("e", [4], max_tokens=1, seed=4)
        assert self.seeds(engine, 1) == [{0, 4}], "e passes b, for the second time, and d"
        engine.add("f", [5], max_tokens=1, seed=5)
        engine.abort("b")
        assert self.seeds(engine, 1) == [{0, 5}], "d was passed once"
        engine.add("g", [6], max_tokens=1, seed=6)
        assert self.seeds(engine, 1) == [{0}]

    def test_a_bounded_number_is_looked_at(self):
        engine = Driver(num_blocks=6, caching=False, max_skip_ahead=2)
        engine.add("a", [1] * 13, max_tokens=3, seed=0)
        for seed in (1, 2, 3):
            engine.add(f"r{seed}", B, max_tokens=1, seed=seed)
        engine.add("b", [4], max_tokens=1, seed=4)
        assert self.seeds(engine, 1) == [{0}], "three cannot start, and a fourth is not asked"
        engine.abort("r2")
        assert self.seeds(engine, 1) == [{0, 4}]

    def test_nobody_starves(self):
        """One large request among small ones that come without end."""
        engine = Driver(num_blocks=6, caching=False, max_skip_ahead=3, max_num_seqs=5)
        for seed, count in enumerate([2, 3, 4, 4, 4]):  # a block each
            engine.add(f"r{seed}", [seed], max_tokens=count, seed=seed)
        engine.step()
        engine.add("large", [7] * 16, max_tokens=1, seed=100)
        started = []
        for seed in range(5, 50):
            engine.add(f"r{seed}", [seed], max_tokens=4, seed=seed)
            engine.step()
            started += [seed for seed in engine.work_by_seed if seed not in started]
        assert started[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 100], "three go ahead of it"


class TestPause:
    def test_new_ones_wait_and_running_ones_go_on(self):
        engine = Driver()
        engine.add("a", A, max_tokens=3, seed=0)
        engine.step()
        engine.scheduler.pause("new")
        engine.add("b", B, max_tokens=3, seed=1)
        assert engine.step() == {0: 1}
        assert engine.step() == {0: 1}
        assert engine.finish_reason("a") == "length"
        assert engine.schedule() is None
        assert not engine.scheduler.has_unfinished, "nothing that could go on"
        assert engine.scheduler.stats().num_waiting == 1
        engine.scheduler.resume()
        assert engine.scheduler.has_unfinished
        assert engine.step() == {0: 8}
        engine.drain()
        assert engine.tokens("b") == completion(B, 3)

    def test_all(self):
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=4)
        engine.schedule()
        engine.schedule()
        engine.scheduler.pause("all")
        engine.update()
        assert engine.schedule() is None
        engine.update()
        assert engine.schedule() is None
        assert engine.tokens("a") == completion(A, 2), "what was in flight was taken in"
        engine.scheduler.resume()
        engine.drain()
        assert engine.tokens("a") == completion(A, 4)

    def test_one_that_is_preempted_meanwhile_waits_too(self):
        engine = Driver(num_blocks=6, caching=False)
        engine.add("a", A, max_tokens=3, seed=0)
        engine.add("b", B, max_tokens=3, seed=1)
        engine.step()
        engine.scheduler.pause("new")
        assert engine.step() == {0: 1}
        assert engine.step() == {0: 1}
        assert engine.schedule() is None
        engine.scheduler.resume()
        engine.drain()
        assert engine.tokens("b") == completion(B, 3)

    def test_aborts_are_at_once_all_the_same(self):
        engine = Driver()
        engine.add("a", A)
        engine.step()
        engine.scheduler.pause("all")
        assert [output.finish_reason for output in engine.abort("a")] == ["abort"]
        assert not engine.scheduler.has_unfinished

    def test_from_one_to_the_other(self):
        engine = Driver()
        engine.add("a", A, max_tokens=2)
        engine.scheduler.pause("all")
        assert engine.schedule() is None
        engine.scheduler.pause("new")
        assert engine.schedule() is None
        engine.scheduler.resume()
        engine.drain()

    def test_a_higher_priority_takes_nothing_while_new_ones_wait(self):
        engine = Driver(max_num_seqs=1, policy="priority", preempt_lower_priority=True)
        engine.add("a", A, max_tokens=3, priority=1, seed=0)
        engine.step()
        engine.scheduler.pause("new")
        engine.add("b", B, max_tokens=3, priority=0, seed=1)
        engine.step()
        assert engine.work_by_seed == {0: 1}
        engine.scheduler.resume()
        engine.step()
        assert engine.work_by_seed == {1: 8}
