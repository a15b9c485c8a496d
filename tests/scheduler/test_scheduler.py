"""Each rule of the scheduler on a case that can be checked by hand: blocks of 4 tokens, one of them the null block."""

from __future__ import annotations

import pytest
from fake_model import expected_completion
from scheduler_driver import Driver, tokens_by_row

A = list(range(1, 9))  # two blocks
B = list(range(11, 19))


def completion(prompt: list[int], count: int) -> list[int]:
    return expected_completion(
        prompt, vocab_size=50, stop_token_ids=[], min_tokens=0, max_total_tokens=len(prompt) + count
    )[0]


class TestBudget:
    def test_one_budget_without_phases(self):
        engine = Driver(num_blocks=100, budget=100, caching=False)
        for name in "abc":
            engine.add(name, [1] * 60, max_tokens=5)
        assert [engine.step() for _ in range(3)] == [{0: 60, 1: 40}, {0: 1, 1: 20, 2: 60}, {0: 1, 1: 1, 2: 1}]

    def test_chunk_cap(self):
        engine = Driver(num_blocks=1000, budget=1024, chunk=400, caching=False)
        for name in "abc":
            engine.add(name, [1] * 800, max_tokens=5)
        assert [list(engine.step().values()) for _ in range(3)] == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]

    def test_chunk_does_not_sample_before_the_prompt_is_done(self):
        engine = Driver(budget=3)
        engine.add("a", A, max_tokens=2)
        assert [engine.step() for _ in range(2)] == [{0: 3}, {0: 3}]
        assert engine.outputs["a"] == []
        assert engine.step() == {0: 2}
        assert engine.tokens("a") == completion(A, 1)

    def test_a_budget_smaller_than_the_running_serves_the_oldest(self):
        engine = Driver(budget=1)
        engine.add("a", [1], max_tokens=3)
        engine.add("b", [2], max_tokens=3)
        assert [engine.step() for _ in range(3)] == [{0: 1}] * 3
        assert engine.finish_reason("a") == "length"
        assert engine.step() == {0: 1}
        engine.drain()
        assert engine.tokens("b") == completion([2], 3)

    def test_max_num_seqs(self):
        engine = Driver(num_blocks=100, max_num_seqs=2)
        for name in "abc":
            engine.add(name, [ord(name) % 50], max_tokens=2)
        assert engine.step() == {0: 1, 1: 1}
        assert engine.scheduler.stats().num_waiting == 1


class TestRows:
    def test_lowest_first_and_reported_before_reuse(self):
        engine = Driver(num_blocks=100)
        for name, count in zip("abc", (5, 1, 5), strict=True):
            engine.add(name, [ord(name) % 50], max_tokens=count)
        assert engine.step() == {0: 1, 1: 1, 2: 1}
        engine.add("d", [9], max_tokens=1)
        step = engine.schedule()
        assert step.finished_rows.tolist() == [1]
        assert [new.row for new in step.new_requests] == [1]
        engine.update()
        assert engine.schedule().finished_rows.tolist() == [1], "reported once, by the step after"

    def test_freed_rows_wait_for_the_next_step(self):
        engine = Driver()
        engine.add("a", [1], max_tokens=1)
        engine.step()
        assert engine.schedule() is None
        engine.add("b", [2], max_tokens=1)
        assert engine.schedule().finished_rows.tolist() == [0]

    def test_nothing_to_do(self):
        engine = Driver()
        assert engine.schedule() is None
        assert not engine.scheduler.has_unfinished

    def test_new_blocks_ride_with_their_row(self):
        engine = Driver(caching=False)
        engine.add("a", A, max_tokens=6)
        assert engine.schedule().new_requests[0].block_ids.tolist() == [1, 2]
        engine.update()
        step = engine.schedule()
        assert (step.new_block_rows.tolist(), step.new_block_ids.tolist()) == ([0], [3])
        engine.update()
        assert engine.schedule().new_block_ids.tolist() == []


class TestPreemption:
    def test_the_newest_makes_room_and_waits_at_the_front_with_nothing_computed(self):
        engine = Driver(num_blocks=6, caching=False)
        engine.add("a", A, max_tokens=3)
        engine.add("b", B, max_tokens=3)
        assert engine.step() == {0: 8, 1: 8}
        engine.add("c", [1], max_tokens=3)
        step = engine.schedule()  # a's third block is the last one
        assert tokens_by_row(step) == {0: 1}
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

    def test_at_depth_2_what_is_in_flight_is_dropped(self):
        engine = Driver(num_blocks=6, depth=2)
        engine.add("a", A, max_tokens=3)
        engine.add("b", B, max_tokens=3)
        engine.schedule()
        step = engine.schedule()  # a takes the last block while the first token of both is in flight
        assert tokens_by_row(step) == {0: 1}
        outputs = engine.update()
        assert [output.request_id for output in outputs] == ["a"]
        engine.drain()
        assert engine.tokens("b") == completion(B, 3)
        assert engine.scheduler.stats().num_preemptions == 1, "it is not resumed before its next token has a slot"


