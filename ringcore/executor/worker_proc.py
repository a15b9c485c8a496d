"""A worker's process: builds the worker, then receives, executes and replies, until the executor closes the queue.

The main thread executes calls in the order of their arrival. The control thread executes read-only methods, which
arrive by the control queue: see `control_thread`.
"""

from __future__ import annotations

import gc
import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import CapacityError, ConfigError, InvalidRequestError
from ringcore.executor.child_main import PARENT_DEATH
from ringcore.executor.control_thread import ControlThread
from ringcore.executor.launched_steps import FinishedStep, is_done, launch_step, poll_until, step_result
from ringcore.executor.near_queue import NearReader, NearWriter, QueueHandle
from ringcore.executor.ring_buffer import Buffer, RingClosed
from ringcore.executor.status_board import StatusLine
from ringcore.executor.value_codec import encode_value
from ringcore.executor.waiting import PeerDied
from ringcore.executor.wire import CALL, CREATED, STEP, STEP_METHOD, CallHead, pack_reply, unpack_call
from ringcore.executor.worker_calls import Outcome, failed, prepare_call
from ringcore.host.collection import without_collection
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.steps import PendingOutput, SchedulerOutput
from ringcore.tracing import Tracer, now_ns
from ringcore.tracing.kinds import CALL_METHOD, CALL_RECEIVED, LAUNCHED, REPLIED, RESULT_READ
from ringcore.worker.rpc import rpc_methods
from ringcore.worker.traced_worker import TracedWorker

__all__ = [
    "CALLS",
    "CONTROL",
    "DEFAULT_FACTORY",
    "RENDEZVOUS",
    "REPLIES",
    "STATUS",
    "WorkerCreated",
    "WorkerStart",
    "create_worker",
    "main",
    "shut_down",
]

DEFAULT_FACTORY = "ringcore.worker.entry:create_worker"

# Names and name prefixes of the descriptors that a worker's process inherits.
_log = logging.getLogger(__name__)
CALLS, CONTROL, REPLIES, STATUS, RENDEZVOUS = "calls.", "control.", "replies.", "status", "rendezvous"


class WorkerStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The executor's message to a new worker process."""

    config: EngineConfig
    rank: int
    factory: str  # "module:function", called as function(config, rank, rendezvous)
    spin_s: float
    rendezvous: str | None = None  # "tcp://HOST:PORT" of ranks on several hosts


class WorkerCreated(msgspec.Struct, frozen=True):
    """The report of a worker process that has created its worker. Seconds; `began_s` is on the monotonic clock."""

    methods: list[RpcMethod]  # declared with @rpc
    began_s: float  # when the process entered `main`
    create_s: float  # time to create the worker, imports included


def main(payload: bytes, fds: dict[str, int]) -> None:
    """The entry of a worker process. Exit code 1 if the worker cannot be created or fails in its own shutdown."""
    began_s = time.monotonic()
    start: WorkerStart = decoder(WorkerStart).decode(payload)
    index = start.config.parallel.layout.local_rank(start.rank)
    link = _Link(start.rank, index, fds, start.spin_s)
    status = StatusLine(fds[STATUS], index)
    control = ControlThread(start.rank, link.control, status, link.reply)
    creation = CallHead(CREATED, CALL, None, "create_worker")
    status.begin(creation.call_id, creation.kind, creation.method)
    try:
        worker = create_worker(start.factory, start.config, start.rank, _rendezvous(start, fds))
        methods = list(rpc_methods(worker).values())
    except Exception as error:
        link.reply(creation, failed(error, start.rank, creation.method))
        raise SystemExit(1) from error
    control.serve(worker, [method.name for method in methods if method.read_only])
    created = WorkerCreated(methods, began_s, time.monotonic() - began_s)
    link.reply(creation, Outcome(False, encode_value(created)))
    gc.freeze()  # what was imported lives as long as the process: later collections, which hold a step up, skip it
    status.end()
    try:
        _Loop(worker, link, status, start.spin_s, start.rank == start.config.parallel.layout.output_rank).run()
    except RingClosed:
        if not shut_down(worker):
            raise SystemExit(1) from None
    except PeerDied:
        raise SystemExit(1) from None


