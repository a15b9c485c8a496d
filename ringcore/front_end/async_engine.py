"""AsyncEngine: an engine for asyncio. The same front end as `LLM`, with asynchronous iterators of outputs."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.config import EngineConfig
from ringcore.errors import RingcoreError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.daemon_threads import DaemonThreads
from ringcore.front_end.engine_calls import EngineCalls
from ringcore.front_end.engine_generations import EngineGenerations, check_restarts
from ringcore.front_end.engine_metrics import EngineMetrics, ServingTotals, make_registry_of, serve_metrics, totals_of
from ringcore.front_end.front_end import FrontEnd
from ringcore.front_end.input_processor import InputProcessor, Preparation
from ringcore.front_end.observers import observers_of
from ringcore.front_end.output_stream import OutputStream
from ringcore.front_end.request_streams import RequestStream, RequestStreams
from ringcore.front_end.serving_engine import ServingEngine
from ringcore.front_end.tokenization.pool import TokenizerPool
from ringcore.host.file_names import as_utf8
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.messages import EngineHealth, EngineReady
from ringcore.protocol.requests import EngineStats
from ringcore.tracing import Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from ringcore.metrics.server import MetricsServer

__all__ = ["AsyncEngine", "OutputStream"]

T = TypeVar("T")


class AsyncEngine(ServingEngine):
    """A model ready to generate, for any number of tasks at once. Keywords are the engine options.

        async with AsyncEngine("path/to/model") as engine:
            async for output in engine.generate("Water boils at", SamplingParams(output_kind="delta")):
                print(output.outputs[0].text, end="")

    The constructor starts the engine process and returns; it raises `UnknownOptionError`, `ConfigError` and
    `ModelLoadError` for errors that are known by then. `start` waits until the engine is ready, and so does the first
    request.

    No method blocks the event loop: a receiver thread detokenizes, and each call waits in its own thread. Cancelling a
    call cancels the wait, not the call. Several engines may share one loop, and one engine may serve the loops of
    several threads.

    Once the engine has died, every stream and call raises `EngineDeadError`, or the error of its start. Later requests
    raise it too, unless `engine_restarts` are left: up to that many times an engine that was ready and died is replaced
    by a new one, for which later requests wait. A restart that fails counts too.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        engine_restarts: int = 0,
        tracer_provider: TracerProvider | None = None,
        **engine_options: Any,
    ) -> None:
        """tracer_provider: gets OpenTelemetry spans of every request (extra `otel`)."""
        check_restarts(engine_restarts)
        self.config = EngineConfig.from_options(model=model, **engine_options)
        self.has_request_spans = tracer_provider is not None
        observers, tracer = observers_of(tracer_provider, self.config), Tracer()
        self._tokenizer_pool = TokenizerPool(self.config, tracer)
        try:
            self._generations = EngineGenerations(
                self.config, engine_restarts, observers, tracer, on_end=_closing(self._tokenizer_pool)
            )
            # Also when dropped, and at exit.
            self._finalizer = weakref.finalize(self, self._generations.close_in_finalizer)
            self._tokenizer_pool.start()
        except BaseException:
            self._tokenizer_pool.close()
            raise
        self._metrics = EngineMetrics.of_generations(self._generations)
        self._calls = DaemonThreads("ringcore-call")

    @classmethod
    def from_engine_args(cls, engine_args: Any, **options: Any) -> Self:
        """An engine of these `EngineArgs`. options: of the constructor, besides the engine options."""
        return cls(**vars(engine_args), **options)

    async def start(self) -> EngineReady:
        return (await self._generations.opened()).client.ready

    @property
    def ready(self) -> EngineReady:
        return self._generations.check_opened().client.ready

    @property
    def is_starting(self) -> bool:
        return self._generations.is_starting

    async def wait_dead(self) -> RingcoreError | None:
        """Waits until the engine has died without a restart, and returns the cause; None once it was closed."""
        self._generations.owner.check()
        return await asyncio.wrap_future(self._generations.died)

    def get_tokenizer(self) -> Tokenizer:
        return self._front_end.tokenizer

    @property
    def _front_end(self) -> FrontEnd:
        """During a restart, that of the previous engine."""
        return self._generations.front_end or self._generations.check_opened().opened.result()

    @property
    def _inputs(self) -> InputProcessor:
        return self._front_end.inputs

    @property
    def _streams(self) -> RequestStreams:
        return self._generations.current

    @property
    def _client(self) -> EngineCoreClient:
        return self._streams.client

    async def _begin(self, prepare: Callable[[], Preparation]) -> RequestStream:
        streams = await self._generations.opened()
        streams.check_open()
        preparation = prepare()
        answer = None if preparation.job is None else await self.run_text_job(preparation.job)
        return streams.add(preparation.finish(answer))

    async def abort(self, request_id: str) -> None:
        self._streams.abort(request_id)

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._streams.unfinished_ids)

    async def _call(self, method: Callable[..., T], *args: Any) -> T:
        self._generations.owner.check()
        return await asyncio.wrap_future(self._calls.submit(partial(method, *args)))

    async def _each(self, method: Callable[[EngineCoreClient], T]) -> list[T]:
        return [await self._call(method, self._client)]

    def live_replicas(self) -> Mapping[int, EngineCalls]:
        return {0: self}

    async def replica_healths(self, timeout: float = 1.0) -> list[EngineHealth]:
        return [await self._call(self._generations.health, timeout)]

    @property
    def stats(self) -> EngineStats:
        return self._generations.stats

    def totals(self) -> ServingTotals:
        return totals_of([self._metrics])

    def metrics(self, model_name: str | None = None) -> CollectorRegistry:
        name = model_name or as_utf8(self.config.model.model)
        return make_registry_of([self._metrics], self._tokenizer_pool, name)

    def start_metrics_server(self, port: int, host: str = "127.0.0.1", model_name: str | None = None) -> MetricsServer:
        return serve_metrics(self.metrics(model_name), port, host)

    async def close(self, timeout: float | None = 0.0) -> None:
        check_timeout("timeout", timeout)
        if self._generations.owner.is_here:
            await self._call(self._generations.close, timeout)

    def shutdown(self, timeout: float | None = 0.0) -> None:
        """`close` for code outside an event loop, or at its end: it blocks."""
        check_timeout("timeout", timeout)
        self._generations.close(timeout)


def _closing(pool: TokenizerPool) -> Callable[[RingcoreError | None, RingcoreError], None]:
    return lambda _, error: pool.close(error)
