"""ReplicaSet: several engines of one configuration behind the interface of one."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError, InvalidRequestError, RingcoreError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.daemon_threads import DaemonThreads
from ringcore.front_end.engine_generations import EngineGenerations, check_restarts
from ringcore.front_end.engine_health import merged_stats
from ringcore.front_end.engine_metrics import ServingTotals, make_registry_of, totals_of
from ringcore.front_end.front_end import FrontEnd
from ringcore.front_end.input_processor import InputProcessor, Preparation
from ringcore.front_end.observers import observers_of
from ringcore.front_end.replicas.device_groups import options_of_engines
from ringcore.front_end.replicas.moving_stream import MovingStream, begin
from ringcore.front_end.replicas.placement import Placement
from ringcore.front_end.replicas.replica import Replica
from ringcore.front_end.serving_engine import ServingEngine
from ringcore.front_end.tokenization.pool import TokenizerPool
from ringcore.host.file_names import as_utf8
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.messages import EngineHealth, EngineReady
from ringcore.protocol.requests import EngineStats
from ringcore.routing.policies import make_router
from ringcore.tracing import Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

__all__ = ["ReplicaSet"]

_RESTARTS = 8  # of each of several replicas, unless the caller says otherwise: the others serve meanwhile

T = TypeVar("T")

_log = logging.getLogger(__name__)


class ReplicaSet(ServingEngine):
    """`data_parallel_size` engines, each with devices of its own. Other keywords are the engine options.

        async with ReplicaSet("path/to/model", data_parallel_size=2) as engines:
            async for output in engines.generate("Water boils at"):
                print(output.outputs[0].text)

    It is used as an `AsyncEngine`. A prompt is tokenized once and goes to one replica, by `routing`. When that replica
    dies the request is computed by another one, unless its reader has got an output: then it raises `EngineDeadError`.
    A replica that died is replaced while the others serve, `engine_restarts` times each (default: 8, or 0 for a single
    one); `restart` replaces one that was lost too.

    Calls reach every replica that is not lost, and raise the error of the first one that failed, when all have
    answered. `replica(i)` has the same calls for one replica alone. After new weights, a replica that has older ones
    gets no requests.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        data_parallel_size: int = 1,
        routing: str = "prefix-affinity",
        engine_restarts: int | None = None,
        tracer_provider: TracerProvider | None = None,
        **engine_options: Any,
    ) -> None:
        """routing: one of `routing.policies.ROUTINGS`."""
        _check_size(data_parallel_size)
        restarts = (0 if data_parallel_size == 1 else _RESTARTS) if engine_restarts is None else engine_restarts
        check_restarts(restarts)
        options = options_of_engines({"model": model} | engine_options, data_parallel_size)
        configs = [EngineConfig.from_options(**one) for one in options]
        router = make_router(routing, data_parallel_size)
        self.config = configs[0]
        self.has_request_spans = tracer_provider is not None
        self._calls = DaemonThreads("ringcore-call")
        tracers = [Tracer() for _ in configs]
        self._tokenizer_pool = TokenizerPool(self.config, tracers[0])
        self._ends = _Ends(data_parallel_size, self._tokenizer_pool)
        engines: list[EngineGenerations] = []
        # Also when dropped, and at exit.
        self._finalizer = weakref.finalize(self, _close_in_finalizer, engines, self._tokenizer_pool)
        try:
            for number, (config, tracer) in enumerate(zip(configs, tracers, strict=True)):
                observers, on_end = observers_of(tracer_provider, config), partial(self._ends.add, number)
                engines.append(EngineGenerations(config, restarts, observers, tracer, on_end))
            self._tokenizer_pool.start()
        except BaseException:
            self._finalizer()
            raise
        self._replicas = [Replica(number, one, self._calls) for number, one in enumerate(engines)]
        self._placement = Placement(self._replicas, router)
        self._known_inputs: InputProcessor | None = None  # one for all, so that ids are unique over all replicas
        self._inputs_lock = threading.Lock()
        self._restarting = threading.Lock()

    # -----------------------------------------------------------------------------------------------------------
    # Life.

    async def start(self) -> EngineReady:
        """Waits until all replicas are ready; raises the error of the first one that ended."""
        await asyncio.gather(*(replica.wait_open() for replica in self._replicas))
        return self.ready

    @property
    def ready(self) -> EngineReady:
        """The report of the first replica that is ready; its max_model_len is the least of all that are."""
        reports = [one for one in self._last_reports() if one is not None]
        if not reports:
            return self._replicas[0].generations.check_opened().client.ready
        return replace(reports[0], max_model_len=min(one.max_model_len for one in reports))

    def _last_reports(self) -> list[EngineReady | None]:
        return [replica.generations.current.client.last_ready for replica in self._replicas]

    @property
    def is_starting(self) -> bool:
        is_any_starting = any(replica.generations.is_starting for replica in self._replicas)
        return is_any_starting and not any(replica.is_open for replica in self._replicas)

    async def wait_dead(self) -> RingcoreError | None:
        self._replicas[0].generations.owner.check()
        return await asyncio.wrap_future(self._ends.died)

    async def close(self, timeout: float | None = 0.0) -> None:
        check_timeout("timeout", timeout)
        if self._replicas[0].generations.owner.is_here:
            closing = [replica.in_thread(partial(replica.generations.close, timeout)) for replica in self._replicas]
            await asyncio.gather(*closing)

    # -----------------------------------------------------------------------------------------------------------
    # Requests.

    async def _begin(self, prepare: Callable[[], Preparation]) -> MovingStream:
        await self._placement.wait_open()
        preparation = prepare()
        answer = None if preparation.job is None else await self.run_text_job(preparation.job)
        return await begin(self._placement, preparation.finish(answer))

    async def abort(self, request_id: str) -> None:
        for replica in self._replicas:
            replica.generations.current.abort(request_id)

    @property
    def unfinished_ids(self) -> list[str]:
        return [one for replica in self._replicas for one in list(replica.generations.current.unfinished_ids)]

    def get_tokenizer(self) -> Tokenizer:
        return self._front_end.tokenizer

    @property
    def _front_end(self) -> FrontEnd:
        """Of a replica that is ready, or was."""
        known = (replica.generations.front_end for replica in self._replicas)
        found = next((one for one in known if one is not None), None)
        return found or self._replicas[0].generations.check_opened().opened.result()

    @property
    def _inputs(self) -> InputProcessor:
        if self._known_inputs is None:
            with self._inputs_lock:
                made = InputProcessor(self.config, self.get_tokenizer(), self.ready.max_model_len)
                self._known_inputs = self._known_inputs or made
        return self._known_inputs

    # -----------------------------------------------------------------------------------------------------------
    # Replicas.

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    def replica(self, number: int) -> Replica:
        """The calls of one replica. Raises `InvalidRequestError` for a number that none has."""
        if not 0 <= number < len(self._replicas):
            remedy = f"give a number from 0 to {len(self._replicas) - 1}"
            raise InvalidRequestError(f"replica={number}: {remedy}", field="replica", value=number)
        return self._replicas[number]

    async def restart(self, replica: int | None = None, timeout: float | None = None) -> None:
        """Replaces the engine of one replica, or of all one after the other, while the others serve. A replica first
        gets no new requests and has `timeout` seconds (None: no limit) for those that it has.

        Raises `InvalidRequestError` while another restart is in progress, `EngineDeadError` once all replicas have
        ended, and the error of an engine that does not start, after which no further replica is restarted.
        """
        check_timeout("timeout", timeout)
        if self._ends.died.done():
            raise self._ends.died.result() or EngineDeadError("the engines were closed", process="engine")
        chosen = self._replicas if replica is None else [self.replica(replica)]
        if not self._restarting.acquire(blocking=False):
            raise InvalidRequestError("restart: another one is in progress; wait for it", field="restart", value=None)
        try:
            for one in chosen:
                self._ends.remove(one.number)
                await one.restart(timeout)
        finally:
            self._restarting.release()

    async def _each(self, method: Callable[[EngineCoreClient], T]) -> list[T]:
        called = self.live_replicas()
        answers = await asyncio.gather(*(one._each(method) for one in called.values()), return_exceptions=True)
        for number, answer in zip(called, answers, strict=True):
            if isinstance(answer, BaseException):
                raise _named(answer, number, len(self._replicas))
        return [value for answer in answers if not isinstance(answer, BaseException) for value in answer]

    # -----------------------------------------------------------------------------------------------------------
    # State.

    def live_replicas(self) -> Mapping[int, Replica]:
        live = {one.number: one for one in self._replicas if not self._ends.has(one.number)}
        return live or dict(enumerate(self._replicas))

    async def replica_healths(self, timeout: float = 1.0) -> list[EngineHealth]:
        return list(await asyncio.gather(*(replica.health(timeout) for replica in self._replicas)))

    @property
    def stats(self) -> EngineStats:
        return merged_stats([replica.generations.stats for replica in self._replicas])

    def totals(self) -> ServingTotals:
        return totals_of([replica.metrics for replica in self._replicas])

    def metrics(self, model_name: str | None = None) -> CollectorRegistry:
        """As an engine's; the label "engine" is a replica's number."""
        engines = [one.metrics for one in self._replicas]
        return make_registry_of(engines, self._tokenizer_pool, model_name or as_utf8(self.config.model.model))