def _rendezvous(start: WorkerStart, fds: Mapping[str, int]) -> str | None:
    """Where the ranks meet: an address, or the path by which all of one host open the same memfd; None for a single
    rank."""
    return f"/proc/self/fd/{fds[RENDEZVOUS]}" if RENDEZVOUS in fds else start.rendezvous


def create_worker(factory: str, config: EngineConfig, rank: int, rendezvous: str | None) -> Any:
    """The worker that `factory` ("module:function") creates. Raises `ConfigError` for an unknown factory."""
    module, _, function = factory.partition(":")
    namespace = vars(importlib.import_module(module))
    if function not in namespace:
        raise ConfigError(f"worker_factory={factory!r}: no such function", option="worker_factory", value=factory)
    with without_collection():  # which takes a tenth of torch's import
        return namespace[function](config, rank, rendezvous)


def shut_down(worker: Any) -> bool:
    """The worker's own shutdown; False if it failed. The error goes to the log, as no call waits for a reply."""
    try:
        worker.shutdown()
    except Exception:
        _log.exception("the worker failed in its own shutdown")
        return False
    return True


class _Link:
    """The worker's ends of its queues, where it is reader `index`. Replies may come from both threads."""

    def __init__(self, rank: int, index: int, fds: Mapping[str, int], spin_s: float) -> None:
        def named(prefix: str) -> QueueHandle:
            return QueueHandle.from_fds({k.removeprefix(prefix): fd for k, fd in fds.items() if k.startswith(prefix)})

        self.rank = rank
        deaths = [fds[PARENT_DEATH]]
        self.calls = NearReader(named(CALLS), index, deaths, spin_s)
        self.control = NearReader(named(CONTROL), index, deaths)
        self._replies = NearWriter(named(REPLIES), deaths, spin_s)
        self._lock = threading.Lock()

    def reply(self, head: CallHead, outcome: Outcome) -> None:
        """Sends a reply; waits for room (back-pressure) while the executor lives and reads."""
        try:
            self._send(head, outcome)
        except (InvalidRequestError, CapacityError) as error:  # too large to send: an error of this call
            self._send(head, failed(error, self.rank, head.method))

    def _send(self, head: CallHead, outcome: Outcome) -> None:
        parts = pack_reply(head.call_id, self.rank, head.kind, outcome.is_error, outcome.parts)
        with self._lock:
            self._replies.send(parts)


