"""The executor with a process for each worker: one queue to all of them, one back from each."""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor.base import Executor, RpcFuture
from ringcore.executor.calls import Call, CallTable
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.timing import timed
from ringcore.executor.value_codec import decode_error, decode_value, encode_request, portable_error
from ringcore.executor.waiting import SPACE_TICK_S, DeadlinePassed, PeerDied, Waiter, signal_event, spin_budget_s
from ringcore.executor.wire import CALL, STEP, pack_call, unpack_reply
from ringcore.executor.worker_group import WorkerGroup, usable_cores, worker_environment
from ringcore.executor.worker_proc import DEFAULT_FACTORY
from ringcore.protocol import ModelRunnerOutput, SchedulerOutput, decoder, encoder

__all__ = ["MultiprocExecutor"]

START_TIMEOUT_S = 1800.0  # for each of: the processes, their devices, their weights


class MultiprocExecutor(Executor):
    """Workers in processes of their own, `tensor_parallel_size` of them.

    Values arrive as builtins (see `value_codec`); `msgspec.convert` makes a type of them. Several calls may be under
    way, and their futures may be asked in any order. A worker's death settles every call under way, and every later
    one, with `EngineDeadError`. Calls from several threads take turns: one that waits for a result makes the others
    wait, except `shutdown`, which ends its wait.
    """

    def __init__(self, config: EngineConfig, *, worker_factory: str = DEFAULT_FACTORY) -> None:
        """`worker_factory` is "module:function", called in each worker's process as (config, rank, rendezvous)."""
        super().__init__(config)
        self._factory = worker_factory
        self._num_ranks = config.parallel.tensor_parallel_size
        self._table = CallTable(self._num_ranks)
        self._lock = threading.RLock()
        self._is_shut = False
        self._group: WorkerGroup | None = None
        self._dead: RingcoreError | None = EngineDeadError("the workers were not started; call start()")
        self._step_encoder, self._step_decoder = encoder(), decoder(ModelRunnerOutput)

    def start(self) -> dict[str, float]:
        phases: dict[str, float] = {}
        with self._lock:
            assert self._group is None, "start() was called twice"
            started = time.monotonic()
            environment = worker_environment(os.environ, usable_cores(), self._num_ranks)
            spin_s = spin_budget_s(1 + self._num_ranks)
            group = self._group = WorkerGroup(self.config, self._num_ranks, self._factory, environment, spin_s)
            weakref.finalize(self, group.close)
            self._dead = None
            pidfds = [child.pidfd for child in group.children]
            deaths = [*pidfds, group.closing_fd]
            self._wait_fds = [*group.wake_fds, *pidfds]
            self._reply_waiter = Waiter(group.wake_fds, deaths, spin_s)
            self._room_waiter = Waiter([group.space_fd, *group.wake_fds], deaths, spin_s)
            try:
                if self._is_shut:
                    raise _was_shut_down()
                self._table.open_creation(self).result(START_TIMEOUT_S)
                phases["start_workers"] = time.monotonic() - started
                with timed(phases, "init_device"):
                    self.collective_rpc("init_device", timeout=START_TIMEOUT_S)
                group.remove_meeting_place()
                with timed(phases, "load_model"):
                    self.collective_rpc("load_model", timeout=START_TIMEOUT_S)
            except BaseException:
                self.shutdown()
                raise
        return phases

    def submit(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> RpcFuture:
        body = encode_request(method, args, kwargs)
        with self._lock:
            group = self._alive()
            call = self._table.open_call(self, method, timeout)
            self._send(group, call, CALL, body)
            return call

    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        body = self._step_encoder.encode(scheduler_output)
        with self._lock:
            group = self._alive()
            call = self._table.open_step(self)
            if not call.is_settled:
                self._send(group, call, STEP, body)
            return call

    def wait_fds(self) -> list[int]:
        self._alive()
        return list(self._wait_fds)

    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self._group.children} if self._group else {}

    @property
    def num_late_replies(self) -> int:
        """Replies that came after their call had failed or timed out, and were dropped."""
        return self._table.num_late_replies

    def shutdown(self) -> None:
        is_first, self._is_shut = not self._is_shut, True
        if is_first and self._group is not None and self._group.is_ours:
            signal_event(self._group.closing_fd)  # whoever waits, in whichever thread, gives up the lock
        with self._lock:
            self._die(_was_shut_down())
            if self._group is not None:
                self._group.close()

    # -----------------------------------------------------------------------------------------------------------
    # Out.

    def _alive(self) -> WorkerGroup:
        if self._dead is not None:
            raise copy.copy(self._dead)
        assert self._group is not None
        return self._group

    def _send(self, group: WorkerGroup, call: Call, kind: int, body: bytes) -> None:
        """Sends a call to every worker. Replies are taken in meanwhile: a worker that is stuck with one that nobody
        takes would never make room."""
        parts = (pack_call(call.call_id, kind), body)

        def sent() -> bool:
            if group.calls.try_send(parts):
                return True
            self._collect()
            return call.is_settled

        try:
            self._wait(self._room_waiter, sent, call.deadline, SPACE_TICK_S)
        except BaseException:
            self._table.abandon(call)
            raise

    # -----------------------------------------------------------------------------------------------------------
    # In. `Driver` of the calls.

    def take_in(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            if self._dead is None:
                self._guarded(self._take_in_now)
        finally:
            self._lock.release()

    def _take_in_now(self) -> None:
        dead_fd = self._reply_waiter.take_events()  # first, so that whatever is announced later stays announced
        self._collect()
        self._table.expire(time.monotonic())
        if dead_fd is not None:
            raise PeerDied(dead_fd)

    def wait_for(self, call: Call, deadline: float | None) -> None:
        with self._lock:
            if self._dead is not None:
                return  # which has settled the call
            bounds = [bound for bound in (deadline, call.deadline) if bound is not None]

            def settled() -> bool:
                self._collect()
                return call.is_settled

            self._wait(self._reply_waiter, settled, min(bounds, default=None))

    def _wait(
        self, waiter: Waiter, ready: Callable[[], bool], deadline: float | None, tick_s: float | None = None
    ) -> None:
        """Waits until `ready`, the deadline (which settles calls that were due) or a death (which settles all)."""
        try:
            self._guarded(lambda: waiter.wait(ready, deadline, tick_s))
        except DeadlinePassed:
            self._table.expire(time.monotonic())

    def _collect(self) -> None:
        """Takes in every reply that has arrived."""
        if self._dead is not None or self._group is None:
            return
        for rank, reader in enumerate(self._group.replies):
            while (message := reader.try_receive()) is not None:
                with message as parts:
                    self._take_reply(rank, parts)

    def _take_reply(self, rank: int, parts: list[memoryview]) -> None:
        """Settles a call with a reply. Everything is decoded here, into objects that own what they hold."""
        call_id, kind, is_error, body = unpack_reply(parts, rank)
        try:
            if is_error:
                error = decode_error(body, rank, self._table.method_of(call_id))
            else:
                value = self._step_decoder.decode(body) if kind == STEP else decode_value(body)
                self._table.take_value(call_id, rank, value)
                return
        except Exception as undecodable:
            error = portable_error(undecodable, rank, self._table.method_of(call_id))
        self._table.take_error(call_id, error, kind == STEP)

    # -----------------------------------------------------------------------------------------------------------
    # Death.

    def _guarded(self, action: Callable[[], None]) -> None:
        """Runs what reads shared memory and descriptors; what ends a worker, or us, settles every call."""
        try:
            action()
        except PeerDied as death:
            self._die(self._error_of_death(death.fd))
        except RingCorruptError as error:
            self._die(EngineDeadError(f"the memory shared with the workers is corrupt: {error}", process="workers"))
        except (RingClosed, OSError, ValueError):
            if not self._is_shut:  # a signal handler may shut down in the middle of this very wait
                raise
            self._die(_was_shut_down())

    def _error_of_death(self, fd: int) -> EngineDeadError:
        assert self._group is not None
        for rank, child in enumerate(self._group.children):
            if child.pidfd == fd:
                return child.dead_error(rank)
        return _was_shut_down()

    def _die(self, error: RingcoreError) -> None:
        """Every call under way, and every later one, gets this error; the first one stays."""
        if self._dead is None or self._group is None:
            self._dead = error
        self._table.fail_all(self._dead)


def _was_shut_down() -> EngineDeadError:
    return EngineDeadError("the workers were shut down", process="workers")
