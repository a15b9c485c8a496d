"""A worker's process: builds the worker, then receives, calls, replies, until the executor closes the queue."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import CapacityError, ConfigError, InvalidRequestError
from ringcore.executor.child_main import PARENT_DEATH
from ringcore.executor.message_queue import MessageReader, MessageWriter, QueueHandle
from ringcore.executor.ring_buffer import Buffer, RingClosed
from ringcore.executor.value_codec import decode_value, encode_error, encode_value
from ringcore.executor.waiting import PeerDied
from ringcore.executor.wire import CALL, CREATED, STEP, pack_reply, unpack_call
from ringcore.protocol import SchedulerOutput, decoder, encoder
from ringcore.worker.rpc import call_rpc

__all__ = ["DEFAULT_FACTORY", "Outcome", "WorkerStart", "create_worker", "main", "perform_call", "shut_down"]

DEFAULT_FACTORY = "ringcore.worker.entry:create_worker"


class WorkerStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the executor hands to a worker's process."""

    config: EngineConfig
    rank: int
    rendezvous: str | None  # a path for the ranks to meet at; None for a single rank
    factory: str  # "module:function", called as function(config, rank, rendezvous)
    spin_s: float


class Outcome(msgspec.Struct, frozen=True):
    """What a call came to: the encoded value, or the encoded error."""

    is_error: bool
    body: bytes


def main(payload: bytes, fds: dict[str, int]) -> None:
    """The process from beginning to end. Exit code 1 if the worker cannot be made or fails in its own shutdown."""
    start: WorkerStart = decoder(WorkerStart).decode(payload)
    link = _Link(start.rank, fds, start.spin_s)
    try:
        worker = create_worker(start.factory, start.config, start.rank, start.rendezvous)
    except Exception as error:
        link.reply(CREATED, CALL, Outcome(True, encode_error(error, start.rank, "create_worker")))
        raise SystemExit(1) from error
    link.reply(CREATED, CALL, Outcome(False, encode_value(None)))
    try:
        _Loop(worker, link).run()
    except RingClosed:
        if not shut_down(worker):
            raise SystemExit(1) from None
    except PeerDied:
        raise SystemExit(1) from None


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
    """The worker's ends of its two queues."""

    def __init__(self, rank: int, fds: Mapping[str, int], spin_s: float) -> None:
        def named(prefix: str) -> QueueHandle:
            return QueueHandle.from_fds({k.removeprefix(prefix): fd for k, fd in fds.items() if k.startswith(prefix)})

        self.rank = rank
        deaths = [fds[PARENT_DEATH]]
        self.calls = MessageReader(named("calls."), rank, deaths, spin_s)
        self._replies = MessageWriter(named("replies."), deaths, spin_s)

    def reply(self, call_id: int, kind: int, outcome: Outcome) -> None:
        """Waits for room as long as the executor lives and listens."""
        try:
            self._send(call_id, kind, outcome)
        except (InvalidRequestError, CapacityError) as error:  # too large to be sent: that call's error
            self._send(call_id, kind, Outcome(True, encode_error(error, self.rank, "reply")))

    def _send(self, call_id: int, kind: int, outcome: Outcome) -> None:
        self._replies.send((pack_reply(call_id, self.rank, kind, outcome.is_error), outcome.body))


class _Loop:
    """Receives a call, performs it, replies; in the order of arrival. Ends by `RingClosed` or `PeerDied`."""

    def __init__(self, worker: Any, link: _Link) -> None:
        self._worker, self._link = worker, link
        self._step_decoder, self._step_encoder = decoder(SchedulerOutput), encoder()

    def run(self) -> None:
        while True:
            call_id, kind, perform = self._receive()
            outcome = perform()
            if outcome is not None:
                self._link.reply(call_id, kind, outcome)

    def _receive(self) -> tuple[int, int, Callable[[], Outcome | None]]:
        """The next call, ready to be performed. Its memory has gone back to the executor by then, which so never has
        to wait for a call that is under way."""
        with self._link.calls.receive() as parts:
            call_id, kind, body = unpack_call(parts)
            return call_id, kind, self._prepare_step(body) if kind == STEP else self._prepare_call(body)

    def _prepare_call(self, body: Buffer) -> Callable[[], Outcome]:
        data = bytes(body)
        return lambda: perform_call(self._worker, self._link.rank, data)

    def _prepare_step(self, body: Buffer) -> Callable[[], Outcome | None]:
        try:
            scheduler_output = self._step_decoder.decode(body)
        except Exception as error:
            failed = self._step_failed(error)
            return lambda: failed
        return lambda: self._perform_step(scheduler_output)

    def _perform_step(self, scheduler_output: SchedulerOutput) -> Outcome | None:
        try:
            output = self._worker.execute_model(scheduler_output)
            if self._link.rank != 0:
                return None
            if output is None:
                raise TypeError("execute_model returned None on the output rank")
            return Outcome(False, self._step_encoder.encode(output))
        except Exception as error:
            return self._step_failed(error)

    def _step_failed(self, error: Exception) -> Outcome:
        return Outcome(True, encode_error(error, self._link.rank, "execute_model"))


def perform_call(worker: Any, rank: int, request: bytes) -> Outcome:
    """Performs a CALL's body: the method's value, or whatever went wrong in decoding, calling and encoding.

    `SystemExit`, `KeyboardInterrupt` and their like pass through: they are about the process, not the call.
    """
    method = "unknown"
    try:
        method, args, kwargs = _decode_request(request)
        return Outcome(False, encode_value(call_rpc(worker, method, args, kwargs)))
    except Exception as error:
        return Outcome(True, encode_error(error, rank, method))


def _decode_request(request: bytes) -> tuple[str, Sequence[Any], dict[str, Any]]:
    return msgspec.convert(decode_value(request), tuple[str, list[Any], dict[str, Any]], strict=True)
