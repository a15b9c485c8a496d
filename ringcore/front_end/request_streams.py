"""The requests of an `AsyncEngine`, between its receiver and sender threads and the event loops of the readers.

    event loops                       the engine's threads
    RequestStreams.add  ──queue─────▶ sender    ──▶ engine process
    RequestStream.take  ◀─state─────  receiver  ◀── engine process
                        ◀─wake: one call_soon_threadsafe per message and loop

No event loop blocks on the engine: only the sender thread does, which also keeps requests and aborts in order. The
receiver thread detokenizes. Output stays in the request's state until the reader takes it, so a slow reader exerts no
back-pressure and gets all output since its last read merged into one.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, KeysView, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ringcore.config import EngineConfig
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.front_end.front_end import FrontEnd, start_engine
from ringcore.front_end.input_processor import PreparedRequest
from ringcore.front_end.observers import FrontEndObserver
from ringcore.front_end.request_state import RequestState, id_in_use
from ringcore.front_end.waiter import Waiter, set_all
from ringcore.params.outputs import RequestOutput
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.tracing import Tracer, now_ns
from ringcore.tracing.kinds import WOKEN

__all__ = ["RequestStream", "RequestStreams"]

_THREAD_JOIN_S = 10.0

_log = logging.getLogger(__name__)


class RequestStream:
    """One request and its reader: a `BegunStream`. All but `drop` is called only in the thread of
    `loop`."""

    def __init__(self, streams: RequestStreams, state: RequestState, loop: asyncio.AbstractEventLoop) -> None:
        self.streams = streams  # of the engine that it was sent to
        self.state = state
        self.loop = loop
        self.error: RingcoreError | None = None  # set before the last wake
        self.is_dropped = False
        self.waiter = Waiter(loop)  # of the reader

    def take(self) -> RequestOutput | None:
        output = self.state.take()
        if output is None:
            if self.is_dropped:
                raise StopAsyncIteration
            if self.error is not None:
                raise copy.copy(self.error)  # a traceback belongs to one raise
            self.streams.client.owner.check()
        return output

    def wait(self) -> Awaitable[None]:
        return self.waiter

    def drop(self) -> None:
        self.streams.drop(self)

    def wake(self) -> None:
        self.loop.call_soon(self.waiter.set)


OnEnd = Callable[["RequestStreams", RingcoreError], Callable[[], None]]


class _Add(NamedTuple):
    stream: RequestStream
    requests: list[EngineCoreRequest]


class RequestStreams:
    """An engine process and its unfinished requests.

    opened: the front end, once the engine is ready, or the error of its start. is_closed: `close` ended the engine.
    on_end: the receiver calls it with the cause of the engine's death before it fails the requests, and calls the
    function that it returns afterwards.

    Invariant: `_by_id` has the streams that have not ended, by the caller's request id. The thread that removes a
    stream ends it, so it ends once. `drop` takes no lock, since it runs in finalizers, inside any other code of its
    thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_end: OnEnd,
        tracer: Tracer,
        observers: Sequence[FrontEndObserver] = (),
    ) -> None:
        self._config, self._on_end, self._tracer, self._observers = config, on_end, tracer, observers
        self.is_closed = False
        self.client = start_engine(config, tracer, observers)
        self.opened: Future[FrontEnd] = Future()
        self.opened.set_running_or_notify_cancel()  # a waiter cannot cancel it for the others
        self._by_id: dict[str, RequestStream] = {}
        self._to_send: SimpleQueue[_Add | list[str] | None] = SimpleQueue()
        self._drained: SimpleQueue[None] = SimpleQueue()
        self._error: RingcoreError | None = None  # once set, every new request raises it
        self._closing = threading.Lock()
        self._threads = [
            threading.Thread(target=run, name=f"ringcore-{name}", daemon=True)
            for name, run in (("receiver", self._receive_all), ("sender", self._send_all))
        ]
        for thread in self._threads:
            thread.start()

    # -----------------------------------------------------------------------------------------------------------
    # Called from the event loops: non-blocking.

    @property
    def unfinished_ids(self) -> KeysView[str]:
        """Of the requests that have not ended, as they are at any later moment."""
        return self._by_id.keys()

    @property
    def is_open(self) -> bool:
        """Whether it takes requests, once it is `opened`."""
        return self._error is None

    def check_open(self) -> None:
        """Raises the cause of the engine's death, or that it was closed."""
        if self._error is not None:
            raise copy.copy(self._error)

    def add(self, prepared: PreparedRequest) -> RequestStream:
        """Queues a request to be sent; its reader is in the running loop."""
        outputs = self.opened.result(timeout=0).outputs
        state = outputs.add(prepared, prepared.requests[0].sampling_params.output_kind)
        for observer in self._observers:
            observer.began(state)
        stream = RequestStream(self, state, asyncio.get_running_loop())
        if self._by_id.setdefault(prepared.request_id, stream) is not stream:
            outputs.forget(state.unfinished_ids)
            raise id_in_use(prepared.request_id)
        self._to_send.put(_Add(stream, prepared.requests))
        if self._error is not None:  # checked last: the thread that set it may have failed the streams before this one
            self.drop(stream)
        self.check_open()
        return stream

    def drop(self, stream: RequestStream) -> None:
        """Aborts a request whose reader has gone."""
        stream.is_dropped = True
        if not self.client.owner.is_here or not self._remove(stream):
            return
        engine_ids = stream.state.unfinished_ids
        self.opened.result(timeout=0).outputs.forget(engine_ids)
        self._to_send.put(engine_ids)

    def abort(self, request_id: str) -> None:
        """Aborts a request; its reader gets a last output."""
        self.client.owner.check()
        stream = self._by_id.get(request_id)
        if stream is not None:
            self._to_send.put(stream.state.unfinished_ids)

    def _remove(self, stream: RequestStream, error: RingcoreError | None = None) -> bool:
        """Removes a stream; returns whether it had not ended before. error: its end, where its state has none."""
        if self._by_id.get(stream.state.request_id) is not stream:
            return False
        if had_not_ended := self._by_id.pop(stream.state.request_id, None) is stream:
            for observer in self._observers:
                observer.ended(stream.state, error)
        if not self._by_id and self._error is not None:  # `close` sets it before it waits
            self._drained.put(None)
        return had_not_ended

    # -----------------------------------------------------------------------------------------------------------
    # The threads.

    def _receive_all(self) -> None:
        try:
            front_end = FrontEnd(self._config, self.client)
        except BaseException as error:
            self._fail_all(error if isinstance(error, RingcoreError) else _internal_error(error))
            self.opened.set_exception(error)
            return
        self.opened.set_result(front_end)
        try:
            while True:
                self._receive(front_end)
        except RingcoreError as error:
            self._fail_all(error)
        except BaseException as error:
            _log.exception("the thread that receives from the engine failed")
            self._fail_all(_internal_error(error))
            self.client.close(_internal_error(error))

    def _receive(self, front_end: FrontEnd) -> None:
        processed = front_end.receive()
        if processed.abort_ids:
            self._to_send.put(processed.abort_ids)
        changed = []
        began = self._tracer.is_on and now_ns()
        for state in processed.changed:
            stream = self._by_id.get(state.request_id)
            if stream is None or stream.state is not state:
                continue
            if state.is_over:
                self._remove(stream)
            changed.append(stream)
        self._wake(changed)
        if began:
            self._tracer.record((WOKEN.number, began, now_ns(), len(changed)))

    def _wake(self, streams: Collection[RequestStream]) -> None:
        loops = {stream.loop for stream in streams}
        for loop in loops:
            its_streams = streams if len(loops) == 1 else [one for one in streams if one.loop is loop]
            try:
                loop.call_soon_threadsafe(set_all, [one.waiter for one in its_streams])
            except RuntimeError:  # the loop is closed, and its readers with it
                for stream in its_streams:
                    self.drop(stream)

    def _fail_all(self, error: RingcoreError) -> None:
        start_next = self._on_end(self, error)
        self._error = self._error or error
        self._fail(list(self._by_id.values()), error)
        start_next()

    def _fail(self, streams: Iterable[RequestStream], error: RingcoreError) -> None:
        failed = [stream for stream in streams if self._remove(stream, error)]
        for stream in failed:
            stream.error = error
            self.opened.result(timeout=0).outputs.forget(stream.state.unfinished_ids)
        self._wake(failed)

    def _send_all(self) -> None:
        while (command := self._to_send.get()) is not None:
            try:
                if isinstance(command, _Add):
                    self.client.add_requests(command.requests)
                else:
                    self.client.abort(command)
            except RingcoreError as error:  # the receiver handles the engine's death
                if isinstance(command, _Add) and not isinstance(error, EngineDeadError):
                    self._fail([command.stream], error)
            del command

    # -----------------------------------------------------------------------------------------------------------
    # Shutdown.

    def close(self, timeout: float | None = 0.0) -> None:
        """Refuses new requests, waits up to `timeout` seconds (None: without a limit) for unfinished ones, aborts the
        rest, and ends the engine and the threads. Idempotent, also from several threads at once.
        """
        self._error = self._error or EngineDeadError("the engine was closed", process="engine")
        self._wait_until_empty(timeout)
        with self._closing:
            rest = list(self._by_id.values())
            for stream in rest:
                stream.state.end(time.monotonic())
            self._wake([stream for stream in rest if self._remove(stream)])
            self.is_closed = self.is_closed or self.client.is_alive
            self.client.close()
            self._to_send.put(None)
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(_THREAD_JOIN_S)

    def _wait_until_empty(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._by_id:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            try:
                self._drained.get(timeout=left_s)
            except Empty:
                return
        self._drained.put(None)  # for the next waiting thread


def _internal_error(error: BaseException) -> EngineDeadError:
    return EngineDeadError(f"the engine's front end failed: {error!r}", process="front end")
