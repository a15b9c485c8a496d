"""Requests that tell of their prompts: nothing of these is cached, and each is told of once, with the first token.

Blocks of 4 tokens; the driver checks of every output that its prompt's log-probabilities are there, or are not.
"""

from __future__ import annotations

import pytest
from fake_model import completion
from scheduler_driver import Driver

A = list(range(1, 10))
B = list(range(11, 20))


def prompts_told(engine: Driver, request_id: str) -> list[bool]:
    return [output.prompt_logprobs is not None for output in engine.outputs[request_id]]


@pytest.mark.parametrize("depth", [1, 2])
def test_with_the_first_token_alone(depth):
    engine = Driver(depth=depth)
    engine.add("a", A, max_tokens=3, prompt_logprobs=2)
    engine.add("b", B, max_tokens=3)
    engine.drain()
    assert prompts_told(engine, "a") == [True, False, False]
    assert prompts_told(engine, "b") == [False] * 3
    told = engine.outputs["a"][0].prompt_logprobs
    assert (told.count, len(told.token_ids)) == (2, 8 * 3)


def test_with_the_last_output_of_one_that_ends_at_once():
    engine = Driver()
    engine.add("a", A, max_tokens=1, prompt_logprobs=0)
    engine.add("b", B, max_tokens=2, prompt_logprobs=1)
    engine.drain()
    assert engine.outputs["a"][0].finish_reason == "length"
    assert prompts_told(engine, "a") == [True]
    assert prompts_told(engine, "b") == [True, False]


def test_of_a_prompt_in_chunks_after_its_last():
    engine = Driver(budget=4)
    engine.add("a", A, max_tokens=2, prompt_logprobs=1)
    for _ in range(3):
        assert engine.outputs["a"] == []
        engine.step()
    assert prompts_told(engine, "a") == [True]


@pytest.mark.parametrize(("pooling", "num_tokens"), [("mean", len(A)), ("last", 1)])
def test_a_mean_reads_nothing_cached(pooling, num_tokens):
    engine = Driver(num_blocks=20)
    engine.add("warm", A, max_tokens=1)
    engine.drain()
    engine.add("a", A, max_tokens=1, pooling=pooling)
    assert engine.step() == {0: num_tokens}


def test_it_reads_nothing_cached_and_is_found_by_others():
    engine = Driver(num_blocks=20)
    engine.add("warm", A, max_tokens=1)
    engine.drain()
    engine.add("a", A, max_tokens=1, prompt_logprobs=0)
    assert engine.step() == {0: len(A)}
    assert engine.outputs["a"][0].num_cached_tokens == 0
    assert engine.scheduler.stats().num_prefix_query_tokens == len(A), "it asked nothing of the cache"
    engine.add("told", B, max_tokens=1, prompt_logprobs=0)
    engine.drain()
    engine.add("other", B, max_tokens=1)
    assert engine.step() == {0: 1}, "what it computed is there"
    assert engine.outputs["other"][0].num_cached_tokens == 8


def test_it_waits_for_no_other_that_computes_the_same():
    engine = Driver(num_blocks=20, depth=2)
    engine.add("a", A, max_tokens=2)
    engine.launch()
    engine.add("told", A, max_tokens=2, prompt_logprobs=0)
    engine.add("waits", A, max_tokens=2)
    assert engine.launch() == {0: 1, 1: len(A)}
    engine.drain()
    assert engine.tokens("told") == engine.tokens("a") == engine.tokens("waits")


def test_a_preemption_before_the_first_token_begins_anew():
    engine = Driver(budget=4)
    engine.add("a", A, max_tokens=2, prompt_logprobs=1)
    engine.step()
    engine.step()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.drain()
    assert prompts_told(engine, "a") == [True, False]
    assert engine.outputs["a"][0].num_preemptions == 1
    assert engine.tokens("a") == completion(A, 2)


def test_a_preemption_while_the_first_token_is_in_flight_loses_both():
    engine = Driver(depth=2)
    engine.add("a", A, max_tokens=3, prompt_logprobs=1)
    engine.launch()
    engine.scheduler.reset_prefix_cache(preempt_running=True)
    assert engine.update() == []
    engine.drain()
    assert prompts_told(engine, "a") == [True, False, False]


def test_a_preemption_after_the_first_token_finds_what_is_cached():
    engine = Driver(num_blocks=6, max_model_len=40)
    engine.add("a", A[:8], max_tokens=8)
    engine.add("b", B[:8], max_tokens=8, prompt_logprobs=1)
    resumed = []
    while engine.scheduler.has_unfinished:
        scheduled = engine.schedule()
        resumed += [new for new in scheduled.new_requests if len(new.token_ids) > new.num_prompt_tokens]
        engine.update()
    assert resumed, "nobody was preempted"
    assert any(new.num_cached_tokens for new in resumed)
    assert prompts_told(engine, "b") == [True] + [False] * 7


def test_other_workers_are_asked_again():
    engine = Driver(depth=2)
    engine.add("a", A, max_tokens=2, prompt_logprobs=1)
    engine.launch()
    engine.die()
    engine.drain()
    assert prompts_told(engine, "a") == [True, False]


def test_one_that_failed_or_was_ended_tells_nothing_and_its_row_is_anothers():
    engine = Driver(budget=5, max_num_seqs=2)
    engine.add("fails", A, max_tokens=2, prompt_logprobs=1)
    engine.step()
    engine.worker.rows[0].poisoned = True
    engine.step()
    assert engine.finish_reason("fails") == "error"
    engine.add("ended", A, max_tokens=2, prompt_logprobs=1)
    engine.launch()
    engine.abort("ended")
    engine.update()
    engine.add("next", B, max_tokens=2, prompt_logprobs=1)
    engine.drain()
    assert prompts_told(engine, "fails") == prompts_told(engine, "ended") == [False]
    assert prompts_told(engine, "next") == [True, False]
