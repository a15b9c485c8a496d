"""Waiting for another process: a brief spin, then poll(). Every wait ends by a result, a death or a deadline."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable

from ringcore.executor.memory_order import IS_STRONGLY_ORDERED

__all__ = [
    "SPACE_TICK_S",
    "DeadlinePassed",
    "PeerDied",
    "SpinBudget",
    "Waiter",
    "drain_event",
    "signal_event",
    "spin_budget_s",
]

SPIN_S = 200e-6  # longer than the copy of a large message, short against a step
CROWDED_SPIN_S = 50e-6
LONG_SPIN_FACTOR = 5
SPACE_TICK_S = 1e-3  # the longest sleep of a writer that waits for space: its wake may be lost (see ring_buffer)


class PeerDied(Exception):
    """The process behind the descriptor `fd` has ended."""

    def __init__(self, fd: int) -> None:
        super().__init__(f"the process behind descriptor {fd} has ended")
        self.fd = fd


class DeadlinePassed(Exception):
    """The deadline passed before the condition became true."""


def spin_budget_s(num_processes: int) -> float:
    """Seconds to spin before sleeping, where `num_processes` share the cores that this process may use.

    Waking a halted core costs about 70 us, so a wait that is likely to be short spins first. A spinner without a core
    of its own takes CPU time from the process it waits for, hence the smaller budget. Without strong memory ordering
    a message counts as published only when an eventfd announced it: no spin at all.
    """
    if not IS_STRONGLY_ORDERED:
        return 0.0
    return SPIN_S if len(os.sched_getaffinity(0)) >= num_processes else CROWDED_SPIN_S


def signal_event(fd: int) -> None:
    """Makes an eventfd readable. One with a saturated counter is readable already."""
    try:
        os.eventfd_write(fd, 1)
    except BlockingIOError:
        return


def drain_event(fd: int) -> None:
    """Makes an eventfd unreadable. Check the condition after draining, never before, or a wake is lost."""
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return


class SpinBudget:
    """An adaptive spin budget: how many `seconds` to spin before sleeping.

    A longer spin would have avoided a short sleep; and the peer has to wait for this process's wake-up, so that it may
    go to sleep in turn: two processes can stay in that state indefinitely. So after a short sleep the budget is
    `LONG_SPIN_FACTOR` times as long; a long sleep (no traffic) resets it.
    """

    def __init__(self, base_s: float) -> None:
        self._base_s = self.seconds = base_s

    def slept(self, seconds: float) -> None:
        """Reports that the spin was too short: a sleep of `seconds` followed it."""
        self.seconds = LONG_SPIN_FACTOR * self._base_s if seconds < LONG_SPIN_FACTOR * self._base_s else self._base_s


class Waiter:
    """Waits for a condition that other processes make true.

    events: eventfds that are written after each change of the condition; the waiter drains them.
    deaths: descriptors that become readable, or hang up, when a peer ends (pidfds, read ends of death pipes).
    spin_s: how long to spin with sched_yield before sleeping in poll().
    """

    def __init__(self, events: Iterable[int], deaths: Iterable[int] = (), spin_s: float = 0.0) -> None:
        self._events = frozenset(events)
        self._spin_s = spin_s
        self._poll = select.poll()
        for fd in (*self._events, *deaths):
            self._poll.register(fd, select.POLLIN)

    def wait(self, ready: Callable[[], bool], deadline: float | None = None, tick_s: float | None = None) -> float:
        """Returns when `ready()` is true: the seconds it slept, 0.0 if it did not sleep.

        `deadline` is on `time.monotonic`; `tick_s` bounds each sleep, for conditions whose wake may be lost.
        Raises `PeerDied` or `DeadlinePassed`, each only after one more check of `ready()`: what a peer did before it
        died counts. Exceptions of `ready` propagate.
        """
        if ready() or self._spin(ready, deadline):
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
        """Drains the signalled events without blocking; returns the descriptor of a peer that has ended, if any."""
        return self._sleep(None, 0.0)

    def _spin(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        now = time.monotonic
        until = now() + self._spin_s
        if deadline is not None:
            until = min(until, deadline)
        while now() < until:
            os.sched_yield()
            if ready():
                return True
        return False

    def _sleep(self, deadline: float | None, tick_s: float | None) -> int | None:
        """Sleeps in poll() until an event, the deadline or the tick; returns an ended peer's descriptor, if any."""
        sleep_s = tick_s
        if deadline is not None:
            left_s = max(0.0, deadline - time.monotonic())
            sleep_s = left_s if sleep_s is None else min(sleep_s, left_s)
        dead = None
        for fd, _ in self._poll.poll(None if sleep_s is None else sleep_s * 1e3):
            if fd in self._events:
                drain_event(fd)
            else:
                dead = fd
        return dead
