"""Waiting for another process: a brief spin, then poll(). Every wait ends on a result, a death or a deadline."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from ringcore.executor.memory_order import IS_STRONGLY_ORDERED

__all__ = [
    "OWN_CORE_LOOKS",
    "SPACE_TICK_S",
    "DeadlinePassed",
    "Event",
    "PeerDied",
    "RingClosed",
    "SpinBudget",
    "Waiter",
    "drain_event",
    "looks_per_yield",
    "signal_event",
    "spin_budget_s",
]

SPIN_S = 200e-6  # longer than the copy of a large message, much shorter than a step
CROWDED_SPIN_S = 50e-6
OWN_CORE_LOOKS = 128  # some 5 us: a spinner is in the kernel, where it sees nothing, for a tenth of the time, not most
SPIN_FACTOR = 5
LOST_CORE_S = 0.5e-3  # a yield that takes longer gave the core to a process with work of its own, not to the peer
REST_S, MAX_REST_S = 0.05, 0.4  # without spins: the one that ends a rest costs a tick if the core is still taken
SPACE_TICK_S = 1e-3  # the longest sleep of a writer that waits for space: its wake may be missed (see ring_buffer)


class PeerDied(Exception):
    """The process that the descriptor `fd` watches has ended."""

    def __init__(self, fd: int) -> None:
        super().__init__(f"the process of descriptor {fd} has ended")
        self.fd = fd


class RingClosed(Exception):
    """The other side has closed the ring, or this side has closed it or its waiter."""


class DeadlinePassed(Exception):
    """The deadline passed before the condition held."""


def spin_budget_s(num_processes: int) -> float:
    """Seconds to spin before sleeping, for `num_processes` that share the cores of this process.

    Waking a halted core costs about 70 us, so a wait that is likely to be short spins first. A spinner without its own
    core takes time from the process that it waits for, hence the smaller budget. Without strong memory ordering a
    reader relies on announcements through the kernel: no spin at all.
    """
    if not IS_STRONGLY_ORDERED:
        return 0.0
    return SPIN_S if len(os.sched_getaffinity(0)) >= num_processes else CROWDED_SPIN_S


def looks_per_yield(spin_s: float) -> int:
    """How many looks in a row, between two yields of the core, a spinner with this budget takes; one where it may keep
    the process that it waits for from its core."""
    return OWN_CORE_LOOKS if spin_s >= SPIN_S else 1


def signal_event(fd: int) -> None:
    """Makes an eventfd readable. One with a full count is readable already."""
    try:
        os.eventfd_write(fd, 1)
    except BlockingIOError:
        return


def drain_event(fd: int) -> None:
    """Makes an eventfd unreadable. Check the condition after this, never before, so that no event is missed."""
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return


class Event:
    """An eventfd that may be closed while other threads signal it, or wait for it by a `Waiter`.

    fd: -1 once it is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close it in the middle of a signal
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def signal(self) -> None:
        """Does nothing once it is closed: the number may be another file's."""
        with self._lock:
            if self.fd >= 0:
                signal_event(self.fd)

    def close(self) -> None:
        """Wakes who waits, and closes the descriptor. Idempotent."""
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                signal_event(fd)
                os.close(fd)


class SpinBudget:
    """How many `seconds` to spin before sleeping.

    A short sleep could have been avoided by a longer spin, and its wake-up delays the peer, which may sleep because of
    that in turn: two processes can stay in that state forever. So after a short sleep the budget is `SPIN_FACTOR` times
    as long; a long sleep resets it.

    A spinner yields the core. Another process that has work takes it then, until a tick of the kernel's scheduler; a
    process that sleeps gets it back as soon as it is woken. So two spins in a row that lost the core are followed by a
    rest, in which all waits sleep at once. The spin after it tells whether the core is free again; if not, a rest twice
    as long follows.
    """

    def __init__(self, base_s: float) -> None:
        self._base_s = self._seconds = base_s
        self._num_lost, self._rest_s, self._rests_until = 0, REST_S, 0.0

    @property
    def seconds(self) -> float:
        return self.seconds_at(time.monotonic())

    def seconds_at(self, now: float) -> float:
        """now: monotonic seconds."""
        return self._seconds if now >= self._rests_until else 0.0

    def slept(self, seconds: float) -> None:
        """Records a sleep of so many seconds after a spin."""
        self._seconds = SPIN_FACTOR * self._base_s if seconds < SPIN_FACTOR * self._base_s else self._base_s

    def spun(self, until: float, ended: float) -> None:
        """Records a spin that was to end by `until`, and that ended at `ended`."""
        if ended <= until + LOST_CORE_S:
            self._num_lost, self._rest_s = 0, REST_S
            return
        self._num_lost += 1
        if self._num_lost > 1:
            self._rests_until = ended + self._rest_s
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)

    def spin(self, spin_until: Callable[[float], bool], deadline: float | None = None) -> bool:
        """Spins by `spin_until(moment)`, within the budget and before the deadline; whether it returned true."""
        now = time.monotonic()
        until = now + self.seconds_at(now)
        if until == now:
            return spin_until(now)
        found = spin_until(until if deadline is None else min(until, deadline))
        self.spun(until, time.monotonic())
        return found


