"""A model checker of the ring: its real code over every interleaving of a small ring, or over random ones of a larger.

`explore` visits every state that a scenario can reach, and checks that

- each message arrives once, in order, whole, and stays so until it is released (`ring_model_program`);
- nothing that is unread is overwritten, and head and tails keep their order and distance (`ring_model_memory`);
- from every state all participants can still come to their end: nobody waits for what will not happen;
- at the end every reader that stayed has received everything that was sent before the close.

`walk` follows single schedules, chosen at random, and checks the same except that it only ever sees one way ahead.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType

import numpy as np
from ring_model_code import LINE, Do, Layout, RingCode, load_ring
from ring_model_memory import Memory, Violation
from ring_model_program import Programs, Scenario

__all__ = ["Model", "Report"]

STUCK = "deadlock: a participant waits for what will not happen"
MAX_CACHED = 400_000  # outcomes that random walks keep
MAX_SCHEDULE = 100_000  # steps after which a random walk that is at no end goes round in a circle
TOLD = 10_000  # stuck states among which the clearest is told


@dataclass
class Report:
    """What was found. violation: the first property that does not hold, with the steps that lead there."""

    num_states: int = 0
    num_steps: int = 0
    num_schedules: int = 0
    violation: str | None = None
    schedule: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        counts = f"{self.num_states} states, {self.num_schedules} schedules, {self.num_steps} steps"
        if self.violation is None:
            return f"{counts}: {', '.join(sorted(self.seen))}"
        return "\n".join([f"{counts}; {self.violation}", *self.schedule])


State = tuple[int, ...]  # the memory's number, then each participant's node


class Model:
    """One scenario over one memory.

    source: of the ring, where it is not the one that stands. has_fence: by default where the memory needs it.
    shortens: whether steps whose order nobody can tell are taken in one order only (`Memory.is_private`, `_steps`).
    """

    def __init__(
        self,
        scenario: Scenario,
        memory: Callable[[Layout], Memory],
        source: str | None = None,
        has_fence: bool | None = None,
        shortens: bool = True,
    ) -> None:
        ring: ModuleType = load_ring(source)
        layout = Layout(ring, scenario.num_lines, scenario.num_readers, scenario.start_line * LINE)
        self.memory = memory(layout)
        fenced = self.memory.needs_fence if has_fence is None else has_fence
        code = RingCode(ring, layout, fenced, scenario.restart_bytes)
        self.scenario, self.layout, self.shortens = scenario, layout, shortens
        self.programs = Programs(code, scenario)
        self._turn = 0
        self._everybody = tuple(range(self.memory.num_participants))
        self._forget()

    def _forget(self) -> None:
        self._memories: list[tuple] = []
        self._memory_numbers: dict[tuple, int] = {}
        self._outcomes: dict[int, tuple[tuple[int, int], ...]] = {}
        self._inner: dict[int, tuple[tuple[int, int], ...]] = {}

    def _number(self, memory: tuple) -> int:
        number = self._memory_numbers.setdefault(memory, len(self._memories))
        if number == len(self._memories):
            self._memories.append(memory)
        return number

    def _first(self) -> State:
        return self._number(self.memory.start()), *self.programs.first

    def _performed(self, memory: int, node: int) -> list[tuple[int, int]]:
        """The memory and the node after each outcome of the node's access."""
        participant = self.programs.participant(node)
        after = []
        for result, changed in self.memory.perform(self._memories[memory], participant, self.programs.access[node]):
            next_node = self.programs.follow(node, result)
            if self.programs.access[next_node] is None:
                changed = self.memory.leave(changed, participant)
            after.append((self._number(changed), next_node))
        return after

    def _is_private(self, memory: int, node: int) -> bool:
        access = self.programs.access[node]
        if access is None or not self.shortens:
            return False
        return self.memory.is_private(self._memories[memory], self.programs.participant(node), access)

    def _chains(self, memory: int, node: int) -> list[list[tuple[int, int]]]:
        """Each way to make the node's access and then all private ones: the memory and the node after each of them."""
        done, going = [], [[step] for step in self._performed(memory, node)]
        while going:
            chain = going.pop()
            if self._is_private(*chain[-1]):
                going += [[*chain, step] for step in self._performed(*chain[-1])]
            else:
                done.append(chain)
        return done

    def _steps_of(self, state: State, participant: int) -> list[State]:
        """The states after a step of this participant."""
        memory, node = state[0], state[1 + participant]
        key = memory << 24 | node
        after = self._outcomes.get(key)
        if after is None:
            is_done = self.programs.access[node] is None
            after = () if is_done else tuple({chain[-1]: None for chain in self._chains(memory, node)})
            self._outcomes[key] = after
        before, behind = state[1 : 1 + participant], state[2 + participant :]
        return [(changed, *before, next_node, *behind) for changed, next_node in after]

    def _inner_steps(self, memory: int) -> tuple[tuple[int, int], ...]:
        """What the memory may do by itself: for which participant, and the memory after it."""
        inner = self._inner.get(memory)
        if inner is None:
            found = self.memory.inner_steps(self._memories[memory])
            inner = self._inner[memory] = tuple((i, self._number(changed)) for i, changed in found)
        return inner

    def _steps(self, state: State) -> list[State]:
        """The states that may follow.

        While the writer is about to do what concerns one reader alone (look at its tail, wake it), the others stand
        still: that step is possible now and stays so, and no order of theirs and of it can be told apart.
        """
        inner = self._inner_steps(state[0])
        partner = self.programs.partners[state[1]]
        moving = self._everybody
        if self.shortens and partner is not None and not any(i == 0 for i, _ in inner):
            moving = (0, 1 + partner)
        steps = [step for i in moving for step in self._steps_of(state, i)]
        return steps + [(changed, *state[1:]) for i, changed in inner if i in moving]

    def _is_end(self, state: State) -> bool:
        """Whether everybody is done. Raises `Violation` if a message was lost on the way."""
        if any(self.programs.access[node] is not None for node in state[1:]):
            return False
        num_sent, *received = map(self.programs.count, state[1:])
        for reader, count in enumerate(received):
            if count != num_sent and count != self.scenario.stays(reader):
                raise Violation(f"reader {reader} saw the end after {count} of {num_sent} messages")
        return True

    def explore(self, max_states: int = 20_000_000) -> Report:
        """Every interleaving: all states, each once."""
        report = Report(seen=self.programs.seen)
        states = [self._first()]
        numbers = {states[0]: 0}
        parents = array("i", [-1])
        sources, targets, ends = array("i"), array("i"), []
        todo = [0]
        at = 0
        try:
            while todo:
                at = todo.pop()
                state = states[at]
                steps = self._steps(state)
                if not steps and self._is_end(state):
                    ends.append(at)
                for step in steps:
                    number = numbers.setdefault(step, len(states))
                    if number == len(states):
                        states.append(step)
                        parents.append(at)
                        todo.append(number)
                    sources.append(at)
                    targets.append(number)
                assert len(states) <= max_states, f"more than {max_states} states: {self.scenario}"
            stuck = _cannot_reach(ends, sources, targets, len(states))
            if len(stuck):
                at = max(map(int, stuck[-TOLD:]), key=lambda number: self._how_stuck(states[number]))
                raise Violation(STUCK)
        except Violation as violation:
            report.violation = str(violation)
            report.schedule = self._schedule(states, parents, at)
        report.num_states, report.num_steps = len(states), len(sources)
        return report

    def walk(self, num_schedules: int, seed: int) -> Report:
        """Random schedules. In every other one, who has made a step mostly makes the next one too."""
        report = Report(seen=self.programs.seen)
        rng = random.Random(seed)
        path: list[State] = []
        try:
            for number in range(num_schedules):
                if len(self._outcomes) > MAX_CACHED:
                    self._forget()
                state: State | None = self._first()
                path = []
                while state is not None and len(path) < MAX_SCHEDULE:
                    path.append(state)
                    state = self._random_step(state, rng, stays=0.8 * (number % 2))
                if not self._is_end(path[-1]):
                    raise Violation(STUCK)
                report.num_schedules += 1
                report.num_steps += len(path)
        except Violation as violation:
            report.violation = f"seed {seed}, schedule {report.num_schedules}: {violation}"
            path = path[-TOLD:]
            report.schedule = [self._label(*pair) for pair in pairwise(path)] + [self._ahead(path[-1])]
        return report

    def _random_step(self, state: State, rng: random.Random, stays: float) -> State | None:
        """A state that may follow, if there is any; with probability `stays` by the same participant as before."""
        if rng.random() >= stays:
            self._turn = int(rng.random() * (len(state)))
        for i in range(self._turn, self._turn + len(state)):
            participant = i % len(state)
            if participant == len(state) - 1:
                steps = [(changed, *state[1:]) for _, changed in self._inner_steps(state[0])]
            else:
                steps = self._steps_of(state, participant)
            if steps:
                return steps[int(rng.random() * len(steps))]
        return None

    def _how_stuck(self, state: State) -> tuple[int, int]:
        """How many are not done and can do nothing; how far all have come."""
        nodes = enumerate(state[1:])
        waiting = sum(self.programs.access[node] is not None and not self._steps_of(state, i) for i, node in nodes)
        return waiting, sum(map(self.programs.count, state[1:]))

    def _schedule(self, states: list[State], parents: array, at: int) -> list[str]:
        path = [states[at]]
        while parents[at] >= 0:
            at = parents[at]
            path.append(states[at])
        return [self._label(*pair) for pair in pairwise(path[::-1])] + [self._ahead(path[0])]

    def _label(self, before: State, after: State) -> str:
        """Who did what from one state to the next."""
        for node, moved in zip(before[1:], after[1:], strict=True):
            for chain in self._chains(before[0], node) if node != moved else ():
                if chain[-1] == (after[0], moved):
                    return "; then ".join(self._access(at) for _, at in [(0, node), *chain[:-1]])
        return "memory: a queued store is made"

    def _ahead(self, state: State) -> str:
        return "next would be " + "; ".join(self._access(node) for node in state[1:])

    def _access(self, node: int) -> str:
        participant, access = self.programs.participant(node), self.programs.access[node]
        name = f"reader {participant - 1}" if participant else "writer"
        if access is None:
            return f"{name} is done"
        kind, *beside = access
        if kind in (Do.LOAD, Do.STORE, Do.LOAD_LINE, Do.STORE_LINE, Do.CHECK):
            beside[0] = self.layout.names[beside[0]]
        return " ".join([f"{name}: {kind}", *(str(value)[:30] for value in beside)])


def _cannot_reach(ends: list[int], sources: array, targets: array, num_states: int) -> np.ndarray:
    """The states from which no path leads to an end."""
    can = np.zeros(num_states, bool)
    can[ends] = True
    source, target = np.frombuffer(sources, np.int32), np.frombuffer(targets, np.int32)
    while len(source):
        reaches = can[target]
        if not reaches.any():
            break
        can[source[reaches]] = True
        left = ~(reaches | can[source])
        source, target = source[left], target[left]
    return np.flatnonzero(~can)
