"""The engines of an `AsyncEngine`, one after the other: where one dies that was ready, another takes its place.

    state       current                                   opening
    ----------  ----------------------------------------  ---------------------------------
    starting    an engine that starts                     pending
    serving     an engine that is ready                   that engine
    restarting  the one that died, then one that starts   pending, another one
    dead        the one that died, or did not start       that engine, or what stopped it

Each is a `RequestStreams`: its requests end with it, and nothing of it is known to the next one but its counts. The
first start is not repeated: what stops it stops the next one too. Of the later ones each counts as a restart.
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
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.front_end.front_end import FrontEnd
from ringcore.front_end.request_streams import RequestStreams
from ringcore.front_end.tokenization.pool import TokenizerPool
from ringcore.host.owner_process import OwnerProcess
from ringcore.protocol.messages import EngineHealth
from ringcore.protocol.requests import EngineStats

__all__ = ["EngineGenerations"]

_COUNTERS = ("step", "num_preemptions", "num_prefix_hit_tokens", "num_prefix_query_tokens")

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _Generation(NamedTuple):
    streams: RequestStreams
    past: dict[str, int]  # the counters of those before it, added up


class EngineGenerations:
    """Starts an engine, and at most `max_restarts` times another one where it dies. It knows nothing of `AsyncEngine`,
    whose finalizer closes this.

    front_end: of the last engine that was ready. tokenizer_pool: of all engines. died: what the engine died of, once no
    other follows; None once it was closed. restart_cause: what the last one died of that was replaced.

    Invariant: `_generation` and `_opening` change under `_lock` alone, and may be read without.
    """

    def __init__(self, config: EngineConfig, max_restarts: int) -> None:
        self._config, self._max_restarts = config, max_restarts
        self.owner = OwnerProcess("the engine")
        self.num_restarts = 0
        self.restart_cause: str | None = None
        self.front_end: FrontEnd | None = None
        self.died: Future[RingcoreError | None] = _pending()
        self._opening: Future[RequestStreams] = _pending()
        self._is_closing = False
        self._lock = threading.RLock()
        self.tokenizer_pool = TokenizerPool(config)
        try:
            with self._lock:
                self._generation = _Generation(self._start(), dict.fromkeys(_COUNTERS, 0))
            self.tokenizer_pool.start()
        except BaseException:
            self.tokenizer_pool.close()
            raise

    def _start(self) -> RequestStreams:
        streams = RequestStreams(self._config, self._follow)
        streams.opened.add_done_callback(partial(self._note_opened, streams))
        return streams

    def _note_opened(self, streams: RequestStreams, opened: Future[FrontEnd]) -> None:
        if opened.exception() is None:
            with self._lock:
                self.front_end = opened.result()
                self._opening.set_result(streams)

    # -----------------------------------------------------------------------------------------------------------
    # The one that is there. Nothing here waits for a lock.

    @property
    def current(self) -> RequestStreams:
        return self._generation.streams

    @property
    def is_starting(self) -> bool:
        return not self._opening.done()

    async def opened(self) -> RequestStreams:
        """The current engine, once it is ready. Raises what stopped it."""
        self.owner.check()
        while not (opening := self._opening).done():
            with suppress(Exception):  # raised below, afresh for each who waits
                await asyncio.wrap_future(opening)
        return _opened(opening)

    def check_opened(self) -> RequestStreams:
        """The current engine, which is ready or was. Raises what stopped its start, and `RingcoreError` before."""
        self.owner.check()
        opening = self._opening
        if not opening.done():
            raise RingcoreError("the engine is not ready yet; await start() first")
        return _opened(opening)

    @property
    def stats(self) -> EngineStats:
        """Of the current engine, its counters with those of all before it."""
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
    # The next one.

    def _follow(self, streams: RequestStreams, error: RingcoreError) -> Callable[[], None]:
        """An engine has ended: whether another one follows is known from now on, before the requests of the one that
        ended hear of it. What is returned starts that one."""
        with self._lock:
            if self._is_closing or self.front_end is None or self.num_restarts == self._max_restarts:
                self._end(None if streams.is_closed else self._restarts_exhausted(error), error)
                return _start_none
            self.num_restarts += 1
            self.restart_cause = error.message
            if self._opening.done():
                self._opening = _pending()
        _log.error("the engine died, restart %d of %d: %s", self.num_restarts, self._max_restarts, error.message)
        return partial(self._start_next, streams)

    def _start_next(self, ended: RequestStreams) -> None:
        try:
            threading.Thread(target=self._restart, args=(ended,), name="ringcore-restart", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            failure = EngineDeadError(f"the engine cannot be started again: {error}", process="engine")
            with self._lock:
                self._end(failure, failure)

    def _restart(self, ended: RequestStreams) -> None:
        ended.close()  # the next one needs the memory that it has
        try:
            with self._lock:
                if self._is_closing:
                    return
                past, stats = self._generation.past, ended.client.stats
                added = {name: past[name] + getattr(stats, name) for name in _COUNTERS}
                self._generation = _Generation(self._start(), added)
        except Exception as error:
            text = f"the engine cannot be started again: {error!r}"
            known = error if isinstance(error, RingcoreError) else EngineDeadError(text, process="engine")
            self._follow(ended, known)()

    def _restarts_exhausted(self, error: RingcoreError) -> RingcoreError:
        if self.num_restarts == 0:
            return error
        return EngineDeadError(
            f"{error.message}; the engine was started again {self.num_restarts} times, as often as engine_restarts "
            "allows",
            **({"process": "engine"} | error.details),
        )

    def _end(self, died: RingcoreError | None, error: RingcoreError) -> None:
        """No engine follows. error: of requests that wait for one."""
        self.tokenizer_pool.close(died or error)
        if not self.died.done():
            self.died.set_result(died)
        if not self._opening.done():
            self._opening.set_exception(died or error)

    # -----------------------------------------------------------------------------------------------------------
    # The end.

    def close(self, timeout: float | None = 0.0) -> None:
        """`RequestStreams.close` of the current engine, after which none follows. Idempotent. Does nothing in a process
        that was forked from this one."""
        if not self.owner.is_here:
            return
        with self._lock:
            self._is_closing = True
        self.current.close(timeout)
        with self._lock:
            self._end(None, EngineDeadError("the engine was closed", process="engine"))

    def close_in_finalizer(self) -> None:
        """`close`, where the garbage collector has any thread run it, perhaps one that `close` would wait for."""
        if threading.current_thread() is threading.main_thread() or not self.owner.is_here:
            self.close()  # at the interpreter's exit too, when no thread can be started
        else:
            threading.Thread(target=self.close, name="ringcore-closer", daemon=True).start()


def _opened(opening: Future[RequestStreams]) -> RequestStreams:
    error = opening.exception()
    if error is not None:
        raise copy.copy(error)  # a traceback belongs to one raise
    return opening.result()


def _start_none() -> None:
    """In place of the start of another engine."""


def _pending() -> Future[T]:
    """A future that a waiter cannot cancel for the others."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future