class Waiter:
    """Waits for a condition that other processes make true.

    events: eventfds that are signalled after each change of the condition; the waiter drains them.
    deaths: descriptors that become readable, or hang up, when a peer ends (pidfds, read ends of death pipes).
    spin_s: how long to spin, yielding the core each time, before sleeping in poll().
    sources: descriptors that only the condition itself makes unreadable again, such as a socket's.

    It polls duplicates of the descriptors: who owns one may close it while another thread waits, and wakes that thread
    before. The duplicates are closed with the waiter, or by `close`, but not below a thread that sleeps.
    """

    def __init__(
        self, events: Iterable[int], deaths: Iterable[int] = (), spin_s: float = 0.0, sources: Iterable[int] = ()
    ) -> None:
        self._budget = SpinBudget(spin_s)
        self._duplicates: _Duplicates | None = _Duplicates(events, deaths, sources)

    def wait(self, ready: Callable[[], bool], deadline: float | None = None, tick_s: float | None = None) -> float:
        """Returns when `ready()` is true: the seconds that it slept, 0.0 if it did not.

        `deadline` is on `time.monotonic`; `tick_s` bounds each sleep, for conditions whose event may be missed.
        Raises `PeerDied` or `DeadlinePassed`, each only after `ready()` was false once more, since a peer may make it
        true before it dies, and `RingClosed` after `close`. Errors of `ready` pass through.
        """
        if ready() or self._budget.spin(partial(_spin, ready), deadline):
            return 0.0
        fell_asleep = time.monotonic()
        while True:
            dead = self._sleep(deadline, tick_s)
            if ready():
                return time.monotonic() - fell_asleep
            if dead is not None:
                raise PeerDied(dead)
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlinePassed

    def take_events(self) -> int | None:
        """Drains the signalled events without waiting; returns the descriptor of a peer that has ended, if any."""
        return self._sleep(None, 0.0)

    def close(self) -> None:
        """A wait that would sleep then raises `RingClosed`; one that sleeps goes on until it is woken. Idempotent."""
        self._duplicates = None

    def _sleep(self, deadline: float | None, tick_s: float | None) -> int | None:
        """Sleeps until an event, a death, the deadline or the tick; the descriptor of a peer that has ended, if any."""
        duplicates = self._duplicates  # this reference keeps them open
        if duplicates is None:
            raise RingClosed
        sleep_s = tick_s
        if deadline is not None:
            left_s = max(0.0, deadline - time.monotonic())
            sleep_s = left_s if sleep_s is None else min(sleep_s, left_s)
        dead = None
        for fd, _ in duplicates.poll.poll(None if sleep_s is None else sleep_s * 1e3):
            if fd in duplicates.events:
                drain_event(fd)
            elif fd in duplicates.deaths:
                dead = duplicates.deaths[fd]
        return dead


class _Duplicates:
    """A waiter's descriptors, closed with the last reference: the waiter's own, and that of each thread that sleeps.

    deaths: by the duplicate, which descriptor it is of.
    """

    def __init__(self, events: Iterable[int], deaths: Iterable[int], sources: Iterable[int]) -> None:
        self._fds: list[int] = []
        self.poll = select.poll()
        self.events = frozenset(map(self._add, dict.fromkeys(events)))
        self.deaths = {self._add(fd): fd for fd in dict.fromkeys(deaths)}  # of several that have ended the last counts
        for fd in dict.fromkeys(sources):
            self._add(fd)

    def _add(self, fd: int) -> int:
        self._fds.append(os.dup(fd))
        self.poll.register(self._fds[-1], select.POLLIN)
        return self._fds[-1]

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _spin(ready: Callable[[], bool], until: float) -> bool:
    """Whether `ready()` is true by `until`; yields the core before each look."""
    now = time.monotonic
    while now() < until:
        os.sched_yield()
        if ready():
            return True
    return False
