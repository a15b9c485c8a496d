"""Two memories to run the ring's code over: sequentially consistent, and x86-TSO. `ring_model_weak` has a third.

A state is a hashable value. `perform` gives every outcome of one access, none where it must wait, and checks what holds
at each access whatever its timing: no line is stored that a reader still needs, none is loaded that is not published or
was released, head and tails keep their order and distance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from ring_model_code import LINE, Access, Do, Layout

__all__ = ["Cell", "Memory", "Outcomes", "SequentialMemory", "State", "StoreBufferMemory", "Violation"]
__all__ += ["compare", "put", "stored"]

State = tuple[Any, ...]
Outcomes = list[tuple[Any, State]]  # the result of the access, and the state after it
Cell = int | bytes  # what is in a word or in a line


class Violation(Exception):
    """A property of the ring does not hold."""


def put(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def stored(cell: Any, access: Access) -> Cell:
    """What a cell holds after this store."""
    if access[0] == Do.STORE:
        return access[2]
    _, _, begin, value = access
    return cell[:begin] + value + cell[begin + len(value) :]


def compare(cell: Any, access: Access) -> None:
    """Raises `Violation` unless a message's bytes are what was sent."""
    _, place, begin, expected = access
    found = cell[begin : begin + len(expected)]
    if found != expected:
        raise Violation(f"a message's bytes at line {place} + {begin}: {found[:16]!r}, sent were {expected[:16]!r}")