class _Ends:
    """The replicas that have ended and will not be restarted. It holds no reference to the set.

    died: set once all have ended, with the cause of the last death; None if they were closed.
    """

    def __init__(self, num_replicas: int, pool: TokenizerPool) -> None:
        self._num_replicas, self._pool = num_replicas, pool
        self._ended: dict[int, RingcoreError | None] = {}  # None: it was closed
        self._lock = threading.RLock()
        self.died: Future[RingcoreError | None] = Future()
        self.died.set_running_or_notify_cancel()

    def add(self, number: int, cause: RingcoreError | None, error: RingcoreError) -> None:
        with self._lock:
            self._ended.pop(number, None)
            self._ended[number] = cause  # the last one is the newest
            num_left = self._num_replicas - len(self._ended)
            if num_left and cause is not None:
                _log.error("replica %d died, %d are left: %s", number, num_left, cause.message)
            if num_left or self.died.done():
                return
            self.died.set_result(cause)
        self._pool.close(error)

    def remove(self, number: int) -> None:
        with self._lock:
            if not self.died.done():
                self._ended.pop(number, None)

    def has(self, number: int) -> bool:
        return number in self._ended


def _close_in_finalizer(engines: Sequence[EngineGenerations], pool: TokenizerPool) -> None:
    for engine in engines:
        engine.close_in_finalizer()
    pool.close()


def _check_size(size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            f"data_parallel_size={size!r}: give an integer of at least 1", option="data_parallel_size", value=repr(size)
        )


def _named(error: BaseException, number: int, num_replicas: int) -> BaseException:
    """The error, with the replica that it is of where there are several."""
    if num_replicas == 1 or not isinstance(error, RingcoreError):
        return error
    return type(error)(f"replica {number}: {error.message}", **error.details)
