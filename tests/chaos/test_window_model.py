"""The window of a far reader, model-checked: every interleaving of a writer, a reader and the network between them.

The real `SendWindow` and `ReceiveWindow` run; the network is two queues, which keep their order and may be cut at any
moment. A state is what both ends and both queues hold. From every state the end must be within reach, and nothing may
be lost, doubled, out of order or beyond the bound.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ringcore.executor.far import window
from ringcore.executor.far.window import MESSAGE_COST, ReceiveWindow, SendWindow
from ringcore.executor.ring_memory import RingCorruptError

CAPACITY = 8 * MESSAGE_COST
QUARTER = CAPACITY // 4
STUCK = "deadlock: a participant waits for what will not happen"


@dataclass
class State:
    """num_sent, num_taken: messages. held: sizes that have arrived and are not released. way, back: the network."""

    sender: SendWindow = field(default_factory=lambda: SendWindow(CAPACITY))
    receiver: ReceiveWindow = field(default_factory=lambda: ReceiveWindow(CAPACITY))
    num_sent: int = 0
    num_taken: int = 0
    held: tuple[int, ...] = ()
    way: tuple[tuple[int, int], ...] = ()  # (position, size) of each message
    back: tuple[int, ...] = ()  # announced positions
    is_cut: bool = False

    def key(self) -> tuple:
        ends = tuple(sorted(vars(self.sender).items())) + tuple(sorted(vars(self.receiver).items()))
        return ends, self.num_sent, self.num_taken, self.held, self.way, self.back, self.is_cut


def steps(state: State, sizes: tuple[int, ...], cuts: bool):
    """The states that may follow, each with what was done."""
    if state.num_sent < len(sizes) and state.sender.has_room(sizes[state.num_sent]):
        after = copy.deepcopy(state)
        size = sizes[state.num_sent]
        position = after.sender.send(size)
        after.num_sent += 1
        if not state.is_cut:
            after.way += ((position, size),)
        yield "the writer sends", after
    if state.way:
        after = copy.deepcopy(state)
        (position, size), *rest = state.way
        after.receiver.check(position, size)
        after.receiver.arrived(size)
        after.way, after.held = tuple(rest), (*state.held, size)
        yield "a message arrives", after
    if state.held:
        after = copy.deepcopy(state)
        size, *rest = state.held
        assert size == sizes[state.num_taken], "lost, doubled or out of order"
        announced = after.receiver.release(size)
        after.num_taken, after.held = state.num_taken + 1, tuple(rest)
        if announced is not None and not state.is_cut:
            after.back += (announced,)
        yield "the reader releases", after
    if state.back:
        after = copy.deepcopy(state)
        after.sender.released(state.back[0])
        after.back = state.back[1:]
        yield "an announcement arrives", after
    if cuts and not state.is_cut:
        after = copy.deepcopy(state)
        after.is_cut, after.way, after.back = True, (), ()
        yield "the network is cut", after


def check_bounds(state: State, sizes: tuple[int, ...]) -> None:
    unread = state.sender.head - state.receiver.released
    largest = MESSAGE_COST + max(sizes)
    assert unread <= max(CAPACITY, QUARTER - 1 + largest), f"{unread} bytes are unread"
    assert state.sender.tail <= state.receiver.released <= state.receiver.received <= state.sender.head
    if not state.is_cut:
        assert state.receiver.released - state.sender.tail < QUARTER or state.back, "a release is never announced"


def explore(sizes: tuple[int, ...], cuts: bool = False) -> tuple[int, str | None]:
    """How many states there are; the first property that does not hold, if any, with the steps that lead there."""
    states, parents = [State()], {0: (0, "")}
    numbers = {states[0].key(): 0}
    targets: list[set[int]] = []
    at, problem = 0, None
    while at < len(states) and problem is None:
        targets.append(set())
        try:
            check_bounds(states[at], sizes)
            for what, after in steps(states[at], sizes, cuts):
                number = numbers.setdefault(after.key(), len(states))
                if number == len(states):
                    states.append(after)
                    parents[number] = at, what
                targets[at].add(number)
        except (AssertionError, RingCorruptError) as violation:
            problem = str(violation)
            break
        at += 1
    if problem is None:
        done = {i for i, s in enumerate(states) if s.is_cut or s.num_taken == len(sizes)}
        while more := {i for i, after in enumerate(targets) if i not in done and after & done}:
            done |= more
        stuck = set(range(len(states))) - done
        at, problem = (min(stuck), STUCK) if stuck else (0, None)
    path = []
    while at:
        at, what = parents[at]
        path.append(what)
    return len(states), problem and "; ".join([problem, *path[::-1]])


SIZES = {
    "small ones": (0,) * 14,
    "one for the whole window": (64, CAPACITY - MESSAGE_COST, 0, 0, CAPACITY - MESSAGE_COST, 0),
    "larger than the window": (0, 3 * CAPACITY, 0, 3 * CAPACITY, 3 * CAPACITY, 0, 0),
    "all kinds": (10, 200, 0, 500, 63, 64, 65, 1000, 0),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_interleaving(name):
    num_states, problem = explore(SIZES[name])
    assert problem is None
    assert num_states > 25


def test_a_cut_leaves_no_more_than_the_bound():
    assert explore(SIZES["all kinds"], cuts=True)[1] is None


MUTANTS = {
    "announced too late": (
        "released - self._announced < self._capacity // 4",
        "released - self._announced < self._capacity",
    ),
    "never announced": ("        self._announced = self.released\n        return", "        return None and"),
    "no quarter for a large one": (" or unread < capacity // 4", " or unread == 0"),
    "half a window for a large one": (" or unread < capacity // 4", " or unread < capacity // 2"),
    "no bound": ("unread + size + MESSAGE_COST <= capacity", "True"),
    "the next one's position": (
        "position = self.head\n        self.head += size + MESSAGE_COST",
        "self.head += size + MESSAGE_COST\n        position = self.head",
    ),
    "half released": ("self.released += size + MESSAGE_COST", "self.released += size"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, monkeypatch):
    source = Path(window.__file__).read_text()
    before, after = MUTANTS[name]
    assert source.count(before) == 1
    mutant: dict = {}
    exec(compile(source.replace(before, after), "mutant", "exec"), mutant)  # noqa: S102
    monkeypatch.setitem(globals(), "SendWindow", mutant["SendWindow"])
    monkeypatch.setitem(globals(), "ReceiveWindow", mutant["ReceiveWindow"])
    assert any(explore(sizes)[1] is not None for sizes in SIZES.values())
