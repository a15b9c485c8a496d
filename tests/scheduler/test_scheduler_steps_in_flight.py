"""Two steps in flight: tokens that are not known yet, and results that come too late. Blocks of 4 tokens."""

from __future__ import annotations

import pytest
from fake_model import completion
from scheduler_driver import Driver

A = list(range(1, 9))  # two blocks
B = list(range(11, 19))


class TestStepsInFlight:
    def test_a_row_runs_on_before_its_token_is_known(self):
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=3)
        assert [engine.launch() for _ in range(2)] == [{0: 8}, {0: 1}]
        assert [output.new_token_ids for output in engine.update()] == [completion(A, 1)]

    def test_never_past_the_last_token(self):
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=1)
        engine.schedule()
        assert engine.schedule() is None, "the token in flight is the last one"
        engine.update()
        assert engine.tokens("a") == completion(A, 1)

    def test_others_go_on_while_one_waits_for_its_last_token(self):
        engine = Driver(num_blocks=20, depth=2)
        engine.add("a", A, max_tokens=1)
        engine.add("b", B, max_tokens=3)
        assert [engine.launch() for _ in range(2)] == [{0: 8, 1: 8}, {1: 1}]
        engine.update()
        assert engine.launch() == {1: 1}
        engine.drain()
        assert [engine.tokens(name) for name in "ab"] == [completion(A, 1), completion(B, 3)]

    def test_a_stop_wastes_one_step_at_most(self):
        stop = completion(A, 2)[1]
        engine = Driver(depth=2)
        engine.add("a", A, max_tokens=9, stop_token_ids=[stop])
        engine.drain()
        assert engine.tokens("a") == completion(A, 2)
        assert engine.worker.num_computed_tokens == 8 + 1 + 1
        assert [output.finish_reason for output in engine.outputs["a"]] == [None, "stop"]

    def test_the_row_of_a_stop_is_reported_in_the_next_step(self):
        stop = completion(A, 1)[0]
        engine = Driver(depth=2, num_blocks=20)
        engine.add("a", A, max_tokens=9, stop_token_ids=[stop])
        engine.add("b", B, max_tokens=9)
        engine.schedule()
        assert engine.schedule().finished_rows.tolist() == []
        engine.update()
        assert engine.schedule().finished_rows.tolist() == [0]
        assert engine.work == {1: 1}

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

    def test_late_results_of_a_row_are_not_its_next_owners(self):
        """b gets a's row while a step of a is in flight; what that one sampled is nobody's."""
        engine = Driver(num_blocks=20, depth=2, max_num_seqs=1)
        engine.add("a", A, max_tokens=9)
        engine.add("b", B, max_tokens=2)
        engine.schedule()
        engine.abort("a")
        assert engine.schedule().new_requests[0].row == 0
        assert engine.update() == []
        assert [(output.request_id, output.new_token_ids) for output in engine.update()] == [("b", completion(B, 1))]

    def test_of_one_preempted_what_is_in_flight_is_dropped(self):
        engine = Driver(num_blocks=6, depth=2)
        engine.add("a", A, max_tokens=3)
        engine.add("b", B, max_tokens=3)
        engine.schedule()
        assert engine.launch() == {0: 1}, "a takes the last block while the first token of both is in flight"
        outputs = engine.update()
        assert [output.request_id for output in outputs] == ["a"]
        engine.drain()
        assert engine.tokens("b") == completion(B, 3)
        assert engine.scheduler.stats().num_preemptions == 1, "it is not resumed before its next token has a slot"

    def test_one_that_is_preempted_and_runs_again_meanwhile(self):
        """Its row is the same, its run another: the token of the first one is dropped, and sampled again."""
        engine = Driver(num_blocks=20, depth=2)
        engine.add("a", A, max_tokens=4)
        engine.schedule()
        assert engine.scheduler.reset_prefix_cache(preempt_running=True)
        assert engine.schedule().new_requests[0].row == 0
        assert engine.update() == []
        engine.drain()
        assert engine.tokens("a") == completion(A, 4)
