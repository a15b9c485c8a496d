"""A descriptor that is closed while another thread waits on it, or is about to signal it: its number may be another
file's at once, which must not be read, written or waited for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
from fake_worker import fake_config
from queue_kinds import BOUND_S, joined, made_keys

from ringcore.errors import EngineDeadError
from ringcore.executor.far.ends import HostListener
from ringcore.executor.far.host import _FINISH_S, FarHost
from ringcore.executor.far.link import Link
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.ring_memory import PAGE
from ringcore.executor.waiting import Event, PeerDied, Waiter
from ringcore.executor.worker_host import HostStart

CAPACITY = 16 * PAGE
LEFT = b"8 bytes!"  # as many as a read of an eventfd takes


@contextlib.contextmanager
def strangers(num: int = 16):
    """Pipes, which take the numbers that have just become free; yields a check that nobody else used them."""
    pipes = [os.pipe() for _ in range(num)]
    for _, write_fd in pipes:
        os.write(write_fd, LEFT)

    def check(*numbers: int) -> None:
        assert {fd for pipe in pipes for fd in pipe}.issuperset(numbers)
        assert [os.read(read_fd, 64) for read_fd, _ in pipes] == [LEFT] * num

    try:
        yield check
    finally:
        for pipe in pipes:
            for fd in pipe:
                os.close(fd)


def test_a_closed_event_signals_nobody():
    event = Event()
    number = event.fd
    event.close()
    with strangers() as check:
        event.signal()
        event.close()
        check(number)


@pytest.mark.parametrize("role", ["events", "deaths", "sources"])
def test_a_wait_goes_on_with_the_file_that_was_closed_below_it(role):
    """The owner closes between the look at the condition and the sleep: here within the look."""
    event, looks = Event(), []
    number, waiter = event.fd, Waiter(**{"events": [], role: [event.fd]})
    with contextlib.ExitStack() as stack:

        def ready() -> bool:
            looks.append(1)
            if len(looks) == 1:
                event.close()
                looks.append(stack.enter_context(strangers()))
            return len(looks) > 2 and role != "deaths"

        if role == "deaths":
            with pytest.raises(PeerDied) as caught:
                waiter.wait(ready, time.monotonic() + BOUND_S)
            assert caught.value.fd == number
        else:
            waiter.wait(ready, time.monotonic() + BOUND_S)
        looks[1](number)


def test_a_waiter_that_is_closed_during_a_wait_keeps_its_descriptors_until_the_end():
    event, is_done = Event(), threading.Event()
    num_fds, waiter = len(os.listdir("/proc/self/fd")), Waiter([event.fd])
    looks = []

    def ready() -> bool:
        looks.append(len(os.listdir("/proc/self/fd")))
        waiter.close() if len(looks) == 2 else event.signal()
        return len(looks) == 2 or is_done.is_set()

    waiter.wait(ready, time.monotonic() + BOUND_S)
    assert looks == [num_fds + 1, num_fds + 1]
    assert len(os.listdir("/proc/self/fd")) == num_fds
    with pytest.raises(RingClosed):
        waiter.take_events()
    waiter.close()
    event.close()


class Sleeper:
    """A thread that calls `action`; `sleeps` once it is about to sleep. error: what it raised."""

    def __init__(self, monkeypatch, action) -> None:
        self.sleeps, self.error, sleep = threading.Event(), None, Waiter._sleep

        def sleeping(waiter, *arguments):
            if threading.current_thread() is self._thread:
                self.sleeps.set()
            return sleep(waiter, *arguments)

        monkeypatch.setattr(Waiter, "_sleep", sleeping)
        self._thread = threading.Thread(target=self._run, args=(action,))
        self._thread.start()
        assert self.sleeps.wait(BOUND_S)

    def _run(self, action) -> None:
        try:
            action()
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("closed", ["stream", "link"])
@pytest.mark.parametrize("end", ["reader", "writer"])
def test_a_stream_that_another_thread_closes_ends_the_wait(monkeypatch, end, closed):
    with joined(1, *made_keys()) as (_, links, ends):
        reader, writer = ends[0].link.reader(0, CAPACITY), links[0].writer(0, CAPACITY)
        stream, link = (reader, ends[0].link) if end == "reader" else (writer, links[0])
        number, lost_fd = stream.events[0], link.lost_fd
        while end == "writer" and writer.try_send([bytes(PAGE)]):
            pass  # nobody reads
        action = reader.receive if end == "reader" else lambda: writer.send([bytes(PAGE)])
        sleeper = Sleeper(monkeypatch, action)
        (stream if closed == "stream" else link).close()
        with strangers(32) as check:
            sleeper.join()
            check(*((number, lost_fd) if closed == "link" else ()))
        assert isinstance(sleeper.error, RingClosed)


def test_a_link_that_is_closed_here_is_no_death(monkeypatch):
    """Its loss wakes the thread that waits before the close is done."""
    lose = Link.lose

    def slow_lose(link, why) -> None:
        lose(link, why)
        time.sleep(0.1)

    with joined(1, *made_keys()) as (_, [link], _):
        writer = link.writer(0, CAPACITY)
        while writer.try_send([bytes(PAGE)]):
            pass  # nobody reads
        sleeper = Sleeper(monkeypatch, lambda: writer.send([bytes(PAGE)]))
        monkeypatch.setattr(Link, "lose", slow_lose)
        link.close()
        sleeper.join()
        assert isinstance(sleeper.error, RingClosed)


def test_a_listener_that_another_thread_closes_ends_the_wait_for_hosts(monkeypatch):
    listener = HostListener("tcp://127.0.0.1:*", made_keys()[0], lambda join: None)
    number = listener.closing_fd
    sleeper = Sleeper(monkeypatch, lambda: listener.wait_for(["a"], time.monotonic() + 10 * BOUND_S))
    listener.close()
    with strangers(32) as check:
        sleeper.join()
        listener.interrupt()
        check(number)
    assert isinstance(sleeper.error, EngineDeadError)
    with pytest.raises(EngineDeadError, match="were shut down"):
        listener.wait_for(["a"], time.monotonic() + BOUND_S)


def test_a_host_whose_listener_is_closed_waits_for_nothing():
    """Neither for its start nor, when it is closed in its turn, for its answer."""
    start = HostStart(fake_config(hosts=["a"], join_endpoint="tcp://127.0.0.1:0", join_keys="keys"), "a", "")
    with joined(1, *made_keys()) as (listener, [link], _):
        closing_fd, host = listener.closing_fd, FarHost(start, link, 0.0)
        listener.close()
        with strangers(64) as check:
            with pytest.raises(EngineDeadError, match="were shut down"):
                host.wait_started(time.monotonic() + 10 * BOUND_S, closing_fd)
            began_s = time.monotonic()
            host.close()
            assert time.monotonic() < began_s + _FINISH_S
            check(closing_fd, link.lost_fd)