class _Loop:
    """Receives a call, performs it, replies; in the order of arrival. Ends by `RingClosed` or `PeerDied`.

    A step may be launched and finished later (`PendingOutput`). `_launched` holds such steps, oldest first; each is
    answered as soon as it and all earlier ones are done. The next step is launched meanwhile; any other call waits for
    all of them. The status line shows the oldest one, since it became the oldest.
    """

    def __init__(self, worker: Any, link: _Link, status: StatusLine, spin_s: float, is_output_rank: bool) -> None:
        self._worker, self._link, self._status, self._spin_s = worker, link, status, spin_s
        self._is_output_rank = is_output_rank
        self._step_decoder, self._step_encoder = decoder(SchedulerOutput), encoder()
        self._launched: deque[tuple[CallHead, PendingOutput]] = deque()
        self._tracer = worker.tracer if isinstance(worker, TracedWorker) else Tracer()

    def run(self) -> None:
        try:
            while True:
                self._finish_done_steps()
                perform = self._receive()
                perform()
        except RingClosed:
            self._drop_steps()
            raise

    def _receive(self) -> Callable[[], None]:
        """The next call, ready to be performed. Its ring memory is released before that, so that the executor never
        waits for room because of a call that is being executed."""
        self._await_call()
        tracer = self._tracer
        began = tracer.is_on and now_ns()
        with self._link.calls.receive() as parts:
            arrived = began and now_ns()
            head, request = unpack_call(parts)
            if head.kind == STEP:
                perform = self._prepare_step(head, request[0])
            else:
                prepared = prepare_call(self._worker, self._link.rank, head, request)
                perform = partial(self._execute, head, prepared)
        if began:
            tracer.record((CALL_RECEIVED.number, began, arrived, now_ns()))
            tracer.check(arrived)
        return perform

    def _execute(self, head: CallHead, perform: Callable[[], Outcome | None]) -> None:
        while self._launched:
            self._await_oldest_step()
            self._finish_oldest_step()
        self._status.begin(head.call_id, head.kind, head.method)
        began = self._tracer.is_on and now_ns()
        outcome = perform()
        if began and self._tracer.is_on:
            self._tracer.note(CALL_METHOD, began, now_ns(), head.method)
        if outcome is not None:
            self._link.reply(head, outcome)
        self._status.end()

    # -----------------------------------------------------------------------------------------------------------
    # Steps.

    def _prepare_step(self, head: CallHead, body: Buffer) -> Callable[[], None]:
        try:
            scheduler_output = self._step_decoder.decode(body)
        except Exception as error:
            undecodable = FinishedStep(error=error)
            return lambda: self._begin(head, lambda: undecodable)
        return lambda: self._begin(head, lambda: self._launch(scheduler_output))

    def _launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        began = self._tracer.is_on and now_ns()
        launched = launch_step(self._worker, scheduler_output)
        if began:
            self._tracer.record((LAUNCHED.number, began, now_ns(), *scheduler_output.composition()))
        return launched

    def _begin(self, head: CallHead, launch: Callable[[], PendingOutput]) -> None:
        if not self._launched:
            self._status.begin(head.call_id, head.kind, head.method)
        self._launched.append((head, launch()))

    def _await_call(self) -> None:
        """Waits for the next call, and finishes done steps meanwhile. Without launched steps it returns: `receive`
        waits.
        """
        calls = self._link.calls
        while self._launched and not calls.has_message():
            poll_until(lambda: calls.has_message() or self._oldest_is_done(), self._spin_s, check=calls.check_peer)
            self._finish_done_steps()

    def _await_oldest_step(self) -> None:
        poll_until(self._oldest_is_done, self._spin_s, check=self._link.calls.check_peer)

    def _oldest_is_done(self) -> bool:
        return is_done(self._launched[0][1])

    def _finish_done_steps(self) -> None:
        while self._launched and self._oldest_is_done():
            self._finish_oldest_step()

    def _finish_oldest_step(self) -> None:
        head, step = self._launched.popleft()
        tracer = self._tracer
        began = tracer.is_on and now_ns()
        outcome = self._outcome(step)
        ended = began and now_ns()
        if outcome is not None:
            self._link.reply(head, outcome)
            if began:
                tracer.record((REPLIED.number, began, ended, now_ns()))
        elif began:
            tracer.record((RESULT_READ.number, began, ended))
        if self._launched:
            following, _ = self._launched[0]
            self._status.end_and_begin(following.call_id, following.kind, following.method)
        else:
            self._status.end()

    def _outcome(self, step: PendingOutput) -> Outcome | None:
        """The reply of a step: errors from every rank, the output only from the output rank."""
        try:
            if self._is_output_rank:
                return Outcome(False, [self._step_encoder.encode(step_result(step))])
            step.result()
            return None
        except Exception as error:
            return failed(error, self._link.rank, STEP_METHOD)

    def _drop_steps(self) -> None:
        """Waits for the launched steps without replying, as the executor has closed: they must leave the device before
        the worker frees its memory."""
        while self._launched:
            self._await_oldest_step()
            _, step = self._launched.popleft()
            try:
                step.result()
            except Exception:
                _log.exception("a step of a worker that ends has failed")
