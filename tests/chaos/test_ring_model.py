"""The ring, model-checked: every interleaving of small rings on three memories, and random ones of larger rings.

What the checker would miss does not count, so most tests here break the ring on purpose and must see it found out.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
from ring_model import STUCK, Model
from ring_model_code import LINE, ring_source
from ring_model_memory import SequentialMemory, StoreBufferMemory
from ring_model_program import Scenario
from ring_model_weak import WeakMemory

# ARM with system calls that are full fences, and with ones that put only what they announce in order.
ArmMemory = partial(WeakMemory, event_is_fence=True)
MEMORIES = {"sequential": SequentialMemory, "x86": StoreBufferMemory, "arm": ArmMemory}
NEVER = 1 << 20  # a restart that far never comes

SIX = ((64,), (), (10,), (64,), (3,), (64,))  # records of 2, 1, 2, 2, 2, 2 lines
THREE = ((64,), (), (5,))
TWO = ((64,), (5,))
SMALL = {
    "wraps, restarts and refusals": (Scenario(SIX), "wrap restart refused idle closed"),
    "no restart": (Scenario(SIX[:5], start_line=2, restart_bytes=NEVER), "wrap refused idle closed"),
    "records of three lines": (Scenario(((64, 1), (5,), (64, 3), (3, 2), (1,), (128,)), num_lines=6), "wrap restart"),
    "room is asked for": (Scenario(SIX[:5], start_line=1, asked=frozenset({1, 3})), "wrap restart refused"),
    "the reader leaves": (Scenario(SIX, leaving=(2,)), "refused cut"),
    "nothing is sent": (Scenario(()), "closed"),
}
PAIRS = {
    "wrap": (Scenario(TWO, num_readers=2, start_line=3, restart_bytes=NEVER), "wrap refused idle closed"),
    "restart": (Scenario(TWO, num_readers=2, start_line=2), "restart refused idle closed"),
    "one reader leaves": (Scenario(TWO, num_readers=2, start_line=3, leaving=(1,)), "wrap refused cut closed"),
}


def check(model: Model, seen: str = "") -> None:
    report = model.explore()
    assert report.violation is None, str(report)
    assert report.seen >= set(seen.split()), str(report)


def of_every_memory(names: dict, everywhere: str) -> list:
    """(name, memory): in the short form all on the memory that promises least, and one on each of the others too."""
    return [
        pytest.param(name, memory, marks=() if memory == "arm" or name == everywhere else pytest.mark.long_form)
        for name in names
        for memory in MEMORIES
    ]


@pytest.mark.parametrize(("name", "memory"), of_every_memory(SMALL, "wraps, restarts and refusals"))
def test_every_interleaving_with_one_reader(name, memory):
    scenario, seen = SMALL[name]
    check(Model(scenario, MEMORIES[memory]), seen)


@pytest.mark.parametrize(("name", "memory"), of_every_memory(PAIRS, "wrap"))
def test_every_interleaving_with_two_readers(name, memory):
    scenario, seen = PAIRS[name]
    check(Model(scenario, MEMORIES[memory]), seen)


@pytest.mark.parametrize(
    ("memory", "messages", "start_line"),
    [
        pytest.param("sequential", SIX[:4], 0, marks=pytest.mark.long_form),
        pytest.param("x86", (*TWO, ()), 3, marks=pytest.mark.long_form),
        pytest.param("arm", THREE, 2, marks=pytest.mark.long_form),
    ],
)
def test_every_interleaving_of_more_messages_with_two_readers(memory, messages, start_line):
    scenario = Scenario(messages, num_readers=2, start_line=start_line)
    check(Model(scenario, MEMORIES[memory]), "wrap restart refused idle closed")


def test_every_interleaving_of_still_more(is_long):
    if not is_long:
        pytest.skip("minutes and gigabytes: part of the long form")
    check(Model(Scenario(SIX, num_readers=2), SequentialMemory), "wrap restart refused")
    check(Model(Scenario(SIX[:4], num_readers=2), StoreBufferMemory), "wrap restart refused")
    check(Model(Scenario(THREE, num_readers=2), ArmMemory), "wrap restart refused")
    check(Model(Scenario(((), ()), num_readers=3, num_lines=2), SequentialMemory), "idle closed")


@pytest.mark.parametrize(
    "scenario", [SMALL["wraps, restarts and refusals"][0], pytest.param(PAIRS["wrap"][0], marks=pytest.mark.long_form)]
)
def test_no_order_rests_on_a_system_call_that_is_no_fence(scenario):
    """Only what an event announces is ordered before its arrival; all else has fences of its own."""
    check(Model(scenario, WeakMemory))


# What each random walk visits is longer than what can be explored: twelve messages, up to four readers.
@pytest.mark.parametrize("num_readers", [1, 2, 3, 4])
@pytest.mark.parametrize(("memory", "share"), [("sequential", 10), ("x86", 6), ("arm", 1)])
def test_random_schedules(memory, share, num_readers, seed, is_long):
    scenario = Scenario(SIX + SIX[::-1], num_readers, asked=frozenset({3, 8}))
    num_schedules = share * (5000 if is_long else 15) // num_readers
    report = Model(scenario, MEMORIES[memory]).walk(num_schedules, seed)
    assert report.violation is None, str(report)
    assert report.num_schedules == num_schedules
    assert report.seen >= {"wrap", "refused", "idle", "closed"}


# The checker itself.

SMALLEST = Scenario(SIX[:3], start_line=1), Scenario(((), ()), num_readers=2, num_lines=2)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("scenario", [SMALLEST[0], pytest.param(SMALLEST[1], marks=pytest.mark.long_form)])
def test_the_short_way_sees_what_the_long_way_sees(scenario, memory):
    short = Model(scenario, MEMORIES[memory]).explore()
    full = Model(scenario, MEMORIES[memory], shortens=False).explore()
    assert (short.violation, full.violation) == (None, None)
    assert short.seen == full.seen
    assert short.num_states < full.num_states


def test_an_exploration_can_be_repeated():
    first, second = (Model(SMALLEST[1], StoreBufferMemory).explore() for _ in range(2))
    assert str(first) == str(second)


def test_a_violation_is_told_with_the_steps_that_lead_to_it():
    report = Model(SMALLEST[0], SequentialMemory, mutant("no wake")).explore()
    assert report.violation == STUCK
    assert any("store head" in step for step in report.schedule)
    assert "wait 0" in report.schedule[-1]
    walked = Model(SMALLEST[0], SequentialMemory, mutant("no wake")).walk(1000, seed=1)
    assert STUCK in walked.violation
    assert "wait 0" in walked.schedule[-1]


def test_the_writer_needs_its_tick_where_stores_wait_in_a_queue():
    """A release and a wish for space may cross: both look before either can see the other."""
    scenario = SMALL["wraps, restarts and refusals"][0]
    check(Model(scenario, partial(SequentialMemory, has_tick=False)))
    assert Model(scenario, partial(StoreBufferMemory, has_tick=False)).explore().violation == STUCK
    assert Model(scenario, partial(ArmMemory, has_tick=False)).explore().violation == STUCK


def test_without_fences_arm_breaks_the_ring():
    scenario = SMALL["wraps, restarts and refusals"][0]
    assert Model(scenario, ArmMemory, has_fence=False).explore().violation is not None


def fences() -> list[tuple[str, int]]:
    """Each fence of the ring that has a duty here: the method it stands in, and its line.

    Not the one after a look at the tails: what is stored then depends on that look, and no processor stores it before.
    """
    found, method = [], ""
    for number, line in enumerate(ring_source().splitlines()):
        if match := re.match(r"    def (\w+)", line):
            method = match[1]
        if line.strip() == "self._fence()" and method != "_lowest_tail":
            found.append((method, number))
    assert len(found) >= 4
    return found


@pytest.mark.parametrize(("method", "line"), fences())
def test_each_fence_is_needed(method, line):
    lines = ring_source().splitlines()
    lines[line] = lines[line].replace("self._fence()", "pass")
    memory = WeakMemory if method == "close" else ArmMemory
    models = (Model(scenario, memory, "\n".join(lines)) for scenario, _ in SMALL.values())
    assert any(model.explore().violation for model in models)


# Each mutant: what stands once in the ring's source, and what to put there.
PUBLISH = "        self._head = self._words[_HEAD] = start + need\n"
WAKE = "        for fd in self._wake_fds:\n            signal_event(fd)\n"
CLOSE = "        self._words[_CLOSED] = 1\n"
COPY = "            data, at = self._data, start % self._capacity\n            _HEADERS[1]"
READ = "            self._end = position + num_bytes\n"
ROOM = "self._lowest_tail() + self._capacity\n"
FINISHED = "            if self._words[_HEAD] == self._position:\n                raise RingClosed"
MUTANTS = {
    "head before the record": {COPY: f"            self._words[_HEAD] = start + need\n{COPY}"},
    "wake before head": {PUBLISH + WAKE: WAKE + PUBLISH},
    "no wake": {PUBLISH + WAKE: PUBLISH},
    "one reader is not woken": {PUBLISH + WAKE: PUBLISH + WAKE.replace("_fds", "_fds[:1]")},
    "no wake at the close": {CLOSE + WAKE: CLOSE},
    "released when read": {READ: READ.replace("self._end =", "self._end = self._ack[_TAIL] =")},
    "the fastest reader gates": {"return min(self._tails)": "return max(self._tails)"},
    "a line too much is free": {ROOM: ROOM.replace("_capacity", "_capacity + LINE")},
    "a limit beyond what is free": {
        "return min(self._free_until, self._head - at + far)": "return self._head - at + far"
    },
    "no marker": {"_HEADERS[0].pack_into(self._data, self._head % self._capacity, ": "_HEADERS[0].pack("},
    "a restart that reaches its marker": {
        "need <= at and ": "",
        "self._is_free(self._head + skip + need)": "self._is_free(self._head + need)",
    },
    "a restart among unread records": {
        " and self._lowest_tail() == self._head": "",
        "self._is_free(self._head + skip + need)": "self._is_free(self._head + need)",
    },
    "the last look at the head is left out": {FINISHED: "            raise RingClosed"},
    "a closed ring is not seen": {" or self._words[_CLOSED] != 0": ""},
    "a reader that left is waited for": {"any(ack[_READER_CLOSED] for ack in self._acks)": "False"},
    "a reader leaves in silence": {"        self._ack[_READER_CLOSED] = 1\n": ""},
    "the tail goes too far": {"self._ack[_TAIL] = self._end\n": "self._ack[_TAIL] = self._end + LINE\n"},
}
HUNTS = [
    Scenario(TWO, num_lines=4, start_line=2),
    Scenario(SIX[:4]),
    Scenario(SIX[:3], leaving=(1,)),
    Scenario(((),) * 6, restart_bytes=NEVER),
    Scenario(THREE, restart_bytes=LINE),
    Scenario(TWO, num_readers=2, start_line=3),
]


def mutant(name: str) -> str:
    return changed(ring_source(), MUTANTS[name])


def changed(source: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert source.count(old) == 1, f"the ring has changed: {old!r} should stand in it once, to be broken here"
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("shortens", [True, pytest.param(False, marks=pytest.mark.long_form)])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_ring_is_found_out(name, shortens):
    models = (Model(scenario, SequentialMemory, mutant(name), shortens=shortens) for scenario in HUNTS)
    assert any(model.explore().violation for model in models)


@pytest.mark.parametrize("scenario", HUNTS)
def test_the_ring_as_it_is_passes_the_same_hunts(scenario):
    check(Model(scenario, SequentialMemory))


def test_space_must_be_wished_for_before_the_tails_are_read():
    """Even where all see all at once: a reader that releases in between would see no wish, and wake nobody."""
    wish = "        self._words[_SPACE_WANTED] = 1  # before the tails are read\n"
    look = f"        self._free_until = {ROOM}"
    late = changed(ring_source(), {wish + look: look + wish})
    assert Model(Scenario(SIX), partial(SequentialMemory, has_tick=False), late).explore().violation == STUCK


def test_other_bytes_than_were_sent_are_found_out():
    """Contents are compared, not positions alone."""
    other = changed(ring_source(), {"at += LINE\n": "at += LINE\n            part = bytes(part)[:-1] + b'!'\n"})
    assert "a message's bytes" in Model(Scenario(((5,),)), SequentialMemory, other).explore().violation
