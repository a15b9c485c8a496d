"""What a prompt finds of what was computed before, and what it waits for. Blocks of 4 tokens."""

from __future__ import annotations

import pytest
from fake_model import completion
from scheduler_driver import Driver

A = list(range(1, 9))  # two blocks
B = list(range(11, 19))


def num_cached(engine: Driver, names: str) -> list[int]:
    return [engine.outputs[name][-1].num_cached_tokens for name in names]


class TestHits:
    def test_a_prompt_that_is_wholly_cached_computes_one_token(self):
        engine = Driver()
        engine.add("a", A, max_tokens=1)
        engine.drain()
        engine.add("b", A, max_tokens=3)
        engine.add("c", [*A, 9], max_tokens=1)
        (b, c) = engine.schedule().new_requests
        assert (b.num_computed_tokens, b.num_cached_tokens) == (7, 8), "the last slot is read, and not written"
        assert (c.num_computed_tokens, c.num_cached_tokens) == (8, 8)
        assert b.block_ids[0].tolist() == c.block_ids[0].tolist()[:2], "nothing is copied"
        assert engine.work == {0: 1, 1: 1}
        engine.update()
        engine.drain()
        assert num_cached(engine, "abc") == [0, 7, 8]
        stats = engine.scheduler.stats()
        assert (stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens) == (15, 8 + 8 + 9)
        assert [engine.tokens(name) for name in "abc"] == [completion(A, 1), completion(A, 3), completion([*A, 9], 1)]

    def test_48_cached_tokens_in_blocks_of_16_are_a_hit_of_47(self):
        prompt = [n % 50 for n in range(48)]
        engine = Driver(block_size=16)
        engine.add("a", prompt, max_tokens=1)
        engine.drain()
        engine.add("b", prompt, max_tokens=5)
        assert engine.step() == {0: 1}
        engine.drain()
        assert num_cached(engine, "b") == [47]
        assert engine.tokens("b") == completion(prompt, 5)

    def test_whole_blocks_only(self):
        engine = Driver()
        engine.add("a", A, max_tokens=1)
        engine.drain()
        engine.add("b", [*A[:7], 9, 9], max_tokens=1)
        assert engine.step() == {0: 5}

    def test_generated_tokens_are_found_too(self):
        engine = Driver(num_blocks=20)
        engine.add("a", A, max_tokens=6)
        engine.drain()
        engine.add("b", A + completion(A, 5), max_tokens=1)  # 13 tokens: all 12 of the first three blocks are cached
        assert engine.step() == {0: 1}
        assert num_cached(engine, "b") == [12]

    def test_those_of_a_running_request_too(self):
        engine = Driver(num_blocks=20)
        engine.add("a", A, max_tokens=9)
        for _ in range(5):
            engine.step()  # 8 + 4 tokens are computed
        engine.add("b", A + completion(A, 4), max_tokens=1)
        assert engine.step() == {0: 1, 1: 1}
        assert num_cached(engine, "b") == [11]

    def test_salts_share_nothing(self):
        engine = Driver(num_blocks=20)
        for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", "")):
            engine.add(name, A, salt=salt, max_tokens=1)
            engine.drain()
        assert num_cached(engine, "abcde") == [0, 0, 0, 7, 0]

    def test_a_running_request_shares_its_blocks(self):
        engine = Driver(num_blocks=9)
        engine.add("a", A, max_tokens=9)
        first = engine.schedule().new_requests[0].block_ids[0].tolist()
        engine.update()
        engine.add("b", A[:4] + B[:4], max_tokens=1)
        (b,) = engine.schedule().new_requests
        assert b.block_ids[0].tolist()[0] == first[0]
        assert b.num_computed_tokens == 4
        engine.update()
        engine.drain()
        assert engine.tokens("a") == completion(A, 9)

    def test_what_is_evicted_is_computed_again(self):
        engine = Driver(num_blocks=6)
        engine.add("a", A, max_tokens=1)
        engine.drain()
        engine.add("b", B + B, max_tokens=1)  # four of five blocks: a's last one goes, its first one stays
        engine.drain()
        engine.add("c", A, max_tokens=1)
        assert engine.step() == {0: 4}
        assert engine.tokens("c") == completion(A, 1)

    def test_not_what_a_row_wrote_in_the_step_in_which_it_failed(self):
        engine = Driver(chunk=4)
        engine.add("a", A, max_tokens=3)
        engine.step()
        engine.worker.rows[0].poisoned = True
        engine.step()
        assert engine.finish_reason("a") == "error"
        engine.add("b", A, max_tokens=3)
        assert engine.schedule().new_requests[0].num_cached_tokens == 4, "the first of two blocks"
        engine.update()
        engine.drain()
        assert engine.tokens("b") == completion(A, 3)

    def test_off(self):
        engine = Driver(caching=False)
        engine.add("a", A, max_tokens=1)
        engine.drain()
        engine.add("b", A, max_tokens=1)
        assert engine.step() == {0: 8}
        assert engine.scheduler.stats().num_prefix_query_tokens == 0