class TestStepsInFlight:
    def test_a_row_runs_on_before_its_token_is_known(self):
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=3)
        assert [tokens_by_row(engine.schedule()) for _ in range(2)] == [{0: 8}, {0: 1}]
        assert [output.new_token_ids for output in engine.update()] == [completion(A, 1)]

    def test_never_past_the_last_token(self):
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=1)
        engine.schedule()
        assert engine.schedule() is None, "the token in flight is the last one"
        engine.update()
        assert engine.tokens("a") == completion(A, 1)

    def test_a_stop_wastes_one_step_at_most(self):
        stop = completion(A, 2)[1]
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=9, stop_token_ids=[stop])
        engine.drain()
        assert engine.tokens("a") == completion(A, 2)
        assert engine.worker.num_computed_tokens == 8 + 1 + 1
        assert [output.finish_reason for output in engine.outputs["a"]] == [None, "stop"]

    @pytest.mark.parametrize("caching", [False, True])
    def test_abort_in_flight(self, caching):
        engine = Driver(num_blocks=6, depth=2, caching=caching)
        engine.add("a", A, max_tokens=9)
        engine.schedule()
        engine.schedule()
        assert [output.finish_reason for output in engine.abort("a")] == ["abort"]
        assert engine.kv_cache.num_free_blocks == 5, "at once, while two steps still write to them"
        engine.add("b", list(range(20, 40)), max_tokens=1)  # every block, a's among them, and a's row
        assert engine.update() == []
        step = engine.schedule()
        assert (step.finished_rows.tolist(), [new.row for new in step.new_requests]) == ([0], [0])
        assert engine.update() == []
        engine.drain()
        assert engine.tokens("b") == completion(list(range(20, 40)), 1)
        assert engine.tokens("a") == []

    def test_an_id_can_be_used_again_while_its_old_results_are_in_flight(self):
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=9)
        engine.schedule()
        engine.abort("a")
        engine.add("a", B, max_tokens=2)
        engine.drain()
        assert engine.tokens("a") == completion(B, 2)


class TestPrefixCache:
    def test_whole_blocks_but_for_the_last_token(self):
        engine = Driver()
        engine.add("a", A, max_tokens=1)
        engine.drain()
        engine.add("b", A, max_tokens=1)  # 8 tokens are cached; one has to be computed, so one block is found
        engine.add("c", [*A, 9], max_tokens=1)
        assert engine.step() == {0: 4, 1: 1}
        assert [engine.outputs[name][-1].num_cached_tokens for name in "abc"] == [0, 4, 8]
        stats = engine.scheduler.stats()
        assert (stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens) == (12, 8 + 8 + 9)

    def test_generated_tokens_are_found_too(self):
        engine = Driver(num_blocks=20)
        engine.add("a", A, max_tokens=5)
        engine.drain()
        engine.add("b", A + completion(A, 5), max_tokens=1)
        assert engine.step() == {0: 1}

    def test_not_before_the_step_has_come_back(self):
        engine = Driver(num_blocks=20, depth=2)
        engine.add("a", A, max_tokens=3)
        engine.add("b", A, max_tokens=3)
        assert tokens_by_row(engine.schedule()) == {0: 8, 1: 8}, "not in the step that computes them"
        engine.add("c", A, max_tokens=3)
        assert tokens_by_row(engine.schedule())[2] == 8, "nor while it is in flight"
        engine.update()
        engine.add("d", A, max_tokens=3)
        assert tokens_by_row(engine.schedule())[3] == 4
        engine.update()
        engine.drain()

    def test_salts_share_nothing(self):
        engine = Driver(num_blocks=20)
        for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", "")):
            engine.add(name, A, salt=salt, max_tokens=1)
            engine.drain()
        assert [engine.outputs[name][-1].num_cached_tokens for name in "abcde"] == [0, 0, 0, 4, 0]

    def test_a_running_request_shares_its_blocks(self):
        engine = Driver(num_blocks=9)
        engine.add("a", A, max_tokens=9)
        engine.step()
        engine.add("b", A[:4] + B[:4], max_tokens=1)
        step = engine.schedule()
        assert step.new_requests[0].block_ids.tolist()[0] == 1
        assert step.new_requests[0].num_computed_tokens == 4
        engine.update()
        engine.drain()
        assert engine.tokens("a") == completion(A, 9)

    def test_off(self):
        engine = Driver(caching=False)
        engine.add("a", A, max_tokens=1)
        engine.drain()
        engine.add("b", A, max_tokens=1)
        assert engine.step() == {0: 8}
        assert engine.scheduler.stats().num_prefix_query_tokens == 0

    def test_reset_is_refused_while_a_request_runs(self):
        engine = Driver()
        engine.add("a", A, max_tokens=2)
        engine.step()
        assert engine.scheduler.reset_prefix_cache() is False
        engine.drain()
        assert engine.scheduler.reset_prefix_cache() is True
        engine.add("b", A, max_tokens=1)
        assert engine.step() == {0: 8}
