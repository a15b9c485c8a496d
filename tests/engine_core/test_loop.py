"""The engine's loop: replies that arrive at the worst moment, recoveries, slow clients, calls that are refused."""

from __future__ import annotations

import os
import time
from collections import deque

import numpy as np
import pytest
from fake_engine import FakeWorker, expected, make_model_folder
from served_loop import RECOVERING, ScriptedCore, Served, came, output, ready, serve, value_of, wait_until

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.engine_core import loop as loop_module
from ringcore.engine_core.transport.channel import FrameLimits, StreamClosed
from ringcore.engine_core.transport.framing import encode_frame
from ringcore.errors import EngineDeadError, InvalidRequestError, RingcoreError, RpcTimeoutError, WorkerDiedError
from ringcore.executor.base import Executor
from ringcore.executor.rpc_call import EncodedCall
from ringcore.executor.value_codec import decode_request, encode_request, encode_value
from ringcore.protocol.messages import (
    AbortRequests,
    AddRequests,
    EngineReady,
    EngineRecovering,
    Operate,
    RpcCall,
    RpcResult,
    Shutdown,
)
from ringcore.protocol.operations import Sleep, WakeUp
from ringcore.protocol.output_reader import OutputReader
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, OutputColumns
from ringcore.worker.rpc import call_rpc, rpc_methods

# ---------------------------------------------------------------------------------------------------------------
# Replies that arrive while a future is being asked.


class Future:
    def __init__(self, executor, run) -> None:
        self._executor, self._run, self.is_settled = executor, run, False
        self.error = None

    def done(self) -> bool:
        if not self.is_settled:
            self._executor.asked()
            self._executor.poll_replies()
        return self.is_settled

    def result(self, timeout=None):
        assert self.is_settled, "the loop waits for a step"
        if self.error is not None:
            raise self.error
        return self._run()

    def encoded_result(self):
        return [encode_value(value) for value in self.result()]


