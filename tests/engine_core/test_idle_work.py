"""What an engine does while it has nothing to do: when it begins, and what goes before it."""

from __future__ import annotations

import time

import pytest
from served_loop import IDLE_S, ScriptedCore, Served, came, output, ready, serve, value_of, wait_until

from ringcore.engine_core import idle_work as idle_module
from ringcore.engine_core.idle_work import IdleWork
from ringcore.errors import EngineDeadError, RingcoreError, WorkerDiedError
from ringcore.executor.value_codec import encode_value
from ringcore.protocol.messages import AbortRequests, EngineReady, EngineRecovering
from ringcore.protocol.requests import OutputColumns

FOREVER_S = 1e6


@pytest.fixture(autouse=True)
def set_quiet(monkeypatch):
    """-> sets how long the engine must have been quiet; 0 where a test does not say."""

    def set_to(seconds):
        monkeypatch.setattr(idle_module, "_QUIET_S", seconds)

    set_to(0.0)
    return set_to


def serve_with_graphs(num_left: int) -> Served:
    core = ScriptedCore()
    core.ready = ready(1, num_left)
    return serve(core)


def is_asleep(core, seconds=IDLE_S) -> bool:
    """Whether the loop has not iterated for a while."""
    iterations = core.num_iterations
    time.sleep(seconds)
    return core.num_iterations == iterations


def test_graphs_are_captured_one_after_the_other_until_none_is_left():
    with serve_with_graphs(3) as served:
        core = served.core
        for num_done in (1, 2, 3):
            wait_until(lambda n=num_done: len(core.captures) == n)
            wait_until(lambda: is_asleep(core))  # no second one while one is under way
            assert len(core.captures) == num_done
            core.reply([3 - num_done] * 2)
        wait_until(lambda: is_asleep(core))
        assert len(core.captures) == 3
        core.do(lambda: came(output(1)))
        assert served.receive().message.others == [output(1)]
        wait_until(lambda: is_asleep(core))
        assert len(core.captures) == 3


def test_no_graph_is_captured_where_none_is_left():
    with serve_with_graphs(0) as served:
        core = served.core
        core.do(lambda: came(output(1)))
        assert served.receive().message.others == [output(1)]
        wait_until(lambda: is_asleep(core))
        assert core.captures == []


def test_no_graph_is_captured_while_the_engine_is_not_idle():
    """It computes, sleeps, or its memory changes."""
    with serve(ScriptedCore()) as served:
        core = served.core
        wait_until(lambda: is_asleep(core))

        def begin():
            core.is_idle, core.ready = False, ready(2, 5)

        core.do(begin)
        wait_until(lambda: core.ready.num_graphs_left)
        core.do(lambda: came(output(1)))
        while not isinstance(served.receive().message, OutputColumns):
            pass
        wait_until(lambda: is_asleep(core))
        assert core.captures == []

        def end():
            core.is_idle = True

        core.do(end)
        wait_until(lambda: core.captures)


def test_no_graph_is_captured_while_a_call_is_under_way():
    with serve(ScriptedCore()) as served:
        core = served.core
        core.outcomes.append([encode_value("fine")])
        served.call(1, "echo")
        wait_until(lambda: core.calls)

        def new_workers():
            core.ready = ready(2, 5)

        core.do(new_workers)
        iterations = core.num_iterations
        wait_until(lambda: core.num_iterations > iterations + 3)
        assert core.captures == []
        core.settle()
        wait_until(lambda: core.captures)


def test_what_arrives_while_a_graph_is_captured_goes_before_the_next():
    with serve_with_graphs(5) as served:
        core = served.core
        wait_until(lambda: core.captures)
        wait_until(lambda: is_asleep(core))
        core.is_idle = False
        core.do(lambda: came(output(1)))
        assert served.receive().message.others == [output(1)]  # before the reply
        core.reply([4])
        wait_until(lambda: is_asleep(core))
        assert len(core.captures) == 1  # its reply is taken later
        core.is_idle = True
        served.client.send(AbortRequests(["x"]))
        assert served.receive().message.others[0].request_id == "x"
        wait_until(lambda: len(core.captures) == 2)


def test_messages_are_looked_for_between_two_graphs():
    with serve_with_graphs(5) as served:
        core = served.core
        wait_until(lambda: core.captures)
        wait_until(lambda: is_asleep(core))
        core.reply([4])
        wait_until(lambda: len(core.captures) == 2)
        (first, _), (second, _) = core.captures
        assert second - first >= 2  # the iteration of the reply ends without a call


def test_an_error_ends_the_capturing_and_nothing_else(caplog):
    with serve_with_graphs(5) as served:
        core = served.core
        wait_until(lambda: core.captures)
        with caplog.at_level("WARNING"):
            core.reply(RingcoreError("CUDA out of memory"))
            wait_until(lambda: "CUDA out of memory" in caplog.text)
        assert "steps capture those that they miss often" in caplog.text
        core.do(lambda: came(output(1)))
        assert served.receive().message.others == [output(1)]
        wait_until(lambda: is_asleep(core))
        assert len(core.captures) == 1


def test_new_workers_begin_anew():
    with serve_with_graphs(5) as served:
        core = served.core
        wait_until(lambda: core.captures)
        core.num_graphs_of_new_workers = 2
        core.reply(WorkerDiedError("worker 0 was killed", rank=0))
        wait_until(lambda: is_asleep(core))
        assert len(core.captures) == 1
        core.do(core.recover)
        assert [type(served.receive().message) for _ in range(2)] == [EngineRecovering, EngineReady]
        wait_until(lambda: len(core.captures) == 2)
        core.reply([1])
        wait_until(lambda: len(core.captures) == 3)
        core.reply([0])
        wait_until(lambda: is_asleep(core))
        assert len(core.captures) == 3


