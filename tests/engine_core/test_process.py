"""The engine's loop, over an executor whose replies arrive at the worst moment: while a future is being asked."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import pytest
from fake_engine import FakeWorker, expected, make_model_folder

from ringcore import EngineConfig, EngineCore, SamplingParams
from ringcore.engine_core.channel import ClientChannel, EngineChannel
from ringcore.engine_core.process import EngineLoop
from ringcore.errors import RpcTimeoutError
from ringcore.executor.base import Executor
from ringcore.protocol import AddRequests, EngineCoreOutputs, EngineCoreRequest, RpcCall, RpcResult, Shutdown

WAIT_MS = 10_000
IDLE_S = 0.05


class Future:
    def __init__(self, executor, run) -> None:
        self._executor, self._run, self.is_settled = executor, run, False
        self.error = None

    def done(self) -> bool:
        if not self.is_settled:
            self._executor.asked()
            self._executor.take_in()
        return self.is_settled

    def result(self, timeout=None):
        assert self.is_settled, "the loop waits for a step"
        if self.error is not None:
            raise self.error
        return self._run()


class SurprisingExecutor(Executor):
    """Replies arrive all at once, in the middle of the `arrive_at`-th question, and at once from then on.

    As in the real one, a question takes in the replies of every future and empties the eventfd. Where the loop
    sleeps before that question, `arrive` is called from outside.
    """

    def __init__(self, config, arrive_at: int) -> None:
        super().__init__(config)
        self.worker = FakeWorker(config, 0)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._questions_left = arrive_at
        self.num_steps = 0
        self.held: list[Future] = []  # calls of "stats" are not answered until they are released
        self._on_the_way: deque[Future] = deque()
        self._arrived: deque[Future] = deque()
        self.is_started = False

    def start(self) -> dict[str, float]:
        return {}

    def submit(self, method, args=(), kwargs=None, timeout=None):
        future = Future(self, lambda: [getattr(self.worker, method)(*args, **(kwargs or {}))])
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

    def take_in(self) -> None:
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

    def shutdown(self) -> None:
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
        self._wake_fd = -1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


class Served:
    """A loop in a thread of its own, and its client's end of the channel."""

    def __init__(self, folder, arrive_at: int, depth: int) -> None:
        config = EngineConfig.from_options(
            model=folder, load_format="dummy", max_model_len=64, steps_in_flight=depth, block_size=8
        )
        self.executor = SurprisingExecutor(config, arrive_at)
        self.core = EngineCore(config, self.executor)
        self.executor.is_started = True
        self.client = ClientChannel()
        self._engine = EngineChannel(self.client.endpoint, self.client.nonce)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._engine.wait_for_client(5)
        EngineLoop(self.core, self._engine).run()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self.client.send(Shutdown())
        self._thread.join(WAIT_MS / 1000)
        assert not self._thread.is_alive()
        self.core.shutdown()
        self._engine.close()
        self.client.close()

    def receive(self):
        """The next message; if the loop is asleep before it has asked, its replies arrive now."""
        while (message := self.client.receive()) is None:
            if not self.client.receiver.poll(IDLE_S * 1000):
                self.executor.arrive()
                assert self.client.receiver.poll(WAIT_MS), "the loop sleeps though its replies have come"
        return message


def request(request_id, max_tokens):
    return EngineCoreRequest(request_id, [5, 6], SamplingParams(max_tokens=max_tokens), arrival_s=0.0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("arrive_at", [1, 2, 3, 4])
@pytest.mark.parametrize("call_first", [False, True])
def test_no_reply_is_slept_through(folder, arrive_at, depth, call_first):
    with Served(folder, arrive_at, depth) as served:
        messages = [AddRequests([request("a", 3)]), RpcCall(1, "workers", "echo", ["x"])]
        for message in reversed(messages) if call_first else messages:
            served.client.send(message)
        token_ids, answers = [], []
        while len(token_ids) < 3 or not answers:
            match served.receive():
                case EngineCoreOutputs(outputs=outputs):
                    token_ids += [t for output in outputs for t in output.new_token_ids]
                case RpcResult() as answer:
                    answers.append(answer.value)
        assert token_ids == expected([5, 6], 3)
        assert answers == [["0:x"]]


@pytest.mark.parametrize("arrive_at", [1, 2, 3])
def test_a_call_overdue_behind_a_step_is_answered_and_the_step_too(folder, arrive_at):
    with Served(folder, arrive_at, 1) as served:
        served.client.send(AddRequests([request("a", 1)]))
        served.client.send(RpcCall(1, "workers", "nap", [1.0], timeout_s=0.01))
        got = {type(served.receive()) for _ in range(2)}
        assert got == {EngineCoreOutputs, RpcResult}


@pytest.mark.parametrize("arrive_at", [1, 2, 3, 4])
def test_a_step_does_not_wait_for_a_call_behind_it(folder, arrive_at):
    with Served(folder, arrive_at, 1) as served:
        executor = served.executor
        served.client.send(AddRequests([request("a", 1)]))
        wait_until(lambda: executor.num_steps)
        served.client.send(RpcCall(1, "workers", "stats"))
        assert isinstance(served.receive(), EngineCoreOutputs)
        wait_until(lambda: executor.held)
        executor.release()
        assert isinstance(served.receive(), RpcResult)


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