class SurprisingExecutor(Executor):
    """Replies arrive all at once, in the middle of the `arrive_at`-th question, and at once from then on.

    As in the real one, checking a future drains the replies of every future and empties the eventfd. Where the loop
    sleeps before that question, `arrive` is called from outside.
    """

    def __init__(self, config, arrive_at: int) -> None:
        super().__init__(config)
        self.worker = FakeWorker(config, 0)
        self.methods = rpc_methods(self.worker)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._questions_left = arrive_at
        self.num_steps = 0
        self.held: list[Future] = []  # calls of "stats" are not answered until they are released
        self._on_the_way: deque[Future] = deque()
        self._arrived: deque[Future] = deque()
        self.is_started = False

    def start(self) -> dict[str, float]:
        return {}

    def restart(self) -> dict[str, float]:
        raise AssertionError("nobody died")

    def forward(self, call: EncodedCall):
        method, args, kwargs = decode_request(call.parts)
        future = Future(self, lambda: [call_rpc(self.worker, method, args, kwargs, call.by_engine)])
        if method == "nap":
            future.error = RpcTimeoutError("too late", method=method)
        if method == "stats":
            self.held.append(future)
            return future
        return self._send(future)

    def release(self) -> None:
        self._arrived += self.held
        self.held = []
        os.eventfd_write(self._wake_fd, 1)

    def execute_model(self, scheduler_output):
        self.num_steps += 1
        return self._send(Future(self, lambda: self.worker.execute_model(scheduler_output)))

    def _send(self, future):
        if not self.is_started:
            future.is_settled = True
        else:
            self._on_the_way.append(future)
        return future

    def asked(self) -> None:
        self._questions_left -= 1
        if self._questions_left <= 0:
            self.arrive()

    def arrive(self) -> None:
        while self._on_the_way:
            self._arrived.append(self._on_the_way.popleft())
            os.eventfd_write(self._wake_fd, 1)

    def poll_replies(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
        while self._arrived:
            self._arrived.popleft().is_settled = True

    def wait_fds(self):
        return [self._wake_fd]

    def pids(self):
        return {}

    def check(self) -> None:
        self.poll_replies()

    def health(self):
        return []

    def oldest_step_s(self):
        return None

    def diagnose(self) -> str:
        return ""

    def shutdown(self) -> None:
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
        self._wake_fd = -1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def serve_surprises(folder, arrive_at: int, depth: int) -> Served:
    config = EngineConfig.from_options(
        model=folder, load_format="dummy", max_model_len=64, steps_in_flight=depth, block_size=8
    )
    executor = SurprisingExecutor(config, arrive_at)
    core = EngineCore(config, executor)
    executor.is_started = True
    served = Served(core)
    served.executor = executor
    return served


def request(request_id, max_tokens=1):
    return EngineCoreRequest(request_id, [5, 6], SamplingParams(max_tokens=max_tokens), arrival_s=0.0)


@pytest.fixture
def no_tick(monkeypatch):
    """What is executed in order needs no tick to be answered."""
    monkeypatch.setattr(loop_module, "_CALL_POLL_S", 1e6)


@pytest.mark.usefixtures("no_tick")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("arrive_at", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("call_first", [False, True])
def test_no_reply_is_slept_through(folder, arrive_at, depth, call_first):
    with serve_surprises(folder, arrive_at, depth) as served:
        sends = [lambda: served.client.send(AddRequests([request("a", 3)])), lambda: served.call(1, "echo", "x")]
        for send in reversed(sends) if call_first else sends:
            send()
        token_ids, answers, reader = [], [], OutputReader()
        while len(token_ids) < 3 or not answers:
            received = served.receive(served.executor.arrive)
            match received.message:
                case OutputColumns() as columns:
                    token_ids += [token_id for output in reader.read(columns) for token_id in output.new_token_ids]
                case RpcResult():
                    answers.append(value_of(received))
        assert token_ids == expected([5, 6], 3)
        assert answers == ["0:x"]


@pytest.mark.usefixtures("no_tick")
@pytest.mark.parametrize("arrive_at", [1, 2, 3, 4])
def test_a_call_overdue_behind_a_step_is_answered_and_the_step_too(folder, arrive_at):
    with serve_surprises(folder, arrive_at, 1) as served:
        served.client.send(AddRequests([request("a")]))
        served.call(1, "nap", 1.0, timeout_s=0.01)
        got = {type(served.receive(served.executor.arrive).message) for _ in range(2)}
        assert got == {OutputColumns, RpcResult}


@pytest.mark.usefixtures("no_tick")
@pytest.mark.parametrize("arrive_at", [1, 2, 3, 4])
def test_a_step_does_not_wait_for_a_call_behind_it(folder, arrive_at):
    with serve_surprises(folder, arrive_at, 1) as served:
        executor = served.executor
        served.client.send(AddRequests([request("a")]))
        wait_until(lambda: executor.num_steps)
        served.call(1, "stats")
        assert isinstance(served.receive(executor.arrive).message, OutputColumns)
        wait_until(lambda: executor.held)
        executor.release()
        assert isinstance(served.receive().message, RpcResult)


def test_a_call_may_overtake_a_step(folder):
    never = 1_000_000
    with serve_surprises(folder, never, 2) as served:
        executor = served.executor
        served.client.send(AddRequests([request("a")]))
        wait_until(lambda: executor.num_steps)
        for call_id in range(3):
            served.call(call_id, "stats")
        wait_until(lambda: len(executor.held) == 3)
        executor.release()
        answered = [served.receive().message for _ in range(3)]
        assert [type(m) for m in answered] == [RpcResult] * 3
        assert executor.num_steps == 1
        executor.arrive()
        assert isinstance(served.receive().message, OutputColumns)


def test_a_recovery_is_told_after_what_came_before_and_before_what_comes_after():
    with serve() as served:
        core = served.core
        core.script += [lambda: came(output(1)), lambda: came(output(2)), core.recover, lambda: came(output(3))]
        core.do(lambda: came(output(4)))
        messages = [served.receive().message for _ in range(6)]
        assert [type(m) for m in messages] == [
            OutputColumns,
            OutputColumns,
            EngineRecovering,
            EngineReady,
            OutputColumns,
            OutputColumns,
        ]
        assert [m.others[0].new_token_ids for m in messages if isinstance(m, OutputColumns)] == [
            [1],
            [2],
            [3],
            [4],
        ]
        assert messages[2] == RECOVERING
        assert messages[3] == ready(2)
        core.do(lambda: came(output(5)))  # through the new workers' descriptor
        assert served.receive().message.others == [output(5)]


def test_each_of_two_recoveries_in_a_row_is_told():
    with serve() as served:
        core = served.core
        core.script += [lambda: came(output(1)), core.recover, core.recover]
        core.do(lambda: came(output(2)))
        kinds = [type(served.receive().message) for _ in range(6)]
        assert kinds == [
            OutputColumns,
            EngineRecovering,
            EngineReady,
            EngineRecovering,
            EngineReady,
            OutputColumns,
        ]


def test_a_sleep_is_told_without_a_step():
    with serve() as served:
        core = served.core
        for is_frozen in (True, False):
            core.do(lambda frozen=is_frozen: setattr(core, "is_frozen", frozen))
            assert served.receive().message.stats.is_sleeping is is_frozen
        core.do(lambda: came(output(1)))
        assert served.receive().message.others == [output(1)]


def test_a_death_is_noticed_where_nobody_waits_for_anything():
    with serve() as served:
        core = served.core
        core.on_check = core.recover
        os.eventfd_write(core.fds[-1], 1)
        assert [type(served.receive().message) for _ in range(2)] == [EngineRecovering, EngineReady]
        core.on_check = lambda: None
        core.do(lambda: came(output(1)))
        assert served.receive().message.others == [output(1)]


def test_a_death_without_a_restart_ends_the_loop():
    dead = EngineDeadError("worker 0 was killed", process="worker 0")

    def die():
        raise dead

    with serve() as served:
        served.core.on_check = die
        os.eventfd_write(served.core.fds[-1], 1)
        served.join()
        assert served.error is dead


def test_a_call_under_which_the_workers_died_is_answered_and_the_loop_goes_on():
    with serve() as served:
        core = served.core
        core.outcomes += [WorkerDiedError("worker 0 was killed", rank=0), [encode_value("fine")]]
        served.call(1, "echo")
        wait_until(lambda: core.calls)
        core.settle()
        result = served.receive().message
        assert (result.call_id, result.error.type, result.error.details) == (1, "WorkerDiedError", {"rank": 0})
        served.call(2, "echo")
        wait_until(lambda: len(core.calls) == 2)
        core.settle()
        assert value_of(served.receive()) == "fine"


def test_calls_under_way_are_answered_before_new_workers_are_started():
    with serve() as served:
        core = served.core
        core.outcomes += [WorkerDiedError("worker 0 was killed"), [encode_value("late")], [encode_value("in time")]]
        for call_id in (1, 2, 3):
            served.call(call_id, "echo")
        wait_until(lambda: len(core.calls) == 3)
        core.calls[0][1].is_done = core.calls[2][1].is_done = True  # the second one is not settled even now
        core.do(core.recover)
        messages = [served.receive() for _ in range(5)]
        assert [type(m.message) for m in messages] == [RpcResult, RpcResult, RpcResult, EngineRecovering, EngineReady]
        errors = {m.message.call_id: m.message.error for m in messages[:3]}
        assert errors[3] is None
        assert (errors[1].type, errors[2].type) == ("WorkerDiedError", "WorkerDiedError")
        assert errors[2].message == RECOVERING.cause.message


def test_a_call_under_which_the_engine_died_ends_the_loop():
    dead = EngineDeadError("worker 0 was killed", process="worker 0")
    with serve() as served:
        served.core.outcomes.append(dead)
        served.call(1, "echo")
        wait_until(lambda: served.core.calls)
        served.core.settle()
        served.join()
        assert served.error is dead


# ---------------------------------------------------------------------------------------------------------------
# Calls.


def test_arguments_and_values_pass_through_unread():
    with serve() as served:
        core = served.core
        values = [[b"one", b"x" * 5000], [b"two"]]  # no msgpack at all
        core.outcomes.append(values)
        array = np.arange(5000)
        parts = encode_request("echo", [array], {})
        served.call(5, "echo", buffers=parts, timeout_s=3.5, unique_reply_rank=1)
        wait_until(lambda: core.calls)
        call, _ = core.calls[0]
        assert [bytes(p) for p in call.parts] == [bytes(p) for p in parts]
        assert (call.method, call.is_callable, call.timeout_s, call.unique_reply_rank) == ("echo", False, 3.5, 1)
        core.settle()
        result, buffers = served.receive()
        assert result == RpcResult(5, [2, 1])
        assert buffers == [b"one", b"x" * 5000, b"two"]


@pytest.mark.parametrize("is_allowed", [False, True])
def test_callables(is_allowed):
    with serve(ScriptedCore(is_allowed)) as served:
        core = served.core
        core.outcomes.append([encode_value(3)])
        served.call(1, "square", buffers=[b"anything"], is_callable=True)
        if is_allowed:
            wait_until(lambda: core.calls)
            core.settle()
            assert value_of(served.receive()) == 3
            assert core.calls[0][0].is_callable
        else:
            error = served.receive().message.error
            assert error.type == "InvalidRequestError"
            assert "square" in error.message
            assert "allow_callables=True" in error.message
            assert core.calls == []


@pytest.mark.parametrize(
    ("call", "buffers", "says"),
    [
        (
            RpcCall(1, "engine", "explode"),
            [],
            "give one of abort, about, finish_weight_update, front_end_trace, health, is_sleeping, kv_blocks, ",
        ),
        (RpcCall(1, "engine", "sleep", is_callable=True), [], "give one of"),
        (RpcCall(1, "engine", "sleep"), [b"x"], "its arguments are wrong"),
        (RpcCall(1, "nobody", "echo"), [b"x"], "give one of engine, workers"),
        (RpcCall(1, "engine", "stats"), [b"x"], "its arguments are wrong"),
        (RpcCall(1, "engine", "stats"), encode_request("stats", (1,), None), "its arguments are wrong"),
        (RpcCall(1, "engine", "stats", is_callable=True), [], "give one of"),
        (RpcCall(1, "workers", "echo"), [], "arguments are missing"),
    ],
)
def test_wrong_calls(call, buffers, says):
    with serve() as served:
        served.client.send(call, buffers)
        error = served.receive().message.error
        assert error.type == "InvalidRequestError"
        assert says in error.message
        served.call(2, "health", target="engine", buffers=[])
        assert value_of(served.receive())["step"] == 7


def test_what_the_engine_answers_itself():
    with serve() as served:
        answers = {}
        for i, method in enumerate(("health", "stats", "reset_prefix_cache")):
            served.call(i, method, target="engine", buffers=[])
            answers[method] = value_of(served.receive())
        assert answers["health"]["state"] == "ready"
        assert answers["stats"]["num_running"] == 0
        assert answers["reset_prefix_cache"] is True
        served.call(4, "reset_prefix_cache", True, target="engine")
        assert value_of(served.receive()) is False
        served.call(5, "pause", "all", target="engine")
        served.receive()
        assert served.core.paused == "all"
        served.call(6, "resume", target="engine")
        served.receive()
        assert served.core.paused is None


def test_an_operation_of_a_client_and_its_refusal():
    with serve() as served:
        served.core.outcomes.append([encode_value({"states": {}})])
        served.client.send(Operate(1, WakeUp(["weights"]), timeout_s=2.5))
        served.call(3, "health", target="engine", buffers=[])
        assert value_of(served.receive())["step"] == 7  # it is not waited for
        served.core.settle()
        served.core.do(lambda: None)
        assert value_of(served.receive()) == {"states": {}}
        assert served.core.operations == [(WakeUp(["weights"]), 2.5)]
        served.client.send(Operate(2, Sleep(2)))  # the core refuses it: there is no outcome for it
        assert served.receive().message.error.message == "IndexError: pop from an empty deque"


def test_an_operation_is_answered_when_it_is_over():
    with serve() as served:
        core = served.core
        core.outcomes.append([encode_value({"states": {}})])
        served.call(1, "sleep", 1, "keep", target="engine")
        served.call(2, "is_sleeping", target="engine", buffers=[])
        assert value_of(served.receive()) is True  # it is not waited for
        assert core.operations == [(Sleep(1, "keep"), None)]
        core.settle()
        core.do(lambda: None)
        assert value_of(served.receive()) == {"states": {}}


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ([[bytes(3000)]], "the call's value cannot be sent"),
        ([[b""] * 4], "the call's value cannot be sent"),
        (RingcoreError("odd", value=object()), "odd (its details cannot be sent"),
        (RingcoreError("long", value="x" * 3000), "long (its details cannot be sent"),
        (KeyError("not ours"), "KeyError: 'not ours'"),
    ],
)
def test_what_cannot_be_sent_back_is_the_error_of_its_call(outcome, says):
    limits = FrameLimits(message_bytes=1000, buffer_bytes=2000, num_buffers=3)
    with serve(limits=limits) as served:
        core = served.core
        core.outcomes += [outcome, [encode_value("next")]]
        for i in range(2):
            served.call(i, "echo")
        wait_until(lambda: len(core.calls) == 2)
        core.settle()
        result = served.receive().message
        assert result.call_id == 0
        assert says in result.error.message
        assert value_of(served.receive()) == "next"


