"""Models that mix full attention with a sliding window: two groups over one pool. Blocks of 4 tokens."""

from __future__ import annotations

import pytest
from fake_model import completion
from scheduler_driver import Driver

A = list(range(1, 9))  # two blocks
B = list(range(11, 19))
HYBRID = [(4, None), (4, 4)]  # a token of the second group sees itself and the three before it


class TestSlidingWindow:
    def test_what_left_the_window_is_free(self):
        engine = Driver(num_blocks=20, groups=[(4, 4)])
        engine.add("a", A, max_tokens=12)
        engine.step()
        # 8 tokens are computed. The ninth sees from the sixth on, in the second block.
        assert engine.kv_cache.num_free_blocks == 19 - 1
        used = []
        while engine.scheduler.has_unfinished:
            engine.step()
            used.append(19 - engine.kv_cache.num_free_blocks)
        assert max(used) == 2
        assert engine.tokens("a") == completion(A, 12)

    def test_and_lets_others_start(self):
        """Five blocks: a has two of them until its first step came back, and b wants four."""
        engine = Driver(num_blocks=6, groups=[(4, 4)])
        engine.add("a", A[:7], max_tokens=9)
        engine.add("b", [1] * 16, max_tokens=1)
        assert [engine.step() for _ in range(2)] == [{0: 7}, {0: 1, 1: 16}]
        engine.drain()
        assert [engine.tokens(name) for name in "ab"] == [completion(A[:7], 9), completion([1] * 16, 1)]

    def test_more_than_the_pool_holds_at_once(self):
        engine = Driver(num_blocks=4, groups=[(4, 4)], budget=4, max_model_len=60)  # 12 slots
        engine.add("a", [n % 50 for n in range(40)], max_tokens=20)
        engine.drain()
        assert engine.tokens("a") == completion([n % 50 for n in range(40)], 20)

    def test_a_hit_needs_the_window_only(self):
        engine = Driver(num_blocks=20, groups=[(4, 4)])
        engine.add("a", [*A, *B], max_tokens=1)
        engine.drain()
        engine.add("b", [*A, *B, 9], max_tokens=3)
        (b,) = engine.schedule().new_requests
        assert b.num_computed_tokens == 16
        table = b.block_ids[0].tolist()
        assert table[:3] == [0, 0, 0], "the 17th token sees from the 14th on"
        assert all(table[3:])
        engine.update()
        engine.drain()
        assert engine.tokens("b") == completion([*A, *B, 9], 3)

    def test_what_lies_before_the_window_may_be_evicted(self):
        engine = Driver(num_blocks=8, groups=[(4, 4)], budget=8)
        engine.add("a", [*A, *B], max_tokens=1)
        engine.drain()
        engine.add("c", [1] * 12, max_tokens=1)
        engine.drain()
        engine.add("b", [*A, *B, 9], max_tokens=1)
        assert engine.step() == {0: 1}


class TestHybrid:
    def test_each_group_has_blocks_of_its_own(self):
        engine = Driver(num_blocks=20, groups=HYBRID)
        engine.add("a", A, max_tokens=9)
        (a,) = engine.schedule().new_requests
        full, sliding = (ids.tolist() for ids in a.block_ids)
        assert (len(full), len(sliding)) == (2, 2)
        assert not set(full) & set(sliding)
        engine.update()
        step = engine.schedule()
        assert [new.rows.tolist() for new in step.new_blocks] == [[0], [0]]
        engine.update()
        engine.drain()
        assert engine.tokens("a") == completion(A, 9)

    def test_the_longest_hit_that_all_groups_have(self):
        engine = Driver(num_blocks=20, groups=HYBRID)
        engine.add("a", [*A, *B], max_tokens=1)
        engine.drain()
        engine.add("b", [*A, *B[:5]], max_tokens=3)  # of the window's group the third block is needed, which is there
        (b,) = engine.schedule().new_requests
        assert b.num_computed_tokens == 12
        assert [ids.tolist().count(0) for ids in b.block_ids] == [0, 2]
        engine.update()
        engine.drain()
        assert engine.tokens("b") == completion([*A, *B[:5]], 3)

    @pytest.mark.parametrize("groups", [[(4, None), (8, 6)], [(8, None), (4, 6)], [(2, None), (4, 3), (8, 20)]])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_block_sizes_that_differ(self, groups, depth):
        engine = Driver(num_blocks=40, groups=groups, depth=depth, budget=9)
        engine.add("a", [*A, *B], max_tokens=20)
        engine.drain()
        engine.add("b", [*A, *B, *completion([*A, *B], 5)], max_tokens=5)
        engine.add("c", [*A, *A], max_tokens=5)
        engine.drain()
        assert engine.tokens("a") == completion([*A, *B], 20)
        assert engine.tokens("b") == completion([*A, *B], 10)[5:]
        assert engine.tokens("c") == completion([*A, *A], 5)
        assert engine.outputs["b"][-1].num_cached_tokens >= 16
        assert engine.outputs["c"][-1].num_cached_tokens >= 8

    def test_preemption(self):
        engine = Driver(num_blocks=10, groups=HYBRID, budget=8, chunk=4)
        engine.add("a", A, max_tokens=9)
        engine.add("b", B, max_tokens=9)
        engine.drain()
        assert engine.scheduler.stats().num_preemptions > 0
        assert [engine.tokens(name) for name in "ab"] == [completion(A, 9), completion(B, 9)]

    def test_alone_it_ends_where_the_cache_does(self):
        """9 usable blocks; the group with a window holds three at most, and the other one the six that are left."""
        engine = Driver(num_blocks=10, groups=HYBRID, budget=4)
        engine.add("a", A, max_tokens=None)
        engine.drain()
        assert (len(engine.tokens("a")), engine.finish_reason("a")) == (6 * 4 + 1 - 8, "length")
        assert engine.tokens("a") == completion(A, 17)

    def test_several_steps_at_once(self):
        engine = Driver(num_blocks=40, groups=HYBRID, budget=4, max_steps=8)
        engine.add("a", A, max_tokens=12)
        engine.step()
        engine.step()
        step = engine.schedule()
        assert step.num_steps == 4, "no more than the group with a window keeps slots for"
        engine.update()
        engine.drain()
        assert engine.tokens("a") == completion(A, 12)

    def test_several_steps_at_once_leave_room_for_one_behind_them(self):
        """Two steps of at most 4 tokens are 8: seven tokens in one step, and one in the next."""
        engine = Driver(num_blocks=40, groups=HYBRID, budget=4, max_steps=20, depth=2)
        engine.add("a", A[:4], max_tokens=30)
        engine.schedule()
        engine.update()
        assert engine.schedule().num_steps == 7
        assert engine.schedule().num_steps == 1
        engine.drain()
        assert engine.tokens("a") == completion(A[:4], 30)
