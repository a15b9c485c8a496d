"""Requests whose prefix left the device: they wait for a load beside the step, and then have a prefix cache hit."""

from __future__ import annotations

import random

import pytest
from fake_model import completion
from scheduler_driver import Driver

A, B, C = ([i + 1, *range(2, 17)] for i in range(3))  # four blocks each, of eight


def make_driver(**options) -> Driver:
    return Driver(**{"num_blocks": 9, "num_stored": 100} | options)


def run(engine: Driver, request_id: str, prompt: list[int], max_tokens: int = 2) -> None:
    engine.add(request_id, prompt, max_tokens=max_tokens)
    engine.drain()
    assert engine.tokens(request_id) == completion(prompt, max_tokens)


def evicted(engine: Driver) -> Driver:
    """A was computed, and its blocks have others now."""
    for request_id, prompt in (("a", A), ("b", B), ("c", C)):
        run(engine, request_id, prompt)
    return engine


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While it is not empty no load is carried out."""
    holding, finish = [True], Driver.finish_loads
    monkeypatch.setattr(Driver, "finish_loads", lambda self: None if holding else finish(self))
    return holding


def stats(engine: Driver):
    return engine.scheduler.loading.stats()


@pytest.mark.parametrize("depth", [1, 2])
def test_it_loads_and_hits(depth: int) -> None:
    engine = evicted(make_driver(depth=depth))
    assert engine.worker.store
    run(engine, "again", [*A, 5])
    assert engine.outputs["again"][-1].num_cached_tokens == 16
    found = stats(engine)
    assert (found.num_hit_tokens, found.loaded_bytes, found.num_failed_blocks) == (16, 4, 0)
    assert found.load_s > 0
    assert engine.scheduler.stats().num_prefix_hit_tokens == 16


def test_others_run_and_start_meanwhile(held: list[bool]) -> None:
    engine = evicted(make_driver(max_num_seqs=2))
    engine.add("waits", [*A, 5], max_tokens=1)
    engine.step()
    assert engine.scheduler.view.num_by_state() == {"loading": 1}
    for number in range(20):  # more than may skip ahead of one that lacks blocks
        engine.add(f"other {number}", [number], max_tokens=1)
    for _ in range(30):
        engine.step()
    assert all(engine.finish_reason(f"other {number}") == "length" for number in range(20))
    assert engine.scheduler.has_unfinished
    held.clear()
    engine.drain()
    assert engine.tokens("waits") == completion([*A, 5], 1)


def test_a_second_one_waits_for_the_same_load(held: list[bool]) -> None:
    engine = evicted(make_driver())
    engine.add("one", [*A, 5], max_tokens=1)
    engine.add("two", [*A, 6], max_tokens=1)
    engine.step()
    assert engine.scheduler.view.num_by_state() == {"loading": 2}
    assert len(engine.worker.loads) == 1
    held.clear()
    engine.drain()
    assert [engine.outputs[one][-1].num_cached_tokens for one in ("one", "two")] == [16, 16]
    assert stats(engine).loaded_bytes == 4


def test_a_load_whose_request_is_aborted_goes_on(held: list[bool]) -> None:
    engine = evicted(make_driver())
    engine.add("aborted", [*A, 5], max_tokens=1)
    engine.step()
    engine.abort("aborted")
    assert engine.scheduler.loading.in_flight
    assert not engine.scheduler.has_unfinished
    assert engine.kv_cache.num_free_blocks == 4
    assert engine.scheduler.reset_prefix_cache()  # the blocks of the load stay its own
    assert engine.kv_cache.num_free_blocks == 4
    engine.check()
    held.clear()
    engine.drain()
    assert engine.kv_cache.num_free_blocks == 8


def test_blocks_that_fail_are_computed() -> None:
    engine = evicted(make_driver(failure_rate=1.0))
    run(engine, "again", [*A, 5])
    assert engine.outputs["again"][-1].num_cached_tokens == 0
    assert (stats(engine).num_failed_blocks, stats(engine).num_hit_tokens) == (4, 0)
    engine.failure_rate = 0.0
    run(engine, "b2", B)  # A's blocks leave again, and are saved again
    run(engine, "c2", C)
    run(engine, "third", [*A, 5])
    assert engine.outputs["third"][-1].num_cached_tokens == 16


def test_prompt_logprobs_load_nothing() -> None:
    engine = evicted(make_driver())
    engine.add("logprobs", A, max_tokens=1, prompt_logprobs=1)
    engine.drain()
    assert stats(engine).loaded_bytes == 0


def test_without_room_it_waits_in_the_queue(held: list[bool]) -> None:
    engine = evicted(make_driver())
    engine.add("large", [30, *range(1, 24)], max_tokens=4)  # it takes seven of eight blocks
    engine.step()
    engine.add("waits", [*A, 5], max_tokens=1)
    engine.step()
    assert engine.scheduler.view.num_by_state() == {"running": 1, "waiting": 1}
    held.clear()
    engine.drain()
    assert engine.outputs["waits"][-1].num_cached_tokens == 16


def test_the_workers_die_while_it_loads(held: list[bool]) -> None:
    engine = evicted(make_driver())
    engine.add("waits", [*A, 5], max_tokens=1)
    engine.step()
    engine.die()
    assert not engine.scheduler.loading.in_flight
    held.clear()
    engine.drain()
    assert engine.tokens("waits") == completion([*A, 5], 1)
    assert engine.outputs["waits"][-1].num_cached_tokens == 0


def test_a_preempted_request_finds_its_blocks_again() -> None:
    """Preemption is a swap: what was evicted since then is copied back."""
    engine = make_driver(max_num_seqs=2)
    engine.add("old", A, max_tokens=14)
    engine.add("new", B, max_tokens=14)
    engine.drain()
    assert engine.scheduler.stats().num_preemptions
    assert stats(engine).num_hit_tokens
    assert [engine.tokens(one) for one in ("old", "new")] == [completion(A, 14), completion(B, 14)]


def test_turns_of_many() -> None:
    """Eight conversations take turns in a cache of two, in random order, in groups with and without a window."""
    rng, num_loaded = random.Random(3), 0
    for groups in ([(4, None)], [(4, None), (4, 6)], [(2, None), (2, 4), (4, 9)]):
        for depth in (1, 2):
            engine = Driver(
                num_blocks=70, groups=groups, num_stored=250, depth=depth, budget=24, max_num_seqs=3, failure_rate=0.05
            )
            texts = {number: [number + 1, *range(2, 12)] for number in range(8)}
            for turn in range(40):
                number = rng.randrange(8)
                engine.add(f"turn {turn}", texts[number], max_tokens=3)
                if rng.random() < 0.5:
                    engine.drain()
                    texts[number] = [*texts[number], *completion(texts[number], 3), 40 + number][:33]
                else:
                    engine.step()
            engine.drain()
            assert not engine.worker.num_lost
            num_loaded += stats(engine).loaded_bytes
    assert num_loaded > 200


def test_what_was_cleared_while_it_loads_is_no_hit(held: list[bool]) -> None:
    """As new weights do."""
    engine = evicted(make_driver())
    engine.add("waits", [*A, 5], max_tokens=1)
    engine.step()
    engine.scheduler.store.clear()
    (number,) = engine.worker.loads
    names, _ = engine.worker.loads.pop(number)
    engine.scheduler.finish_load(number, [True] * len(names))
    held.clear()
    engine.drain()
    assert engine.tokens("waits") == completion([*A, 5], 1)
    assert engine.outputs["waits"][-1].num_cached_tokens == 0
    assert stats(engine).num_hit_tokens == 0


def test_it_loads_once(held: list[bool]) -> None:
    """What is evicted again before it starts is computed: it cannot be overtaken for ever."""
    engine = evicted(make_driver())
    engine.add("waits", [*A, 5], max_tokens=1)
    engine.step()
    (number,) = engine.worker.loads
    names, _ = engine.worker.loads.pop(number)
    engine.scheduler.finish_load(number, [False] * len(names))
    engine.scheduler.store.save(names, [1, 2, 3, 4])  # it could be loaded again
    assert engine.scheduler.loading.begin(next(iter(engine.scheduler._waiting)), engine.kv_cache.no_prefix()) is False