class Memory(ABC):
    """Participant 0 is the writer, 1 + i is reader i.

    has_tick: whether a sleep of the writer's ends without its event too.
    """

    needs_fence = False

    def __init__(self, layout: Layout, has_tick: bool = True) -> None:
        self.layout, self.has_tick = layout, has_tick
        self.num_participants = 1 + layout.num_readers

    @abstractmethod
    def start(self) -> State: ...

    @abstractmethod
    def perform(self, state: State, participant: int, access: Access) -> Outcomes:
        """Each result that the access may have, with the state after it. Raises `Violation`."""

    @abstractmethod
    def is_private(self, state: State, participant: int, access: Access) -> bool:
        """Whether the access may be made at once, before any step of others.

        That is: it is possible, all that others can do before it they can do after it too, with the same results, and
        it has every outcome now that it can ever have. For a line this holds because of the checks: another
        participant's access to it in between would be a violation, now or later.
        """

    def inner_steps(self, state: State) -> Iterable[tuple[int, State]]:
        """What the memory may do by itself: for which participant, and the state after it."""
        return ()

    def leave(self, state: State, participant: int) -> State:
        """The state when this participant makes no access any more. Raises `Violation`."""
        return state

    def check_store(self, access: Access, head: int, tails: list[int]) -> None:
        """`head` and `tails` are the newest that are visible; for a store of the writer's, `head` is its own newest."""
        place, capacity = access[1], self.layout.num_lines * LINE
        if access[0] == Do.STORE_LINE:
            for reader, tail in enumerate(tails):
                if self.is_unread(place, head, tail):
                    raise Violation(f"line {place} is overwritten while reader {reader} is at {tail} of {head}")
        elif place == self.layout.head:
            if not all(head <= access[2] <= tail + capacity for tail in tails):
                raise Violation(f"head goes from {head} to {access[2]}, tails are {tails}")
        elif place in self.layout.tails:
            reader = self.layout.tails.index(place)
            if not tails[reader] <= access[2] <= head:
                raise Violation(f"tail of reader {reader} goes from {tails[reader]} to {access[2]}, head is {head}")

    def check_load(self, participant: int, access: Access, head: int, tails: list[int]) -> None:
        """A reader looks at no line but those that are published and that it has not released."""
        place, reader = access[1], participant - 1
        if participant == 0:
            raise Violation(f"the writer looks at line {place}")
        if not self.is_unread(place, head, tails[reader]):
            raise Violation(f"reader {reader}, at {tails[reader]} of {head}, looks at line {place}")

    def is_unread(self, line: int, head: int, tail: int) -> bool:
        return (line - tail // LINE) % self.layout.num_lines < (head - tail) // LINE

    def words(self, cells: tuple[Any, ...]) -> tuple[int, list[int]]:
        """Head and tails."""
        return cells[self.layout.head], [cells[place] for place in self.layout.tails]


class SequentialMemory(Memory):
    """Every access happens at once and is seen by all. State: cells, events."""

    def start(self) -> State:
        return self.layout.fresh_cells, (False,) * self.num_participants

    def perform(self, state: State, participant: int, access: Access) -> Outcomes:
        cells, events = state
        match access[0]:
            case Do.LOAD:
                return [(cells[access[1]], state)]
            case Do.LOAD_LINE:
                self.check_load(participant, access, *self.words(cells))
                return [(cells[access[1]][access[2] : access[3]], state)]
            case Do.STORE | Do.STORE_LINE:
                self.check_store(access, *self.words(cells))
                return [(None, (put(cells, access[1], stored(cells[access[1]], access)), events))]
            case Do.CHECK:
                self.check_load(participant, access, *self.words(cells))
                compare(cells[access[1]], access)
                return [(None, state)]
            case Do.FENCE:
                return [(None, state)]
            case Do.CHOOSE:
                return [(choice, state) for choice in range(access[1])]
        return [(None, (cells, after)) for after in self._event_step(events, access)]

    def is_private(self, state: State, participant: int, access: Access) -> bool:
        return access[0] in (Do.FENCE, Do.CHOOSE, Do.LOAD_LINE, Do.STORE_LINE, Do.CHECK)

    def _event_step(self, events: tuple[bool, ...], access: Access) -> list[tuple[bool, ...]]:
        kind, event = access
        if kind == Do.SIGNAL:
            return [put(events, event, True)]
        if events[event]:
            return [put(events, event, False)]
        return [events] if kind == Do.SLEEP and self.has_tick else []


class StoreBufferMemory(SequentialMemory):
    """x86-TSO: stores wait in their participant's queue, in order; its own loads see them; a fence and the kernel's
    locks wait until it is empty. State: cells, events, queues."""

    def start(self) -> State:
        return *super().start(), ((),) * self.num_participants

    def perform(self, state: State, participant: int, access: Access) -> Outcomes:
        cells, events, queues = state
        queue = queues[participant]
        kind = access[0]
        if kind in (Do.STORE, Do.STORE_LINE):
            self._check_queued(access, state)
            return [(None, self._settled(cells, events, put(queues, participant, (*queue, access))))]
        if kind in (Do.LOAD, Do.LOAD_LINE, Do.CHECK):
            seen = self._seen(cells, queue), events
            return [(result, state) for result, _ in super().perform(seen, participant, access)]
        if queue and kind != Do.CHOOSE:
            return []
        return [(result, (*after, queues)) for result, after in super().perform((cells, events), participant, access)]

    def inner_steps(self, state: State) -> Iterable[tuple[int, State]]:
        cells, events, queues = state
        for participant, queue in enumerate(queues):
            if queue:
                after = put(cells, queue[0][1], stored(cells[queue[0][1]], queue[0]))
                yield participant, self._settled(after, events, put(queues, participant, queue[1:]))

    def is_private(self, state: State, participant: int, access: Access) -> bool:
        if access[0] == Do.FENCE:
            return not state[2][participant]
        return access[0] in (Do.STORE, Do.STORE_LINE, Do.LOAD_LINE, Do.CHECK, Do.CHOOSE)

    def _settled(self, cells: tuple[Any, ...], events: tuple[bool, ...], queues: tuple[Any, ...]) -> State:
        """The state when no line is the next in the writer's queue: nobody may look at it, so its time is no matter."""
        queue = queues[0]
        if not queue or queue[0][0] != Do.STORE_LINE:
            return cells, events, queues
        cells = put(cells, queue[0][1], stored(cells[queue[0][1]], queue[0]))
        return self._settled(cells, events, put(queues, 0, queue[1:]))

    def _check_queued(self, access: Access, state: State) -> None:
        head, tails = self.words(state[0])
        if access[1] not in self.layout.tails:
            head = self._seen(state[0], state[2][0])[self.layout.head]
        self.check_store(access, head, tails)

    @staticmethod
    def _seen(cells: tuple[Any, ...], queue: tuple[Access, ...]) -> tuple[Any, ...]:
        for access in queue:
            cells = put(cells, access[1], stored(cells[access[1]], access))
        return cells
