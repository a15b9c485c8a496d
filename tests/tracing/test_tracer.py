"""The tracer of one process."""

from __future__ import annotations

import gc
import threading

import msgspec
import pytest

from ringcore.tracing import ProcessTrace, Tracer, kinds, now_ns
from ringcore.tracing import tracer as tracer_module

WORK, PART = kinds.RECEIVED, kinds.APPLIED
LONG_NS = 60 * 10**9


@pytest.fixture
def tracer():
    made = Tracer()
    made.start(now_ns() + LONG_NS)
    return made


def work(tracer, number=0) -> None:
    tracer.record((PART.number, now_ns(), now_ns(), number))


def numbers(trace: ProcessTrace) -> list[int]:
    return [span.args[0] for span in trace.spans()]


def test_off_until_it_is_started():
    tracer = Tracer()
    assert not tracer.is_on
    assert list(tracer.take("engine").spans()) == []


def test_nested_spans_and_their_arguments(tracer):
    outer = tracer.is_on and now_ns()
    tracer.record((PART.number, now_ns(), now_ns(), 7))
    tracer.record((WORK.number, outer, now_ns()))
    trace = tracer.take("engine")
    part, whole = trace.spans()
    assert (part.kind, whole.kind) == (kinds.APPLY, kinds.RECEIVE)
    assert trace.began_ns <= whole.began_ns <= part.began_ns <= part.ended_ns <= whole.ended_ns <= trace.taken_ns
    assert (trace.process, part.args, whole.args, trace.is_full) == ("engine", (7,), (), False)
    assert (part.track, whole.track) == ("steps", "loop")
    assert not tracer.is_on


def test_a_chain_is_its_spans_one_after_the_other(tracer):
    """Each argument is given once, and is that of every span that has it."""
    began = now_ns()
    times = began, began + 10, began + 30, began + 35, began + 40
    tracer.record((kinds.STEP.number, *(one / 1e9 for one in times), 5, 64, 6, 700, 80))
    schedule, broadcast, update = tracer.take("engine").spans()
    assert (update.kind, update.began_ns, update.ended_ns, update.args) == (
        kinds.UPDATE,
        began + 35,
        began + 40,
        (5, 6),
    )
    assert (schedule.kind, schedule.began_ns, schedule.ended_ns) == (kinds.SCHEDULE, began, began + 10)
    assert (broadcast.kind, broadcast.began_ns, broadcast.ended_ns) == (kinds.BROADCAST, began + 10, began + 30)
    assert dict(zip(schedule.kind.args, schedule.args, strict=True)) == {"step": 5, "tokens": 64}
    assert dict(zip(broadcast.kind.args, broadcast.args, strict=True)) == {"step": 5}


def test_the_numbers_of_the_chains_are_their_places():
    assert [chain.number for chain in kinds.CHAINS] == list(range(len(kinds.CHAINS)))


def test_it_is_taken_once(tracer):
    work(tracer, 1)
    tracer.note(kinds.CALL_METHOD, 1, 2, "x")
    assert len(list(tracer.take("engine").spans())) == 2
    assert list(tracer.take("engine").spans()) == []


def test_it_crosses_a_process_as_it_is(tracer):
    work(tracer, 3)
    tracer.note(kinds.CALL_METHOD, 1, 2, "sleep", track="tokenizer 5")
    trace = tracer.take("front end", [("aten::mm", "operators", 10, 20)])
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(trace), type=ProcessTrace)
    found = [(one.kind.name, one.track, list(one.args)) for one in decoded.spans()]
    assert found == [("apply", "steps", [3]), ("call", "tokenizer 5", ["sleep"]), ("aten::mm", "operators", [])]


def test_a_full_ring_drops_the_oldest_and_says_so(monkeypatch):
    monkeypatch.setattr(tracer_module, "CAPACITY", 8)
    monkeypatch.setattr(tracer_module, "NOTES", 2)
    tracer = Tracer()
    tracer.start(now_ns() + LONG_NS)
    for number in range(20):
        work(tracer, number)
    for number in range(100, 105):
        tracer.note(kinds.TOKENIZE, 1, 2, number)
    trace = tracer.take("engine")
    assert trace.is_full
    assert sorted(numbers(trace)) == [*range(12, 20), 103, 104]


def test_the_deadline_ends_it_without_a_stop():
    tracer, ends = Tracer(), []
    tracer.on_end = lambda: ends.append(1)
    tracer.start(now_ns() + LONG_NS)
    work(tracer, 1)
    tracer._deadline_ns = now_ns()
    work(tracer, 2)
    tracer.check(tracer._deadline_ns)
    assert tracer.is_on
    tracer.check(now_ns())
    assert not tracer.is_on
    work(tracer, 3)  # of code that has begun before
    tracer.check(now_ns())
    tracer.note(kinds.TOKENIZE, now_ns(), now_ns(), 4)
    assert ends == [1]
    assert tracer.seconds_left == 0
    assert numbers(tracer.take("engine")) == [1]


def test_several_threads_record_also_while_it_is_taken(tracer):
    """Nothing is lost of what was recorded before, and what comes later harms nobody."""

    def run() -> None:
        for number in range(1000):
            work(tracer, number)
            tracer.note(kinds.TOKENIZE, now_ns(), now_ns(), number)
        barrier.wait()
        while not is_taken.is_set():
            work(tracer, -1)

    barrier, is_taken = threading.Barrier(3), threading.Event()
    threads = [threading.Thread(target=run, name=name) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    barrier.wait()
    trace = tracer.take("front end")
    tracer.start(now_ns() + LONG_NS)
    is_taken.set()
    for thread in threads:
        thread.join()
    found = list(trace.spans())
    recorded = [one.args[0] for one in found if one.kind == kinds.APPLY and one.args[0] >= 0]
    assert sorted(recorded) == sorted(2 * [*range(1000)])
    for name in ("one", "two"):  # notes have the thread's name
        assert [one.args[0] for one in found if one.track == name] == list(range(1000))


def test_nothing_is_left_for_the_garbage_collector(tracer):
    """It forgets tuples of integers when it first sees them, so a long trace makes no collection longer."""
    for number in range(1000):
        work(tracer, number)
    gc.collect()
    records = [record for record in tracer._records if record is not None]
    assert len(records) == 1000
    assert not any(map(gc.is_tracked, records))
