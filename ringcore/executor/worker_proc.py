"""A worker's process: builds the worker, then receives, calls, replies, until the executor closes the queue.

The main thread executes calls in the order of their arrival. A side thread executes those of read-only methods, which
come by a queue of their own: see `worker_aside`.
"""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import CapacityError, ConfigError, InvalidRequestError
from ringcore.executor.child_main import PARENT_DEATH
from ringcore.executor.message_queue import MessageReader, MessageWriter, QueueHandle
from ringcore.executor.ring_buffer import Buffer, RingClosed
from ringcore.executor.status_board import StatusLine
from ringcore.executor.value_codec import encode_value
from ringcore.executor.waiting import PeerDied
from ringcore.executor.wire import CALL, CREATED, STEP, STEP_METHOD, CallHead, pack_reply, unpack_call
from ringcore.executor.worker_aside import AsideThread
from ringcore.executor.worker_calls import Outcome, failed, prepare_call
from ringcore.protocol import SchedulerOutput, decoder, encoder
from ringcore.worker.rpc import read_only_names

__all__ = [
    "ASIDE",
    "CALLS",
    "DEFAULT_FACTORY",
    "RENDEZVOUS",
    "REPLIES",
    "STATUS",
    "WorkerStart",
    "create_worker",
    "main",
    "shut_down",
]

DEFAULT_FACTORY = "ringcore.worker.entry:create_worker"

# Names, and beginnings of names, among the descriptors that a worker's process inherits.
CALLS, ASIDE, REPLIES, STATUS, RENDEZVOUS = "calls.", "aside.", "replies.", "status", "rendezvous"


class WorkerStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the executor hands to a worker's process."""

    config: EngineConfig
    rank: int
    factory: str  # "module:function", called as function(config, rank, rendezvous)
    spin_s: float


def main(payload: bytes, fds: dict[str, int]) -> None:
    """The process from beginning to end. Exit code 1 if the worker cannot be made or fails in its own shutdown."""
    start: WorkerStart = decoder(WorkerStart).decode(payload)
    link = _Link(start.rank, fds, start.spin_s)
    status = StatusLine(fds[STATUS], start.rank)
    aside = AsideThread(start.rank, link.aside, status, link.reply)
    creation = CallHead(CREATED, CALL, None, "create_worker")
    status.begin(creation.call_id, creation.kind, creation.method)
    try:
        worker = create_worker(start.factory, start.config, start.rank, _rendezvous(fds))
        names = read_only_names(worker)
    except Exception as error:
        link.reply(creation, failed(error, start.rank, creation.method))
        raise SystemExit(1) from error
    aside.serve(worker, names)
    link.reply(creation, Outcome(False, encode_value(names)))
    status.end()
    try:
        _Loop(worker, link, status).run()
    except RingClosed:
        if not shut_down(worker):
            raise SystemExit(1) from None
    except PeerDied:
        raise SystemExit(1) from None


def _rendezvous(fds: Mapping[str, int]) -> str | None:
    """A path by which the ranks open one file, to meet in; None for a single rank. It is no name: nothing is left."""
    return f"/proc/self/fd/{fds[RENDEZVOUS]}" if RENDEZVOUS in fds else None


def create_worker(factory: str, config: EngineConfig, rank: int, rendezvous: str | None) -> Any:
    """The worker that `factory` ("module:function") makes. Raises `ConfigError` for a factory that is not there."""
    module, _, function = factory.partition(":")
    namespace = vars(importlib.import_module(module))
    if function not in namespace:
        raise ConfigError(f"worker_factory={factory!r}: no such function", option="worker_factory", value=factory)
    return namespace[function](config, rank, rendezvous)


def shut_down(worker: Any) -> bool:
    """The worker's own shutdown; False if it failed, which goes to the log: nobody waits for an answer any more."""
    try:
        worker.shutdown()
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return False
    return True


class _Link:
    """The worker's ends of its queues. Replies may come from both threads."""

    def __init__(self, rank: int, fds: Mapping[str, int], spin_s: float) -> None:
        def named(prefix: str) -> QueueHandle:
            return QueueHandle.from_fds({k.removeprefix(prefix): fd for k, fd in fds.items() if k.startswith(prefix)})

        self.rank = rank
        deaths = [fds[PARENT_DEATH]]
        self.calls = MessageReader(named(CALLS), rank, deaths, spin_s)
        self.aside = MessageReader(named(ASIDE), rank, deaths)
        self._replies = MessageWriter(named(REPLIES), deaths, spin_s)
        self._lock = threading.Lock()

    def reply(self, head: CallHead, outcome: Outcome) -> None:
        """Waits for room as long as the executor lives and listens."""
        try:
            self._send(head, outcome)
        except (InvalidRequestError, CapacityError) as error:  # too large to be sent: that call's error
            self._send(head, failed(error, self.rank, head.method))

    def _send(self, head: CallHead, outcome: Outcome) -> None:
        parts = pack_reply(head.call_id, self.rank, head.kind, outcome.is_error, outcome.parts)
        with self._lock:
            self._replies.send(parts)


class _Loop:
    """Receives a call, performs it, replies; in the order of arrival. Ends by `RingClosed` or `PeerDied`."""

    def __init__(self, worker: Any, link: _Link, status: StatusLine) -> None:
        self._worker, self._link, self._status = worker, link, status
        self._step_decoder, self._step_encoder = decoder(SchedulerOutput), encoder()

    def run(self) -> None:
        link, status = self._link, self._status
        while True:
            head, perform = self._receive()
            status.begin(head.call_id, head.kind, head.method)
            outcome = perform()
            if outcome is not None:
                link.reply(head, outcome)
            status.end()

    def _receive(self) -> tuple[CallHead, Callable[[], Outcome | None]]:
        """The next call, ready to be performed. Its memory has gone back to the executor by then, which so never has
        to wait for a call that is under way."""
        with self._link.calls.receive() as parts:
            head, request = unpack_call(parts)
            if head.kind == STEP:
                return head, self._prepare_step(request[0])
            return head, prepare_call(self._worker, self._link.rank, head, request)

    def _prepare_step(self, body: Buffer) -> Callable[[], Outcome | None]:
        try:
            scheduler_output = self._step_decoder.decode(body)
        except Exception as error:
            outcome = failed(error, self._link.rank, STEP_METHOD)
            return lambda: outcome
        return lambda: self._perform_step(scheduler_output)

    def _perform_step(self, scheduler_output: SchedulerOutput) -> Outcome | None:
        try:
            output = self._worker.execute_model(scheduler_output)
            if self._link.rank != 0:
                return None
            if output is None:
                raise TypeError("execute_model returned None on the output rank")
            return Outcome(False, [self._step_encoder.encode(output)])
        except Exception as error:
            return failed(error, self._link.rank, STEP_METHOD)
