"""Conversations that return, turn after turn, in a cache that holds few of them: each turn has the tokens of a run that
nothing disturbs, and finds of its earlier turns what it should."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from fake_model import completion
from scheduler_driver import Driver

BLOCK_SIZE = 4
MAX_TOKENS = 60  # of a conversation; then it begins anew


@dataclass
class Conversation:
    """computed: the tokens whose keys and values its last turn left; the last token that it sampled has none."""

    number: int
    text: list[int]
    num_turns: int = 0
    num_computed: int = 0
    request_id: str | None = None
    asked: list[int] = field(default_factory=list)
    num_new: int = 0


class Conversations:
    """system: tokens that all have before their own."""

    def __init__(self, engine: Driver, rng: random.Random, count: int, system: list[int]) -> None:
        self.engine, self.rng, self._system = engine, rng, system
        self.all = [Conversation(number, [*system, 1 + number]) for number in range(count)]
        self.hits: list[tuple[Conversation, int, int]] = []  # of each turn: the tokens found, and those that it might

    def ask(self, one: Conversation) -> None:
        """Its next turn: what was said, and 1 to 9 tokens more."""
        one.text += [self.rng.randrange(1, 50) for _ in range(self.rng.randint(1, 9))]
        one.request_id, one.num_new = f"{one.number}.{one.num_turns}", self.rng.randint(1, 6)
        one.asked = list(one.text)
        one.num_turns += 1
        self.engine.add(one.request_id, one.asked, max_tokens=one.num_new)

    def take(self) -> None:
        """Checks the turns that have ended; their conversations may ask again."""
        for one in self.all:
            if one.request_id is None or self.engine.finish_reason(one.request_id) is None:
                continue
            assert self.engine.tokens(one.request_id) == completion(one.asked, one.num_new), one.request_id
            found = self.engine.outputs[one.request_id][-1].num_cached_tokens
            self.hits.append((one, found, one.num_computed // BLOCK_SIZE * BLOCK_SIZE))
            one.text = [*one.asked, *self.engine.tokens(one.request_id)]
            one.num_computed = len(one.text) - 1
            one.request_id = None
            if len(one.text) > MAX_TOKENS:
                one.text, one.num_computed = [*self._system, 1 + one.number], 0

    def abort(self) -> None:
        """A turn, whatever it does; it can be asked again, and its prompt may have been computed."""
        waiting = [one for one in self.all if one.request_id is not None]
        if waiting:
            one = self.rng.choice(waiting)
            self.engine.abort(one.request_id)
            one.text, one.num_computed, one.request_id = one.asked, len(one.asked) + one.num_new, None

    @property
    def quiet(self) -> list[Conversation]:
        return [one for one in self.all if one.request_id is None]

    def finish(self) -> None:
        self.engine.drain()
        self.take()
        assert len(self.quiet) == len(self.all), "a turn without an end"
        assert not self.engine.worker.num_lost


def make_engine(**options: object) -> Driver:
    return Driver(**{"num_blocks": 26, "num_stored": 1000, "budget": 24, "max_num_seqs": 3} | options)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [None, 7])
def test_one_turn_at_a_time_finds_all_that_came_before(depth: int, chunk: int | None) -> None:
    """Six conversations in a cache of one and a half: what the last turn has computed is found to the last full
    block, in the prefix cache or beyond the device, and is counted once."""
    engine = make_engine(depth=depth, chunk=chunk)
    talk = Conversations(engine, random.Random(7), 6, [])
    for _ in range(60):
        talk.ask(talk.rng.choice(talk.all))
        talk.finish()
    assert [found for _, found, _ in talk.hits] == [most for _, _, most in talk.hits]
    stats = engine.scheduler.stats()
    assert stats.num_prefix_hit_tokens == sum(found for _, found, _ in talk.hits) > 600
    stored = engine.scheduler.loading.stats()
    assert stored.num_failed_blocks == 0
    assert 300 < stored.num_hit_tokens < stats.num_prefix_hit_tokens
    assert stored.loaded_bytes == stored.num_hit_tokens // BLOCK_SIZE  # a byte a block


def test_without_a_store_only_what_stayed_is_found() -> None:
    engine = make_engine(num_stored=0)
    talk = Conversations(engine, random.Random(7), 6, [])
    for _ in range(60):
        talk.ask(talk.rng.choice(talk.all))
        talk.finish()
    assert all(found <= most for _, found, most in talk.hits)
    missed = sum(found < most for _, found, most in talk.hits)
    assert 10 < missed < 60
    assert engine.scheduler.stats().num_prefix_hit_tokens == sum(found for _, found, _ in talk.hits)


def test_a_system_prompt_is_found_by_all() -> None:
    """Its full blocks by the first turn of each but the first conversation."""
    system = list(range(20, 34))
    engine = make_engine()
    talk = Conversations(engine, random.Random(3), 5, system)
    for one in talk.all:
        talk.ask(one)
        talk.finish()
    assert [found for _, found, _ in talk.hits] == [0, 12, 12, 12, 12]
    for one in talk.all:
        talk.ask(one)
        talk.finish()
    assert all(found == most for _, found, most in talk.hits[5:])


@pytest.mark.parametrize("mode", ["new", "all"])
def test_a_pause_between_turns_loses_nothing(mode: str) -> None:
    """Turns that come in a pause wait, others leave the cache before it, and all find what they should after it."""
    engine = make_engine(depth=2, num_blocks=40)
    talk = Conversations(engine, random.Random(5), 6, [])
    for round_ in range(12):
        for one in talk.all:
            if talk.rng.random() < 0.4:
                talk.ask(one)
                talk.finish()
        engine.scheduler.pause(mode)
        asked = talk.rng.sample(talk.all, 2)
        for one in asked:
            talk.ask(one)
        for _ in range(4):
            engine.step()
        assert all(not engine.outputs[one.request_id] for one in asked), round_
        engine.scheduler.resume()
        talk.finish()
    assert engine.scheduler.loading.stats().num_hit_tokens
    assert not engine.scheduler.stats().num_preemptions
    assert all(found == most for _, found, most in talk.hits)


@pytest.mark.parametrize("depth", [1, 2])
def test_turns_that_are_preempted(depth: int) -> None:
    """Four run at once where one and a half fit: their blocks leave with them, and come back."""
    engine = make_engine(depth=depth, max_num_seqs=4)
    talk = Conversations(engine, random.Random(11), 6, [])
    for _ in range(10):
        for one in talk.all:
            talk.ask(one)
        talk.finish()
    assert engine.scheduler.stats().num_preemptions
    assert all(found <= most for _, found, most in talk.hits)
    assert sum(found for _, found, _ in talk.hits) > 0.9 * sum(most for _, _, most in talk.hits)


SHAPES = [
    {},
    {"depth": 2, "chunk": 5},
    {"groups": [(4, None), (4, 6)], "num_blocks": 40},
    {"groups": [(2, None), (2, 4), (4, 9)], "num_blocks": 92, "depth": 2},
    {"num_stages": 2, "max_num_seqs": 4},
    {"policy": "priority", "preempt_lower_priority": True, "max_skip_ahead": 2},
    {"max_gain": 3},
]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("kind", ["crowd", "failing", "dying"])
def test_turns_of_many_at_once(shape: int, kind: str) -> None:
    """They come while others run, in a small cache; loads fail, the workers die with what
    is beyond the device, the cache is reset, turns are aborted, and there are pauses: no token is another one, and no
    turn finds more than was computed."""
    rng = random.Random(f"{shape} {kind}")
    engine = make_engine(failure_rate=0.2 if kind == "failing" else 0.0, num_stored=200, **SHAPES[shape])
    talk = Conversations(engine, rng, 8, [])
    has_died = False
    for _ in range(250):
        event = rng.random()
        if event < 0.3 and talk.quiet:
            talk.ask(rng.choice(talk.quiet))
        elif event < 0.32:
            engine.scheduler.pause(rng.choice(["new", "all"]))
        elif event < 0.42:
            engine.scheduler.resume()
        elif event < 0.44 and kind == "dying" and not has_died:  # a second one would reject who ran in both
            engine.die()
            has_died = True
        elif event < 0.46 and kind != "crowd":
            engine.scheduler.reset_prefix_cache(preempt_running=rng.random() < 0.5)
            engine.check()
        elif event < 0.48:
            talk.abort()
        else:
            engine.step()
        talk.take()
    engine.scheduler.resume()
    talk.finish()
    assert len(talk.hits) > 15
    assert all(found <= most for _, found, most in talk.hits)
    assert sum(found for _, found, _ in talk.hits)
    assert engine.kv_cache.num_free_blocks == engine.num_blocks - 1
    assert engine.scheduler.loading.stats().loaded_bytes
