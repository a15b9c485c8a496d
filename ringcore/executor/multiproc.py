"""The executor with a process for each worker: a call queue and a control queue to all, a reply queue from each."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from ringcore.config import EngineConfig
from ringcore.config.rank_layout import LOCALHOST
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor.base import Executor
from ringcore.executor.calls import Call, CallTable
from ringcore.executor.message_queue import MessageWriter
from ringcore.executor.ring_buffer import Buffer, RingClosed
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.rpc_call import EncodedCall, RpcFuture, check_reply_rank
from ringcore.executor.stall_watch import StallWatch, stall_report
from ringcore.executor.timing import add_parts, timed
from ringcore.executor.value_codec import decode_error, portable_error
from ringcore.executor.waiting import SPACE_TICK_S, DeadlinePassed, PeerDied, Waiter, spin_budget_s
from ringcore.executor.wire import STEP, pack_call, pack_step, unpack_reply
from ringcore.executor.worker_group import HostStarter, WorkerGroup, host_starter
from ringcore.executor.worker_proc import DEFAULT_FACTORY, WorkerCreated
from ringcore.host.os_limits import os_limit_errors
from ringcore.host.owner_process import OwnerProcess
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import RankHealth
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.tracing import now_ns
from ringcore.tracing.kinds import ENQUEUED

__all__ = ["MultiprocExecutor"]

T = TypeVar("T")

START_TIMEOUT_S = 1800.0  # for each of: the processes, their devices, their weights


class _SendQueue(NamedTuple):
    """A queue to the workers, and the waiter for room in it."""

    writer: MessageWriter
    room: Waiter


class _Begun(NamedTuple):
    """Workers' processes that start. started_s: monotonic."""

    creation: Call
    started_s: float


