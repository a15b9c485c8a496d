"""The i-th system call fails, for i = 1, 2, ... until none is left to fail: a typed error or success, and no leak."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import signal
import threading
import time

import pytest
from chaos_engine import make_config
from chaos_worker import LARGE_BYTES, ChaosMultiproc
from failing_calls import Failer
from process_table import Census, wait_until
from ring_traffic import CAPACITY, Traffic, check_message

from ringcore.errors import RingcoreError
from ringcore.executor.near_queue import NearReader, NearWriter, create_queue
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.waiting import DeadlinePassed

WAIT_S = 60.0
LOST_S = 0.2  # for a message that a failure may have lost
SLOW_S = 60.0
GONE_S = 60.0


def use_queue(wait_s: float) -> None:
    """A queue from its making to its end, with messages in the ring and beside it."""
    handle = create_queue(CAPACITY, 2)
    ends: list = []
    try:
        writer = NearWriter(handle)
        ends.append(writer)
        readers = []
        for index in (0, 1):
            readers.append(NearReader(handle, index))
            ends.append(readers[-1])
        for size in (10, CAPACITY, 100):
            writer.send([bytes(size)], time.monotonic() + wait_s)
            for reader in readers:
                with reader.receive(time.monotonic() + wait_s) as parts:
                    assert list(map(len, parts)) == [size]
    finally:
        for end in ends:
            end.close()
        handle.close()


def test_every_system_call_of_a_queue_may_fail():
    """Below the executor the kernel's own error may pass, as what it is."""
    use_queue(WAIT_S)
    seen = set()
    for choice in (0, 1, 2):
        for nth in range(1, 1000):
            failed = fail_in_queue(nth, choice)
            if failed is None:
                break
            seen.add(failed)
        else:
            pytest.fail("it never came to an end")
    assert len(seen) >= 12, seen


def fail_in_queue(nth: int, choice: int) -> str | None:
    """What failed as the `nth` call; None where there are not so many."""
    for _ in range(10):
        before, failer, was_late = Census(), Failer(nth, choice), False
        with failer.active():
            try:
                use_queue(LOST_S)
            except DeadlinePassed:
                was_late = failer.failed is None  # nothing has failed: the machine was busy
            except (RingcoreError, OSError, RingClosed):
                if failer.failed is None:
                    raise
        deadline = time.monotonic() + GONE_S
        while gc.collect() is not None and (left := Census().grown_since(before)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left == [], failer.failed
        if not was_late:
            return failer.failed
    pytest.fail(f"messages do not come, though nothing has failed before call {nth}")


def use_executor(config) -> None:
    executor = ChaosMultiproc(config)
    try:
        executor.start()
        assert executor.collective_rpc("echo", [b"x"], timeout=WAIT_S) == [[0, b"x"], [1, b"x"]]
        large = bytes(LARGE_BYTES)
        assert executor.collective_rpc("echo", [large], timeout=WAIT_S) == [[0, large], [1, large]]
    finally:
        executor.shutdown()


def test_a_page_that_the_kernel_holds_for_a_moment_delays_a_large_message_and_no_more(model_folder, monkeypatch):
    """F_SEAL_WRITE fails with EBUSY while the kernel has a reference of its own to a page, as when it moves it."""
    real, refused = fcntl.fcntl, []

    def busy_at_first(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_ADD_SEALS and argument & fcntl.F_SEAL_WRITE and len(refused) < 2:
            refused.append(fd)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return real(fd, command, argument)

    executor = ChaosMultiproc(make_config(model_folder))
    try:
        executor.start()
        monkeypatch.setattr(fcntl, "fcntl", busy_at_first)
        large = bytes(LARGE_BYTES)
        assert executor.collective_rpc("echo", [large], timeout=WAIT_S) == [[0, large], [1, large]]
        assert len(refused) == 2
    finally:
        executor.shutdown()


@pytest.mark.timeout(900)
def test_every_system_call_of_an_executor_may_fail(model_folder, fresh_tmp, is_long, seed):
    config, rng = make_config(model_folder), random.Random(seed)
    use_executor(config)
    nth, choice, seen, problems = 1, 0, {}, []
    while True:
        before, failer = Census(), Failer(nth, choice)
        started = time.monotonic()
        with failer.active():
            try:
                use_executor(config)
            except RingcoreError as error:
                seen[failer.failed] = f"{type(error).__name__}: {str(error)[:120]}"
            except OSError as error:
                problems.append(f"{failer.failed}: not typed: {error!r}")
            else:
                seen[failer.failed] = "success"
        gc.collect()
        assert time.monotonic() - started < SLOW_S, failer.failed
        if not wait_until(lambda: not Census().grown_since(before), GONE_S):  # noqa: B023
            problems.append(f"{failer.failed}: leaked {Census().grown_since(before)}")
        assert list(fresh_tmp.iterdir()) == [], failer.failed
        if failer.failed is None:
            break
        nth, choice = nth + (1 if is_long else rng.randint(1, 8)), rng.randrange(6)
    assert len(seen) + len(problems) > 8, seen
    assert problems == [], "\n".join(problems)


def test_signals_interrupt_every_wait_and_nothing_is_lost():
    """EINTR as it really comes: a signal every half millisecond, in all of sending, receiving and waiting."""
    handle = create_queue(CAPACITY, 1)
    writer, reader = NearWriter(handle), NearReader(handle, 0)
    num_messages, num_signals = 3000, [0]

    def write() -> None:
        traffic = Traffic(4)
        for _ in range(num_messages):
            writer.send(traffic.next(), time.monotonic() + WAIT_S)

    def count(*_) -> None:
        num_signals[0] += 1

    old = signal.signal(signal.SIGALRM, count)
    thread = threading.Thread(target=write)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        thread.start()
        for sequence in range(num_messages):
            with reader.receive(time.monotonic() + WAIT_S) as parts:
                check_message(parts, sequence)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        thread.join(WAIT_S)
    writer.close()
    reader.close()
    handle.close()
    assert num_signals[0] > 20


def test_a_process_at_its_limit_of_descriptors_gets_typed_errors(model_folder):
    """EMFILE everywhere at once, and from wherever the limit happens to strike."""
    import resource

    config = make_config(model_folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = Census()
    held = len(os.listdir("/proc/self/fd"))
    outcomes, problems = [], []
    for spare in (1, 3, 8, 15, 25, 40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + spare, hard))
        try:
            use_executor(config)
        except RingcoreError as error:
            outcomes.append(str(error))
        except OSError as error:
            problems.append(f"{spare} descriptors to spare: {errno.errorcode.get(error.errno)} is not typed: {error!r}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            gc.collect()
        assert wait_until(lambda: not Census().grown_since(before), GONE_S), Census().grown_since(before)
    assert problems == []
    assert outcomes
