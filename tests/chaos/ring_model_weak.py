"""A memory that promises less than ARM's: only fences and events put accesses in order."""

from __future__ import annotations

from typing import Any

from ring_model_code import Access, Do, Layout
from ring_model_memory import Cell, Memory, Outcomes, State, compare, put, stored

__all__ = ["WeakMemory"]

View = tuple[int, ...]  # for each place, how many of its stores are known
Thread = tuple[View, View, View, tuple[Any, ...]]


class WeakMemory(Memory):
    """Stores of different places become visible to each participant in any order, and loads are made in any order.

    Every store of a place is kept, in order, with what its participant had published at its last fence: how far it
    then was in the places that it stores. A load takes any store that is not older than the participant's own view;
    what that store publishes becomes part of the view at the next fence. An event carries what its signaller published
    to whoever drains it. A message's bytes are loaded at any time up to the next fence: whatever stood there in between
    must be right, so a reader's load may be later than a store of its own.

    This is the release and acquire of C11, with one thing more that is allowed (late loads) and one that the ring needs
    not: a store that depends on a load, by data or by a branch, is not made before it. No processor does that.

    event_is_fence: whether the kernel's locks put the caller's own accesses before and after an event in order. ARM
    does not promise that.
    State: histories, the events' views, participants (view, view after a fence, view published, checks under way).
    """

    needs_fence = True

    def __init__(self, layout: Layout, has_tick: bool = True, event_is_fence: bool = False) -> None:
        super().__init__(layout, has_tick)
        self._event_is_fence = event_is_fence
        places = range(layout.num_places)
        self._loaders = [layout.loaders(place) for place in places]
        self._owned = [[layout.owner(place) == i for place in places] for i in range(self.num_participants)]
        self._none: View = (0,) * layout.num_places
        self._rebasings: dict[View, _Rebasing] = {}

    def start(self) -> State:
        histories = tuple(((cell, self._none),) for cell in self.layout.fresh_cells)
        thread: Thread = (self._none, self._none, self._none, ())
        return histories, (None,) * self.num_participants, (thread,) * self.num_participants

    def perform(self, state: State, participant: int, access: Access) -> Outcomes:
        match access[0]:
            case Do.LOAD | Do.LOAD_LINE:
                return self._load(state, participant, access)
            case Do.STORE | Do.STORE_LINE:
                return [(None, self._store(state, participant, access))]
            case Do.CHECK:
                return [(None, self._check(state, participant, access))]
            case Do.FENCE:
                return [(None, self._fence(state, participant))]
            case Do.CHOOSE:
                return [(choice, state) for choice in range(access[1])]
        return [(None, after) for after in self._event_step(state, participant, access)]

    def is_private(self, state: State, participant: int, access: Access) -> bool:
        if access[0] == Do.FENCE:
            # A check of a line that was released already may still see what the writer stores there.
            head, tails = self.words(self._newest(state))
            return all(self.is_unread(check[1], head, tails[participant - 1]) for check, _ in state[2][participant][3])
        # A store hides no older store, so none of the others' loads loses a result by it.
        return access[0] not in (Do.LOAD, Do.SIGNAL, Do.WAIT, Do.SLEEP)

    def leave(self, state: State, participant: int) -> State:
        self._finish_checks(state, participant)
        histories, events, threads = state
        return self._canonical(histories, events, put(threads, participant, None))

    def _load(self, state: State, participant: int, access: Access) -> Outcomes:
        histories, events, threads = state
        if access[0] == Do.LOAD_LINE:
            self.check_load(participant, access, *self.words(self._newest(state)))
        view, gained, published, checks = threads[participant]
        place, outcomes = access[1], []
        for age in range(view[place], len(histories[place])):
            cell, published_there = histories[place][age]
            result = cell if access[0] == Do.LOAD else cell[access[2] : access[3]]
            after = put(view, place, age)
            thread = (after, _join(_join(gained, after), published_there), published, checks)
            outcomes.append((result, self._canonical(histories, events, put(threads, participant, thread))))
        return outcomes

    def _store(self, state: State, participant: int, access: Access) -> State:
        histories, events, threads = state
        self.check_store(access, *self.words(self._newest(state)))
        view, gained, published, checks = threads[participant]
        place = access[1]
        history = histories[place]
        store = (stored(history[-1][0], access), put(published, place, 0))
        if store == history[-1]:  # the same once more changes nothing for anybody
            return state
        histories, age = put(histories, place, (*history, store)), len(history)
        thread = (put(view, place, age), put(gained, place, age), published, checks)
        threads = put(threads, participant, thread)
        if all(threads[i] is None for i in self._loaders[place]):
            return self._canonical(histories, events, threads)
        return histories, events, threads

    def _check(self, state: State, participant: int, access: Access) -> State:
        self.check_load(participant, access, *self.words(self._newest(state)))
        histories, events, threads = state
        view, gained, published, checks = threads[participant]
        checks = tuple(sorted({*checks, (access, view[access[1]])}))
        return histories, events, put(threads, participant, (view, gained, published, checks))

    def _fence(self, state: State, participant: int) -> State:
        self._finish_checks(state, participant)
        histories, events, threads = state
        gained = threads[participant][1]
        thread = (gained, gained, self._own(gained, participant), ())
        return self._canonical(histories, events, put(threads, participant, thread))

    def _event_step(self, state: State, participant: int, access: Access) -> list[State]:
        kind, event = access
        if self._event_is_fence:
            state = self._fence(state, participant)
        histories, events, threads = state
        view, gained, published, checks = threads[participant]
        if kind == Do.SIGNAL:
            told = _join(self._own(view, participant), events[event] or self._none)
            return [(histories, put(events, event, told), threads)]
        if events[event] is None:
            return [state] if kind == Do.SLEEP and self.has_tick else []
        thread = (_join(view, events[event]), _join(gained, events[event]), published, checks)
        return [self._canonical(histories, put(events, event, None), put(threads, participant, thread))]

    def _finish_checks(self, state: State, participant: int) -> None:
        for access, oldest in state[2][participant][3]:
            for cell, _ in state[0][access[1]][oldest:]:
                compare(cell, access)

    @staticmethod
    def _newest(state: State) -> tuple[Cell, ...]:
        return tuple([history[-1][0] for history in state[0]])

    def _own(self, view: View, participant: int) -> View:
        """What a participant publishes: how far it is in the places that it stores itself.

        The rest of its view would reach nobody who needs it: what readers store only the writer loads, and what the
        writer stores readers alone load.
        """
        return tuple([age if own else 0 for age, own in zip(view, self._owned[participant], strict=True)])

    def _canonical(self, histories: tuple[Any, ...], events: tuple[Any, ...], threads: tuple[Any, ...]) -> State:
        """Forgets the stores that nobody can load any more, and counts the others from there."""
        bases = []
        for place, history in enumerate(histories):
            seen = [threads[i][0][place] for i in self._loaders[place] if threads[i] is not None]
            bases.append(min(seen, default=len(history) - 1))
        for thread in threads:
            for access, oldest in thread[3] if thread else ():
                bases[access[1]] = min(bases[access[1]], oldest)
        if not any(bases):
            return histories, events, threads
        rebased = self._rebasings.setdefault(tuple(bases), _Rebasing(bases))
        histories = tuple(
            [
                tuple([(cell, rebased[view]) for cell, view in history[base:]])
                for history, base in zip(histories, bases, strict=True)
            ]
        )
        events = tuple([view and rebased[view] for view in events])
        return histories, events, tuple([thread and _rebased_thread(thread, rebased) for thread in threads])


class _Rebasing(dict[View, View]):
    """Views with so much less in each place, or 0. They are looked up far more often than made."""

    def __init__(self, bases: list[int]) -> None:
        self.bases = bases

    def __missing__(self, view: View) -> View:
        self[view] = less = tuple([max(0, age - base) for age, base in zip(view, self.bases, strict=True)])
        return less


def _rebased_thread(thread: Thread, rebased: _Rebasing) -> Thread:
    view, gained, published, checks = thread
    checks = tuple([(access, oldest - rebased.bases[access[1]]) for access, oldest in checks])
    return rebased[view], rebased[gained], rebased[published], checks


def _join(one: View, other: View) -> View:
    return tuple(map(max, one, other))
