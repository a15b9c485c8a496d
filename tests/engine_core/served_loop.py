"""An engine's loop in a thread of its own, its client's end of the channel, and a core that does what the test says."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from types import SimpleNamespace

import msgspec

from ringcore.engine_core.admin.public_methods import engine_method
from ringcore.engine_core.loop import EngineLoop
from ringcore.engine_core.tracing import EngineTracing
from ringcore.engine_core.transport.channel import ClientChannel, EngineChannel, channel_pair
from ringcore.executor.rpc_call import EncodedCall
from ringcore.executor.value_codec import decode_value, encode_request
from ringcore.protocol.messages import EngineHealth, EngineReady, EngineRecovering, RpcCall, RpcResult, Shutdown
from ringcore.protocol.output_reader import output_columns
from ringcore.protocol.requests import EngineCoreOutput, EngineStats, OutputColumns, WireError

WAIT_S = 90.0
IDLE_S = 0.05


class Served:
    """A loop in a thread of its own, and its client's end of the channel."""

    def __init__(self, core, limits=None) -> None:
        self.core = core
        ours, theirs = channel_pair()
        self.raw = ours
        self._never = os.eventfd(0)
        self.client = ClientChannel(ours, self._never, self._never)
        self._engine = EngineChannel(theirs.detach(), limits)
        self.loop = EngineLoop(core, self._engine)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        if self.is_running:
            self.client.send(Shutdown())
        self.join()
        self.core.shutdown()
        self._engine.close()
        self.client.close()
        os.close(self._never)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def call(self, call_id, method, *args, buffers=None, **fields) -> None:
        parts = encode_request(method, args, {}) if buffers is None else buffers
        self.client.send(RpcCall(call_id, fields.pop("target", "workers"), method, **fields), parts)

    def receive(self, when_idle=lambda: None):
        """The next message and its buffers; `when_idle` is called where none comes for a while."""
        while (received := self.client.receive()) is None:
            if not is_readable(self.client, IDLE_S):
                when_idle()
                assert is_readable(self.client, WAIT_S), "the loop sleeps though it has something to do"
        return received


def is_readable(channel, timeout_s):
    return bool(select.select([channel], [], [], timeout_s)[0])


def value_of(received):
    """The value of an answer of one rank."""
    result, buffers = received
    assert isinstance(result, RpcResult)
    assert result.error is None
    assert result.num_parts == [len(buffers)]
    return decode_value(buffers)


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


STATS = EngineStats(0, 0, 0, 0, 0, 0, 0)
RECOVERING = EngineRecovering(WireError("EngineDeadError", "worker 0 was killed", {"rank": 0}), 1)


def ready(number, num_graphs_left=0):
    return EngineReady(number, 8, 8, 8, 1.0, {}, [], {"worker 0": number}, 64, num_graphs_left)


def output(number):
    return EngineCoreOutput("a", [number])


def came(*outputs: EngineCoreOutput) -> OutputColumns:
    return output_columns(list(outputs), STATS)


class ScriptedFuture:
    def __init__(self, outcome) -> None:
        self.outcome = outcome
        self.is_done = self.is_taken = False

    def done(self) -> bool:
        return self.is_done

    def encoded_result(self):
        self.is_taken = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    result = encoded_result


class ScriptedCore:
    """`do` has the loop's thread call a function in its next iteration; the return value is that iteration's output."""

    def __init__(self, allow_callables: bool = False) -> None:
        self.config = SimpleNamespace(parallel=SimpleNamespace(allow_callables=allow_callables))
        self.tracing = EngineTracing()
        self.ready = ready(1)
        self.num_steps_completed = self.num_steps_launched = self.num_in_flight = 0
        self.fds = [os.eventfd(0, os.EFD_NONBLOCK)]
        self.script: deque = deque()
        self.calls: list[tuple[EncodedCall, ScriptedFuture]] = []
        self.outcomes: deque = deque()  # of the next calls
        self.on_check = lambda: None
        self.num_iterations = 0
        self.aborted: list[str] = []
        self.refuse: Exception | None = None
        self.is_operating = self.is_frozen = False
        self.is_idle = True
        self.captures: list[tuple[int, ScriptedFuture]] = []  # calls for a graph: in which iteration, and the reply
        self.captured_at: list[float] = []  # monotonic seconds of these calls
        self.is_lost = False
        self.operations: list = []

    def do(self, action) -> None:
        self.script.append(action)
        os.eventfd_write(self.fds[-1], 1)

    def recover(self):
        """New workers, on other descriptors."""
        self.is_lost = True
        self.loop.announce_recovery(RECOVERING)
        self.is_lost = False
        self.fds.append(os.eventfd(0, os.EFD_NONBLOCK))
        self.ready = ready(self.ready.num_blocks + 1, self.num_graphs_of_new_workers)
        return came()

    num_graphs_of_new_workers = 0

    def capture_graph(self):
        future = ScriptedFuture(None)
        self.captured_at.append(time.monotonic())
        self.captures.append((self.num_iterations, future))
        return future

    def reply(self, outcome) -> None:
        """To the call for a graph that is under way."""
        _, future = self.captures[-1]
        assert not future.is_done, "no call is under way"
        future.outcome, future.is_done = outcome, True
        os.eventfd_write(self.fds[-1], 1)

    def advance(self):
        self.num_iterations += 1
        return self.script.popleft()() if self.script else None

    def check_workers(self) -> None:
        os.eventfd_read(self.fds[-1])  # it is asked only where there was something to read
        self.on_check()

    def wait_fds(self):
        assert not self.is_lost, "asking for descriptors replaces the workers, which is under way"
        return [self.fds[-1]]

    def forward_rpc(self, call):
        future = ScriptedFuture(self.outcomes.popleft())
        self.calls.append((call, future))
        return future

    def submit_operation(self, operation, timeout):
        self.operations.append((operation, timeout))
        future = ScriptedFuture(self.outcomes.popleft())
        self.calls.append((None, future))
        return future

    def is_sleeping(self) -> bool:
        return bool(self.operations)

    def settle(self) -> None:
        for _, future in self.calls:
            future.is_done = True

    def add_request(self, added) -> None:
        if self.refuse is not None:
            raise self.refuse

    def abort(self, request_ids):
        self.aborted += request_ids
        return [EngineCoreOutput(request_id, [], finish_reason="abort") for request_id in request_ids]

    def engine_call(self, name):
        return engine_method(name, self, None)

    def note_send(self, began_s, ended_s) -> None:
        assert ended_s >= began_s

    def stats(self):
        return msgspec.structs.replace(STATS, is_sleeping=self.is_frozen)

    def health(self):
        return EngineHealth("ready", step=7)

    def methods(self):
        return []

    def pause(self, mode="new") -> None:
        self.paused = mode

    def resume(self) -> None:
        self.paused = None

    def reset_prefix_cache(self, preempt_running=False) -> bool:
        return not preempt_running

    def shutdown(self) -> None:
        for fd in self.fds:
            os.close(fd)


def serve(core=None, **kwargs) -> Served:
    core = core or ScriptedCore()
    served = Served(core, **kwargs)
    core.loop = served.loop
    return served
