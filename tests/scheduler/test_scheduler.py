"""What a step holds, on cases that can be checked by hand: blocks of 4 tokens, one of them the null block."""

from __future__ import annotations

import random

import pytest
from fake_model import completion
from scheduler_driver import Driver

A = list(range(1, 9))  # two blocks
B = list(range(11, 19))


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
        assert list(engine.work) == [0, 2, 1], "those that run first, in the order in which they were admitted"
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
        first = engine.schedule().new_requests[0].block_ids[0].tolist()
        assert len(first) == 2
        engine.update()
        (new,) = engine.schedule().new_blocks
        assert (new.rows.tolist(), len(new.block_ids)) == ([0], 1)
        assert new.block_ids[0] not in first
        engine.update()
        assert engine.schedule().new_blocks == []


class TestTheMessage:
    """It says what has changed: the steady step names no row."""

    def test_rows_are_left_out_exactly_where_they_are_those_of_the_step_before_with_one_token_each(self):
        engine = Driver(num_blocks=100, budget=10)
        engine.add("a", A, max_tokens=7)
        engine.add("b", B[:5], max_tokens=3)
        sent = []
        for _ in range(7):
            step = engine.schedule()
            rows = None if step.rows is None else step.rows.tolist()
            counts = None if step.num_scheduled_tokens is None else step.num_scheduled_tokens.tolist()
            sent.append((rows, counts, step.num_tokens))
            engine.update()
        assert sent == [
            ([0, 1], [8, 2], 10),
            ([0, 1], [1, 3], 4),
            (None, None, 2),
            (None, None, 2),  # b's third and last token
            ([0], None, 1),
            (None, None, 1),
            (None, None, 1),
        ]

    def test_also_after_a_prompt_of_one_step(self):
        engine = Driver()
        engine.add("a", A, max_tokens=3)
        engine.step()
        assert engine.schedule().rows is None

    def test_new_workers_are_told(self):
        engine = Driver()
        engine.add("a", [1], max_tokens=9)
        engine.step()
        engine.step()
        engine.die()
        assert engine.schedule().rows.tolist() == [0]


class TestSeveralStepsAtOnce:
    def test_as_many_as_need_no_decision(self):
        engine = Driver(num_blocks=100, max_steps=8)
        engine.add("a", A, max_tokens=6)
        engine.add("b", B, max_tokens=9)
        engine.add("c", [1], max_tokens=4)
        num_steps, first_steps = [], []
        while engine.scheduler.has_unfinished:
            step = engine.schedule()
            first_steps.append(step.step)
            num_steps.append(step.num_steps)
            engine.update()
        # The prompts, c to its 4th token, a to its 6th, b to its 9th.
        assert num_steps == [1, 3, 2, 3]
        assert first_steps == [0, 1, 4, 6]
        assert engine.scheduler.stats().step == 9
        assert [engine.tokens(name) for name in "abc"] == [completion(A, 6), completion(B, 9), completion([1], 4)]

    def test_as_many_as_have_blocks(self):
        engine = Driver(num_blocks=5, max_steps=8, caching=False)  # 16 slots
        engine.add("a", A, max_tokens=6)
        engine.add("b", [1, 2], max_tokens=20)
        engine.step()  # 8 and 2 slots are used, 3 blocks are taken, one is free
        step = engine.schedule()
        assert step.num_steps == 2, "with a 9th and a 3rd token, and a 10th and a 4th; the 5th of b wants a block"
        engine.update()
        engine.drain()
        assert engine.tokens("a") == completion(A, 6)
        assert engine.tokens("b") == completion([1, 2], 15), "16 slots and one more token"

    def test_never_with_a_step_in_flight(self):
        engine = Driver(max_steps=8, depth=2)
        engine.add("a", A, max_tokens=9)
        engine.schedule()
        assert engine.schedule().num_steps == 1
        engine.update()
        assert engine.schedule().num_steps == 1
        engine.update()
        engine.update()
        assert engine.schedule().num_steps == 6

    def test_a_stop_token_ends_the_row_and_the_rest_is_dropped(self):
        stop = completion(A, 3)[2]
        engine = Driver(num_blocks=100, max_steps=8)
        engine.add("a", A, max_tokens=9, stop_token_ids=[stop])
        engine.add("b", B, max_tokens=9)
        engine.step()
        assert engine.schedule().num_steps == 8
        engine.update()
        assert (engine.tokens("a"), engine.finish_reason("a")) == (completion(A, 3), "stop")
        assert (engine.tokens("b"), engine.finish_reason("b")) == (completion(B, 9), "length")

    def test_an_abort_drops_them_all(self):
        engine = Driver(num_blocks=100, max_steps=8)
        engine.add("a", A, max_tokens=9)
        engine.add("b", B, max_tokens=5)
        engine.step()
        engine.schedule()
        engine.abort("a")
        assert [output.request_id for output in engine.update()] == ["b"]
        assert engine.tokens("b") == completion(B, 5)

    def test_an_error_of_a_row_drops_them_all(self):
        engine = Driver(num_blocks=100, max_steps=8)
        engine.add("a", A, max_tokens=9)
        engine.add("b", B, max_tokens=9)
        engine.step()
        engine.worker.rows[0].poisoned = True
        engine.drain()
        assert (engine.finish_reason("a"), engine.tokens("a")) == ("error", completion(A, 1))
        assert engine.tokens("b") == completion(B, 9)

    @pytest.mark.parametrize("caching", [False, True])
    def test_they_decide_what_single_steps_do(self, caching):
        """Random crowds without stop tokens, that all come at once: who computes what in which step."""

        def history(seed: int, max_steps: int) -> list[dict[int, int]]:
            rng = random.Random(seed)
            engine = Driver(
                num_blocks=rng.choice([5, 8, 12, 30]),
                max_num_seqs=rng.choice([2, 3, 5]),
                budget=rng.choice([6, 20]),
                max_skip_ahead=rng.choice([0, 3]),
                caching=caching,
                max_steps=max_steps,
                checks=False,
            )
            for number in range(6):
                prompt = [rng.randrange(3)] * rng.randint(1, 15)
                engine.add(f"r{number}", prompt, max_tokens=rng.randint(1, 15), seed=number)
            steps = []
            while engine.scheduler.has_unfinished:
                num_steps = engine.schedule().num_steps
                steps += [engine.work_by_seed] * num_steps
                engine.update()
            return steps

        for seed in range(60):
            assert history(seed, max_steps=5) == history(seed, max_steps=1)