class TestAwaited:
    """A prompt whose next block is being computed waits for it."""

    @pytest.mark.parametrize("depth", [1, 2])
    def test_the_second_of_two_equal_prompts_waits_and_then_hits(self, depth):
        engine = Driver(num_blocks=20, depth=depth)
        engine.add("a", A, max_tokens=3, seed=0)
        engine.add("b", A, max_tokens=3, seed=1)
        assert engine.launch() == {0: 8}, "never shared in the step that computes it"
        if depth == 2:
            assert engine.launch() == {0: 1}, "nor while that step is in flight"
        engine.update()
        assert engine.launch() == {0: 1, 1: 1}
        engine.update()
        engine.drain()
        assert num_cached(engine, "ab") == [0, 7]
        assert engine.tokens("a") == engine.tokens("b") == completion(A, 3)

    def test_chunk_by_chunk_it_waits_for_all_of_it(self):
        engine = Driver(num_blocks=20, budget=20, chunk=4)
        engine.add("a", [*A, *B], max_tokens=3, seed=0)
        engine.add("b", [*A, 9], max_tokens=3, seed=1)
        assert [engine.step() for _ in range(3)] == [{0: 4}, {0: 4}, {0: 4, 1: 1}]

    def test_one_that_differs_later_waits_for_what_it_has_in_common(self):
        engine = Driver(num_blocks=20)
        engine.add("a", [*A, *B], max_tokens=3, seed=0)
        engine.add("b", [*A[:4], *B], max_tokens=3, seed=1)
        assert [engine.step() for _ in range(2)] == [{0: 16}, {0: 1, 1: 8}]

    def test_another_one_passes(self):
        engine = Driver(num_blocks=20, max_skip_ahead=1)
        engine.add("a", A, max_tokens=3, seed=0)
        engine.add("b", A, max_tokens=3, seed=1)
        engine.add("c", B, max_tokens=3, seed=2)
        engine.step()
        assert engine.work_by_seed == {0: 8, 2: 8}
        engine.step()
        assert engine.work_by_seed == {0: 1, 2: 1, 1: 1}

    def test_none_passes_where_none_may(self):
        engine = Driver(num_blocks=20, max_skip_ahead=0)
        engine.add("a", A, max_tokens=3, seed=0)
        engine.add("b", A, max_tokens=3, seed=1)
        engine.add("c", B, max_tokens=3, seed=2)
        engine.step()
        assert engine.work_by_seed == {0: 8}

    @pytest.mark.parametrize("depth", [1, 2])
    def test_when_the_first_is_aborted_meanwhile_the_second_computes_it(self, depth):
        engine = Driver(num_blocks=20, depth=depth, chunk=4)
        engine.add("a", A, max_tokens=3, seed=0)
        engine.add("b", A, max_tokens=3, seed=1)
        assert engine.launch() == {0: 4}
        engine.abort("a")
        engine.schedule()
        assert engine.work_by_seed == {1: 4}
        engine.drain()
        assert engine.tokens("b") == completion(A, 3)

    def test_a_third_waits_for_the_second_then(self):
        engine = Driver(num_blocks=20)
        for seed, name in enumerate("abc"):
            engine.add(name, A, max_tokens=3, seed=seed)
        engine.schedule()
        engine.abort("a")
        engine.update()
        engine.step()
        assert engine.work_by_seed == {1: 8}
        engine.step()
        assert engine.work_by_seed == {1: 1, 2: 1}

    def test_another_salt_does_not_wait(self):
        engine = Driver(num_blocks=20)
        engine.add("a", A, max_tokens=3, seed=0)
        engine.add("b", A, max_tokens=3, seed=1, salt="x")
        assert engine.step() == {0: 8, 1: 8}

    def test_generated_tokens_are_not_waited_for(self):
        """Nobody knows what they will be."""
        engine = Driver(num_blocks=20)
        engine.add("a", A, max_tokens=9, seed=0)
        engine.step()
        engine.add("b", A + completion(A, 4), max_tokens=1, seed=1)
        assert engine.step() == {0: 1, 1: 4}

    def test_nobody_waits_without_a_cache(self):
        engine = Driver(num_blocks=20, caching=False)
        engine.add("a", A, max_tokens=3)
        engine.add("b", A, max_tokens=3)
        assert engine.step() == {0: 8, 1: 8}


class TestReset:
    def test_is_refused_while_a_request_runs(self):
        engine = Driver()
        engine.add("a", A, max_tokens=2)
        engine.step()
        assert engine.scheduler.reset_prefix_cache() is False
        engine.drain()
        assert engine.scheduler.reset_prefix_cache() is True
        engine.check()
        engine.add("b", A, max_tokens=1)
        assert engine.step() == {0: 8}

    @pytest.mark.parametrize("depth", [1, 2])
    def test_preempts_where_asked(self, depth):
        engine = Driver(num_blocks=20, depth=depth)
        engine.add("a", A, max_tokens=4, seed=0)
        engine.add("b", B, max_tokens=4, seed=1)
        engine.launch()
        if depth == 2:
            engine.launch()
        engine.update()
        assert engine.scheduler.reset_prefix_cache(preempt_running=True) is True
        engine.check()
        assert engine.scheduler.stats().num_preemptions == 2
        assert engine.launch() == {0: 9, 1: 9}, "with the token that is known, and nothing from the cache"
        assert engine.worker.rows[0].num_computed_tokens == 9
        engine.drain()
        assert [engine.tokens(name) for name in "ab"] == [completion(A, 4), completion(B, 4)]

    def test_with_nothing_to_preempt(self):
        assert Driver().scheduler.reset_prefix_cache(preempt_running=True) is True
