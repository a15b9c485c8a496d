"""Engine restarts of an `AsyncEngine`: each generation is one engine process; when a ready one dies, the next starts.

    state       current                                       opening (future)
    ----------  --------------------------------------------  ---------------------------------
    starting    an engine that starts                         pending
    serving     an engine that is ready                       that engine
    restarting  the dead engine, then the one that starts     pending, a new future
    dead        the engine that died, or failed to start      that engine, or its error

Each generation is a `RequestStreams`: its requests end with it, and only its counters carry over to the next one. A
failed first start is not repeated, since it would fail again. Every later start counts as a restart, unless it was
planned (`replace`).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError, RingcoreError
from ringcore.front_end.front_end import FrontEnd
from ringcore.front_end.observers import FrontEndObserver
from ringcore.front_end.request_streams import RequestStreams
from ringcore.host.owner_process import OwnerProcess
from ringcore.protocol.messages import EngineHealth
from ringcore.protocol.requests import EngineStats
from ringcore.tracing import Tracer

__all__ = ["EngineGenerations", "OnEnd", "check_restarts"]

_COUNTERS = ("step", "num_preemptions", "num_prefix_hit_tokens", "num_prefix_query_tokens")

T = TypeVar("T")
OnEnd = Callable[[RingcoreError | None, RingcoreError], None]

_log = logging.getLogger(__name__)


class _Generation(NamedTuple):
    streams: RequestStreams
    past: dict[str, int]  # the sums of the counters of earlier generations


class EngineGenerations:
    """Starts an engine, and replaces it at most `max_restarts` times after it dies. It holds no reference to
    `AsyncEngine`, whose finalizer closes this.

    config: of each engine. front_end: of the last engine that was ready. died: the cause of death, once there will be
    no restart; None once it was closed. restart_cause: the cause of death of the last engine that was replaced.
    num_restarts: planned ones are not counted.

    Invariant: `_generation` and `_opening` change only under `_lock`, and may be read without it.
    """

    def __init__(
        self, config: EngineConfig, max_restarts: int, observers: list[FrontEndObserver], tracer: Tracer, on_end: OnEnd
    ) -> None:
        """on_end: called once there will be no restart, with the cause (None: it was closed), and with the error of
        requests that still come."""
        self.config, self._max_restarts = config, max_restarts
        self._tracer, self._on_end = tracer, on_end
        self.owner = OwnerProcess("the engine")
        self.observers = observers  # of all generations
        self.num_restarts = 0
        self._restarts_left = max_restarts
        self.restart_cause: str | None = None
        self.front_end: FrontEnd | None = None
        self.died: Future[RingcoreError | None] = _pending()
        self._opening: Future[RequestStreams] = _pending()
        self._is_closing = False
        self._replaced: RequestStreams | None = None  # its end is planned
        self._lock = threading.RLock()
        with self._lock:
            self._generation = _Generation(self._start(), dict.fromkeys(_COUNTERS, 0))

    def _start(self) -> RequestStreams:
        streams = RequestStreams(self.config, self._on_engine_ended, self._tracer, self.observers)
        streams.opened.add_done_callback(partial(self._on_opened, streams))
        return streams

    def _on_opened(self, streams: RequestStreams, opened: Future[FrontEnd]) -> None:
        if opened.exception() is None:
            with self._lock:
                is_next = self.front_end is not None
                self.front_end = opened.result()
                self._opening.set_result(streams)
            if is_next:
                _log.info("the next engine is ready")

    # -----------------------------------------------------------------------------------------------------------
    # The current generation. These methods take no lock.

    @property
    def current(self) -> RequestStreams:
        return self._generation.streams

    @property
    def is_starting(self) -> bool:
        return not self._opening.done()

    async def opened(self) -> RequestStreams:
        """The current engine, once it is ready. Raises the error that ended its start."""
        self.owner.check()
        while not (opening := self._opening).done():
            with suppress(Exception):  # raised below, as a copy for each waiter
                await asyncio.wrap_future(opening)
        return _opened(opening)

    @property
    def is_open(self) -> bool:
        """Whether a request would be sent at once."""
        opening = self._opening
        return opening.done() and opening.exception() is None and opening.result().is_open

    def check_opened(self) -> RequestStreams:
        """The current engine, which is ready or was. Raises the error of its start, and `RingcoreError` before it."""
        self.owner.check()
        opening = self._opening
        if not opening.done():
            raise RingcoreError("the engine is not ready yet; await start() first")
        return _opened(opening)

    @property
    def stats(self) -> EngineStats:
        """Of the current engine; its counters include those of all earlier generations."""
        streams, past = self._generation
        stats = streams.client.stats
        return msgspec.structs.replace(stats, **{name: getattr(stats, name) + past[name] for name in _COUNTERS})

    def health(self, timeout: float) -> EngineHealth:
        """Takes up to about `timeout` seconds."""
        health = self.current.client.health(timeout)
        if self.is_starting and self.restart_cause is not None:
            return msgspec.structs.replace(health, state="starting", restart_cause=self.restart_cause, error=None)
        return health

    # -----------------------------------------------------------------------------------------------------------
    # Restart.

    def _on_engine_ended(self, streams: RequestStreams, error: RingcoreError) -> Callable[[], None]:
        """An engine has ended: decides whether to restart, before the ended engine's requests fail. The returned
        function starts the next generation."""
        with self._lock:
            if streams is self._replaced:
                return _no_restart
        return self._restart_or_end(streams, error, was_closed=streams.is_closed)

    def _restart_or_end(self, streams: RequestStreams, error: RingcoreError, was_closed: bool) -> Callable[[], None]:
        with self._lock:
            if self._is_closing or self.front_end is None or self._restarts_left == 0:
                self._end(None if was_closed else self._restarts_exhausted(error), error)
                return _no_restart
            self.num_restarts += 1
            self._restarts_left -= 1
            self.restart_cause = error.message
            if self._opening.done():
                self._opening = _pending()
        number = self._max_restarts - self._restarts_left
        _log.error("the engine died, restart %d of %d: %s", number, self._max_restarts, error.message)
        return partial(self._start_next, streams)

    def _start_next(self, ended: RequestStreams) -> None:
        try:
            threading.Thread(target=self._restart, args=(ended,), name="ringcore-restart", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            failure = EngineDeadError(f"the engine cannot be restarted: {error}", process="engine")
            with self._lock:
                self._end(failure, failure)

    def replace(self, timeout: float | None) -> None:
        """A planned restart, also of an engine that is dead: requests wait from now on, the engine has `timeout`
        seconds (None: no limit) for those that it has, ends, and the next one starts; `opened` waits for that. All
        restarts are left again. An engine that starts is left alone. Raises `EngineDeadError` if this was closed.
        """
        self.owner.check()
        with self._lock:
            if self._is_closing:
                raise EngineDeadError("the engine was closed", process="engine")
            if not self._opening.done():
                return
            ended = self._replaced = self.current
            self._opening, self._restarts_left = _pending(), self._max_restarts
            if self.died.done():
                self.died = _pending()
        self._restart(ended, timeout)

    def _restart(self, ended: RequestStreams, timeout: float | None = 0.0) -> None:
        ended.close(timeout)  # frees its memory for the next one
        try:
            with self._lock:
                self._replaced = None
                if self._is_closing:
                    return
                past, stats = self._generation.past, ended.client.stats
                added = {name: past[name] + getattr(stats, name) for name in _COUNTERS}
                self._generation = _Generation(self._start(), added)
        except Exception as error:
            text = f"the engine cannot be restarted: {error!r}"
            known = error if isinstance(error, RingcoreError) else EngineDeadError(text, process="engine")
            self._restart_or_end(ended, known, was_closed=False)()

    def _restarts_exhausted(self, error: RingcoreError) -> RingcoreError:
        used = self._max_restarts - self._restarts_left
        if used == 0:
            return error
        return EngineDeadError(
            f"{error.message}; the engine was restarted {used} times, as often as engine_restarts allows",
            **({"process": "engine"} | error.details),
        )

    def _end(self, died: RingcoreError | None, error: RingcoreError) -> None:
        """There will be no restart. error: for requests that wait for an engine."""
        self._on_end(died, error)
        if not self.died.done():
            self.died.set_result(died)
        if not self._opening.done():
            self._opening.set_exception(died or error)

    # -----------------------------------------------------------------------------------------------------------
    # Shutdown.

    def close(self, timeout: float | None = 0.0) -> None:
        """`RequestStreams.close` of the current engine, without a restart. Idempotent. Does nothing in a process that
        was forked from this one."""
        if not self.owner.is_here:
            return
        with self._lock:
            self._is_closing = True
        self.current.close(timeout)
        with self._lock:
            self._end(None, EngineDeadError("the engine was closed", process="engine"))
        for observer in self.observers:
            observer.close()

    def close_in_finalizer(self) -> None:
        """`close`, for a finalizer, which may run in any thread, also in one that `close` would join."""
        if threading.current_thread() is threading.main_thread() or not self.owner.is_here:
            self.close()  # also at the interpreter's exit, when no thread can be started
        else:
            threading.Thread(target=self.close, name="ringcore-closer", daemon=True).start()


def _opened(opening: Future[RequestStreams]) -> RequestStreams:
    error = opening.exception()
    if error is not None:
        raise copy.copy(error)  # a traceback belongs to one raise
    return opening.result()


def check_restarts(engine_restarts: object) -> None:
    """Raises `ConfigError` unless it is a number of restarts."""
    if not isinstance(engine_restarts, int) or isinstance(engine_restarts, bool) or engine_restarts < 0:
        raise ConfigError(
            f"engine_restarts={engine_restarts!r}: give an integer of at least 0",
            option="engine_restarts",
            value=repr(engine_restarts),
        )


def _no_restart() -> None:
    """No-op: there is no restart."""


def _pending() -> Future[T]:
    """A future that a waiter cannot cancel for the others."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future