# ---------------------------------------------------------------------------------------------------------------
# Requests, and clients that are slow, broken or gone.


def test_wrong_requests_and_aborts():
    with serve() as served:
        served.core.refuse = InvalidRequestError("too long", field="prompt")
        served.client.send(AddRequests([request("a"), request("b")]))
        served.client.send(AbortRequests(["c"]))
        outputs: list = []
        while len(outputs) < 3:
            outputs += served.receive().message.others
        assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", "error"), ("c", "abort")]
        assert outputs[0].error.type == "InvalidRequestError"


def test_a_client_that_does_not_read_does_not_hold_the_engine_up():
    num = 400
    with serve() as served:
        core = served.core
        for i in range(num):
            core.script.append(lambda i=i: came(EngineCoreOutput("a", list(range(i, i + 2000)))))
        core.do(lambda: None)
        wait_until(lambda: not core.script)
        served.client.send(AbortRequests(["x"]))
        wait_until(lambda: core.aborted)  # it reads all the while
        outputs: list = []
        while len(outputs) < num + 1:
            outputs += served.receive().message.others
        assert [o.new_token_ids[0] for o in outputs[:num]] == list(range(num))
        iterations = core.num_iterations
        time.sleep(0.1)
        assert core.num_iterations - iterations < 5  # and it sleeps again


def test_frames_that_are_none_change_nothing():
    with serve() as served:
        for _ in range(200):
            served.raw.sendall(b"".join(encode_frame(b"\xff\xfe", [], FrameLimits())))
        served.client.send(AbortRequests(["x"]))
        assert served.receive().message.others[0].request_id == "x"


def test_a_client_that_is_gone_ends_the_loop_after_what_it_sent():
    with serve() as served:
        served.client.send(AbortRequests(["x"]))
        served.client.close()
        served.join()
        assert served.error is None
        assert served.core.aborted == ["x"]


def test_a_client_that_sends_no_frames_ends_the_loop():
    with serve() as served:
        served.raw.sendall(b"HELO localhost\r\n")
        served.join()
        assert served.error is None
        assert served.client.receive() is None  # until the engine closes its end


def test_shutdown_ends_the_loop():
    with serve() as served:
        served.client.send(Shutdown())
        served.join()
        assert served.error is None
    with pytest.raises(StreamClosed):
        served.client.send(Shutdown())