class MultiprocExecutor(Executor):
    """A worker for each rank, each in its own process, on this host or on one that joins.

    Several calls may be in flight, and the caller may wait for their futures in any order. A worker's death settles
    every call in flight, and every later one, with `EngineDeadError`, until `restart`. So does a step that takes longer
    than `step_timeout_s`. A lock serializes calls of several threads: a thread that waits for a result blocks the
    others, except `shutdown`, which ends that wait, and `health`, `oldest_step_s` and `diagnose`, which take no lock.
    """

    host_starter = staticmethod(host_starter)  # what finds the hosts of the ranks

    def __init__(self, config: EngineConfig, *, worker_factory: str = DEFAULT_FACTORY) -> None:
        """`worker_factory` is "module:function", called in each worker's process as (config, rank, rendezvous)."""
        super().__init__(config)
        self._factory = worker_factory
        self._owner = OwnerProcess("the engine")
        layout = config.parallel.layout
        self._num_ranks = layout.world_size
        self._table = CallTable(self._num_ranks, layout.output_rank, has_far_ranks=layout.has_far_ranks)
        self._lock, self._is_shut = threading.RLock(), False
        self._hosts: HostStarter | None = None
        self._group: WorkerGroup | None = None
        self._begun: _Begun | None = None  # until `start` waits for it
        self._dead: RingcoreError | None = EngineDeadError("the workers were not started; call start()")
        self._step_encoder, self._step_decoder = encoder(), decoder(ModelRunnerOutput)

    def begin(self) -> None:
        if not self.config.parallel.layout.has_far_ranks:  # they may take long to join
            with self._first_start():
                self._begun = self._begin()

    def start(self) -> dict[str, float]:
        with self._first_start():
            return self._start()

    @contextmanager
    def _first_start(self) -> Iterator[None]:
        with self._lock:
            assert self._group is None or self._begun is not None, "start() was called twice"
            try:
                with os_limit_errors("the workers cannot be started"):
                    yield
            except BaseException:
                self.shutdown()
                raise

    def restart(self) -> dict[str, float]:
        with self._lock:
            if self._is_shut:
                raise _was_shut_down()
            self._end_group(EngineDeadError("the workers were replaced under this call", process="workers"))
            try:
                with os_limit_errors("the workers cannot be started"):
                    return self._start()
            except BaseException as error:
                self._end_group(EngineDeadError(f"the workers could not be replaced: {error!r}", process="workers"))
                raise

    def _begin(self) -> _Begun:
        """Starts the workers' processes."""
        started = time.monotonic()
        if self._hosts is None:
            self._hosts = self.host_starter(self.config, self._factory)
            self._close_hosts = weakref.finalize(self, self._hosts.close)
        group = self._group = WorkerGroup(self._hosts.start())
        self._close_group = weakref.finalize(self, group.close)
        spin_s = spin_budget_s(1 + self.config.parallel.layout.num_ranks_on(LOCALHOST))
        self._dead = None
        self._attach(group, spin_s)
        if self._is_shut:
            raise _was_shut_down()
        return _Begun(self._table.open_creation(self), started)

    def _start(self) -> dict[str, float]:
        phases: dict[str, float] = {}
        creation, started = self._begun or self._begin()
        self._begun = None
        created = msgspec.convert(creation.result(START_TIMEOUT_S), list[WorkerCreated])
        first, *others = ({method.name: method for method in worker.methods} for worker in created)
        self.methods = {name: own for name, own in first.items() if all(rank.get(name) == own for rank in others)}
        phases["start_workers"] = time.monotonic() - started
        parts = [{"boot_s": max(0.0, worker.began_s - started), "create_s": worker.create_s} for worker in created]
        add_parts(phases, "start_workers", parts)
        for method in ("init_device", "load_model"):
            with timed(phases, method):
                reports = self.collective_rpc(method, timeout=START_TIMEOUT_S)
            add_parts(phases, method, reports)
        return phases

    def _attach(self, group: WorkerGroup, spin_s: float) -> None:
        """Makes the executor's state for this group of workers: waiters, queues and the watchdog."""
        deaths = [*group.deaths, group.closing.fd]
        events = [*group.events, group.due.fd]
        self._wait_fds = [*events, *group.sources, *group.deaths]
        self._reply_waiter = Waiter(events, deaths, sources=group.sources)
        self._calls, self._control = (
            _SendQueue(writer, Waiter([*writer.events, *events], deaths, spin_s, group.sources))
            for writer in (group.calls, group.control)
        )
        self._watch = StallWatch(self._table, group, self.config.parallel)
        group.on_close(self._watch.stop, self._reply_waiter.close, self._calls.room.close, self._control.room.close)

    def _end_group(self, error: EngineDeadError) -> None:
        """Kills the remaining workers. Calls in flight get the error of their death, or this one."""
        self._die(error)
        if self._group is not None:
            self._group.kill()
            self._close_group()

    def forward(self, call: EncodedCall) -> RpcFuture:
        self._owner.check()
        check_reply_rank(call.unique_reply_rank, self._num_ranks)
        declared = None if call.is_callable else self.methods.get(call.method)
        is_control = declared is not None and declared.read_only
        with self._lock:
            self._check_alive()
            opened = self._table.open_call(self, call.method, call.timeout_s, call.unique_reply_rank, is_control)
            parts = pack_call(call.head(opened.call_id), call.parts)
            self._send(self._control if is_control else self._calls, opened, parts)
            return opened

    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        self._owner.check()
        body = self._step_encoder.encode(scheduler_output)
        with self._lock:
            self._check_alive()
            call = self._table.open_step(self, scheduler_output.step, self._step_decoder.decode)
            began = self.tracer.is_on and now_ns()
            if not call.errors:
                self._send(self._calls, call, pack_step(call.call_id, body))
            else:
                self._watch.wake()
            if began:
                ended, unread = now_ns(), self._calls.writer.unread_bytes()
                self.tracer.record((ENQUEUED.number, began, ended, scheduler_output.step, len(body), unread))
            return call

    def wait_fds(self) -> list[int]:
        self._check_alive()
        return list(self._wait_fds)

    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self._group.children} if self._group else {}

    @property
    def num_late_replies(self) -> int:
        """Dropped replies that arrived after their call had failed or timed out."""
        return self._table.num_late_replies

    def check(self) -> None:
        self.poll_replies()
        self._check_alive()

    def health(self) -> list[RankHealth]:
        return [] if self._group is None else self._group.health()

    def oldest_step_s(self) -> float | None:
        step = self._table.oldest_step()
        return None if step is None else self._table.age_s(step)

    def diagnose(self) -> str:
        return "no workers" if self._group is None else stall_report(self._table, self._group)

    def shutdown(self) -> None:
        if not self._owner.is_here:
            return
        is_first, self._is_shut = not self._is_shut, True
        if is_first:
            for waited_for in (self._hosts, self._group):
                if waited_for is not None:
                    waited_for.interrupt()  # a waiting thread releases the lock
        with self._lock:
            self._die(_was_shut_down())
            if self._group is not None:
                self._close_group()
            if self._hosts is not None:
                self._close_hosts()

    # -----------------------------------------------------------------------------------------------------------
    # Sending.

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise copy.copy(self._dead)

    def _send(self, queue: _SendQueue, call: Call, parts: Sequence[Buffer]) -> None:
        """Sends a call to every worker. Collects replies while the queue is full: a worker that blocks on a full reply
        queue would never read the call."""

        def sent() -> bool:
            if queue.writer.try_send(parts):
                return True
            self.on_wait()
            self._collect()
            return call.is_settled

        try:
            self._wait(queue.room, sent, call.deadline, SPACE_TICK_S)
        except BaseException:
            self._table.abandon(call)
            raise

    # -----------------------------------------------------------------------------------------------------------
    # Receiving. `Driver` of the calls.

    def poll_replies(self) -> None:
        self._owner.check()
        if not self._lock.acquire(blocking=False):
            return  # another thread holds the lock and collects replies
        try:
            if self._dead is None:
                self._guarded(self._poll_replies_now)
        finally:
            self._lock.release()

    def _poll_replies_now(self) -> None:
        dead_fd = self._reply_waiter.take_events()  # first, so that a later event stays signalled
        self._collect()
        self._table.expire()
        if dead_fd is not None:
            raise PeerDied(dead_fd)

    def wait_for(self, call: Call, deadline: float | None) -> None:
        self._owner.check()
        with self._lock:
            while self._dead is None and not call.is_settled:  # a death settles the call
                due = call.due
                bound = min((at for at in (deadline, due) if at is not None), default=None)

                def settled(due: float | None = due) -> bool:
                    self._collect()
                    return call.is_settled or call.due != due

                self._spin(call, bound)
                slept_s = self._wait(self._reply_waiter, settled, bound)
                if slept_s and self._group is not None:
                    for reader in self._group.replies:
                        reader.slept(slept_s)
                if deadline is not None and time.monotonic() >= deadline:
                    return

    def _spin(self, call: Call, bound: float | None) -> None:
        """Spins briefly for a missing reply: most arrive soon, and this is the fastest check."""
        rank = next(iter(call.missing), None)
        if rank is not None and self._group is not None:
            reader = self._group.replies[rank]
            self._guarded(lambda: reader.spin(bound))

    def _wait(
        self, waiter: Waiter, ready: Callable[[], bool], deadline: float | None, tick_s: float | None = None
    ) -> float | None:
        """Waits until `ready`, the deadline (which settles due calls) or a death (which settles all).

        Returns the seconds that it slept, or None if the wait did not end by `ready`.
        """
        try:
            return self._guarded(lambda: waiter.wait(ready, deadline, tick_s))
        except DeadlinePassed:
            self._table.expire()
            return None

    def _collect(self) -> None:
        """Applies every reply that has arrived."""
        if self._dead is not None or self._group is None:
            return
        for rank, reader in enumerate(self._group.replies):
            while reader.has_message() and (message := reader.try_receive()) is not None:
                with message as parts:
                    self._take_reply(rank, parts)

    def _take_reply(self, rank: int, parts: Sequence[memoryview]) -> None:
        """Gives a call its reply. A value stays encoded, in copied buffers; the caller of `result` decodes it."""
        call_id, kind, is_error, reply = unpack_reply(parts, rank)
        if not is_error:
            self._table.take_value(call_id, rank, [bytes(part) for part in reply])
            return
        method = self._table.method_of(call_id)
        try:
            error = decode_error(reply[0], rank, method)
        except Exception as undecodable:
            error = portable_error(undecodable, rank, method)
        self._table.take_error(call_id, rank, error, kind == STEP)
        self._watch.wake()

    # -----------------------------------------------------------------------------------------------------------
    # Death.

    def _guarded(self, action: Callable[[], T]) -> T | None:
        """Runs an action on shared memory and descriptors; a death, corruption or shutdown settles every call."""
        try:
            return action()
        except PeerDied as death:
            self._die(*self._error_of_death(death.fd))
        except RingCorruptError as error:
            self._die(EngineDeadError(f"the memory shared with the workers is corrupt: {error}", process="workers"))
            if self._group is not None:
                self._group.kill()
        except (RingClosed, OSError, ValueError):
            if not self._is_shut:  # a signal handler may shut down during this wait
                raise
            self._die(_was_shut_down())
        return None

    def _error_of_death(self, fd: int) -> tuple[EngineDeadError, int | None]:
        """The error for the event of this descriptor, and the rank that died first. Kills the other workers, which may
        wait for that one forever in a collective."""
        group = self._group
        assert group is not None
        if group.killed_for is not None:
            return group.killed_for, None
        if fd not in group.deaths:
            return _was_shut_down(), None
        ended = {rank: child for rank, child in enumerate(group.children) if not child.is_alive()}
        # Of several, the one that a signal ended: the others may have failed and exited because of it.
        rank = min(ended, key=lambda rank: (ended[rank].signal_name is None, rank))
        group.kill()
        return ended[rank].dead_error(rank), rank

    def _die(self, error: RingcoreError, dead_rank: int | None = None) -> None:
        """Settles every call in flight, and every later one, with this error; the first error stays."""
        if self._dead is None or self._group is None:
            self._dead = error
        self._table.fail_all(self._dead, dead_rank)


def _was_shut_down() -> EngineDeadError:
    return EngineDeadError("the workers were shut down", process="workers")