def test_a_capture_under_which_the_engine_died_ends_the_loop():
    dead = EngineDeadError("worker 0 was killed", process="worker 0")
    with serve_with_graphs(5) as served:
        wait_until(lambda: served.core.captures)
        served.core.reply(dead)
        served.join()
        assert served.error is dead


# ---------------------------------------------------------------------------------------------------------------
# How long the engine must have been quiet.


# Each returns a moment before its end.


def call_the_engine(served) -> float:
    began = time.monotonic()
    served.call(1, "health", target="engine", buffers=[])
    assert value_of(served.receive())["step"] == 7
    return began


def call_the_workers(served) -> float:
    """That it was asked is long ago when it is answered."""
    core = served.core
    num_before = len(core.calls)
    core.outcomes.append([encode_value("fine")])
    served.call(1, "echo")
    wait_until(lambda: len(core.calls) > num_before)
    time.sleep(IDLE_S)
    began = time.monotonic()
    core.settle()
    assert value_of(served.receive()) == "fine"
    return began


def end_a_request(served) -> float:
    began = time.monotonic()
    served.client.send(AbortRequests(["x"]))
    assert served.receive().message.others[0].request_id == "x"
    return began


def take_a_step(served) -> float:
    began = time.monotonic()
    served.core.do(lambda: came(output(1)))
    assert served.receive().message.others == [output(1)]
    return began


DEEDS = [call_the_engine, call_the_workers, end_a_request, take_a_step]


def test_at_the_start_graphs_follow_each_other_at_once(set_quiet):
    set_quiet(FOREVER_S)
    with serve_with_graphs(3) as served:
        for num_left in (2, 1, 0):
            wait_until(lambda n=num_left: len(served.core.captures) == 3 - n)
            served.core.reply([num_left])


@pytest.mark.parametrize("do", DEEDS)
def test_none_is_begun_right_after_anything_that_was_done(set_quiet, do):
    set_quiet(FOREVER_S)
    with serve_with_graphs(5) as served:
        core = served.core
        wait_until(lambda: core.captures)
        do(served)
        core.reply([4])
        wait_until(lambda: core.captures[0][1].is_taken)
        wait_until(lambda: is_asleep(core))  # without polling
        assert len(core.captures) == 1


@pytest.mark.parametrize("do", DEEDS)
def test_the_loop_wakes_up_for_it_by_itself(set_quiet, do):
    quiet_s = 0.2
    set_quiet(quiet_s)
    with serve_with_graphs(2) as served:
        core = served.core
        wait_until(lambda: core.captures)
        core.reply([1])
        wait_until(lambda: len(core.captures) == 2)
        began = do(served)
        core.reply([1])
        iterations = core.num_iterations
        wait_until(lambda: len(core.captures) == 3)
        assert core.captured_at[2] - began >= quiet_s
        assert core.captures[2][0] - iterations < 10, "it sleeps meanwhile"
        core.reply([0])
        wait_until(lambda: core.captures[2][1].is_taken)
        do(served)
        wait_until(lambda: is_asleep(core, 2 * quiet_s))  # with nothing to wake up for
        assert len(core.captures) == 3


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class IdleCore:
    """Of a core what idle work needs; `reply` is that to the call under way."""

    def __init__(self, num_left) -> None:
        self.ready = ready(1, num_left)
        self.is_idle = True
        self.num_calls = 0
        self.reply: list[int] | None = None

    def capture_graph(self):
        self.num_calls += 1
        self.reply = None
        return self

    def done(self) -> bool:
        return self.reply is not None

    def result(self):
        return self.reply


def test_quiet_begins_anew_with_everything_that_is_done(set_quiet):
    set_quiet(8.0)
    core, clock = IdleCore(3), Clock()
    work = IdleWork(core, clock)
    assert work.wait_s() == 0
    assert not work.advance()
    assert (core.num_calls, work.wait_s()) == (1, None)  # the reply is what to wake up for
    core.reply = [2]
    assert work.advance()
    assert work.wait_s() == 0
    assert not work.advance()
    work.postpone()
    assert work.wait_s() is None
    core.reply = [1]
    assert work.advance(), "a reply is applied at any time"
    for _ in range(3):
        assert not work.advance()
        assert work.wait_s() == 8
        clock.now += 4
        assert not work.advance()
        assert work.wait_s() == 4
        work.postpone()
    clock.now += 8
    assert work.wait_s() == 0
    assert not work.advance()
    assert core.num_calls == 3
    core.reply = [0]
    assert work.advance()
    work.postpone()
    assert not work.advance()
    assert work.wait_s() is None, "none is left"


def test_nothing_to_wait_for_while_the_engine_is_busy():
    core = IdleCore(3)
    work = IdleWork(core, Clock())
    core.is_idle = False
    assert work.wait_s() is None
    core.is_idle = True
    assert work.wait_s() == 0


def test_new_workers_are_noticed_before_the_loop_sleeps():
    core = IdleCore(0)
    work = IdleWork(core, Clock())
    assert work.wait_s() is None
    core.ready = ready(2, 3)
    assert work.wait_s() == 0
