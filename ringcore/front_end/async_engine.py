"""AsyncEngine: an engine for asyncio. The same front end as `LLM`, with asynchronous iterators of outputs."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, RingcoreError
from ringcore.executor.rpc_call import RpcCaller, WorkerCall
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.daemon_threads import DaemonThreads
from ringcore.front_end.engine_generations import EngineGenerations
from ringcore.front_end.engine_metrics import EngineMetrics
from ringcore.front_end.front_end import FrontEnd
from ringcore.front_end.input_processor import InputProcessor, Preparation, Prompt
from ringcore.front_end.observers import observers_of
from ringcore.front_end.request_streams import RequestStream, RequestStreams
from ringcore.front_end.tokenization.text_jobs import TextAnswer, TextJob
from ringcore.host.file_names import as_utf8
from ringcore.params.field_checks import check_timeout
from ringcore.params.outputs import RequestOutput
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.messages import EngineHealth, EngineReady, MemoryReport, PauseMode, SleepMode
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.requests import EngineStats

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from ringcore.metrics.server import MetricsServer

__all__ = ["AsyncEngine", "OutputStream"]

T = TypeVar("T")


class AsyncEngine(RpcCaller):
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
        if not isinstance(engine_restarts, int) or isinstance(engine_restarts, bool) or engine_restarts < 0:
            raise ConfigError(
                f"engine_restarts={engine_restarts!r}: give an integer of at least 0",
                option="engine_restarts",
                value=repr(engine_restarts),
            )
        self.config = EngineConfig.from_options(model=model, **engine_options)
        self.has_request_spans = tracer_provider is not None
        observers = observers_of(tracer_provider, self.config)
        self._generations = EngineGenerations(self.config, engine_restarts, observers)
        self._metrics = EngineMetrics.of_generations(self._generations)
        # Also when dropped, and at exit.
        self._finalizer = weakref.finalize(self, self._generations.close_in_finalizer)
        self._calls = DaemonThreads("ringcore-call")

    async def start(self) -> EngineReady:
        """Waits until the engine is ready; raises the error that ended its start. Idempotent."""
        return (await self._generations.opened()).client.ready

    @property
    def ready(self) -> EngineReady:
        """The engine's report of its start: blocks, token capacity, memory, the seconds of each phase. Raises
        `RingcoreError` while it starts or restarts."""
        return self._generations.check_opened().client.ready

    @property
    def is_starting(self) -> bool:
        """Whether the engine starts or restarts, so that requests wait for it."""
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

    # -----------------------------------------------------------------------------------------------------------
    # Requests.

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> OutputStream:
        """Completes one prompt. The first step of the iteration sends the request, and raises `InvalidRequestError` (or
        `UnknownOptionError`) for an invalid one.

        prompt: a str, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and optionally "request_id",
            "cache_salt" and "priority"; arguments of these names take precedence. No two unfinished requests may have
            the same `request_id`.

        Yields outputs by `sampling_params.output_kind`; outputs that a slow reader has not read are merged into one.
        Leaving the loop, `aclose()` and the end of the reading task abort the request. Raises `SleepingError`,
        `WorkerError` and `EngineDeadError` when they occur.
        """
        options: dict[str, Any] = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}

        def prepare() -> Preparation:
            return self._inputs.prepare(prompt, _params(sampling_params), **options)

        return OutputStream(self, prepare)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> OutputStream:
        """Answers one conversation, rendered by the model's own chat template. Everything else is as for `generate`.

        messages: dicts with "role" and "content". tools: descriptions of functions, in the template's format.
        chat_template_kwargs: further variables for the template.
        """
        options: dict[str, Any] = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}

        def prepare() -> Preparation:
            return self._inputs.prepare_chat(
                messages,
                _params(sampling_params),
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                **options,
            )

        return OutputStream(self, prepare)

    async def _begin(self, prepare: Callable[[], Preparation]) -> RequestStream:
        streams = await self._generations.opened()
        streams.check_open()
        preparation = prepare()
        answer = None if preparation.job is None else await self.run_text_job(preparation.job)
        return streams.add(preparation.finish(answer))

    async def run_text_job(self, job: TextJob) -> TextAnswer:
        """Runs the model's chat template and tokenizer in the tokenizer process. Raises `InvalidRequestError` for a job
        that they refuse or that exceeds its deadline, and `QueueFullError`. Cancelling drops the job."""
        return await asyncio.wrap_future(self._generations.tokenizer_pool.submit(job))

    def encode_job(self, text: str, add_special_tokens: bool = True, *, return_token_texts: bool = False) -> TextJob:
        """A job that encodes a text. Raises `InvalidRequestError` for a text longer than any prompt of this model."""
        return self._inputs.encode_job(text, add_special_tokens, return_token_texts=return_token_texts)

    @property
    def num_tokenizer_jobs(self) -> int:
        """Prompts that wait for the tokenizer process, or that it encodes."""
        return self._generations.tokenizer_pool.num_jobs

    @property
    def num_tokenizer_refusals(self) -> int:
        """Prompts refused because the tokenizer's queue was full."""
        return self._generations.tokenizer_pool.num_refused

    async def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets a last output, with finish reason "abort". Ignores unknown ids."""
        self._streams.abort(request_id)

    @property
    def num_unfinished(self) -> int:
        """Requests that were sent, or queued to be sent, and have not ended."""
        return self._streams.num_unfinished

    # -----------------------------------------------------------------------------------------------------------
    # Administration. See the method of `LLM` (or `EngineCore`) of the same name.

    async def _call(self, method: Callable[..., T], *args: Any) -> T:
        self._generations.owner.check()
        return await asyncio.wrap_future(self._calls.submit(partial(method, *args)))

    async def call_workers(self, call: WorkerCall) -> Any:
        return await self._call(self._client.call_workers, call)

    async def methods(self) -> list[RpcMethod]:
        return await self._call(self._client.methods)

    async def health(self, timeout: float = 1.0) -> EngineHealth:
        """The engine's health, within about `timeout` seconds; also while it starts, does not answer, or is dead."""
        return await self._call(self._generations.health, timeout)

    @property
    def stats(self) -> EngineStats:
        """The engine's state after its last step, as last reported. Counters continue over restarts; a dead engine has
        no running or waiting requests."""
        return self._generations.stats

    def metrics(self, model_name: str | None = None) -> CollectorRegistry:
        """`LLM.metrics`. A scrape may take seconds while the engine does not answer: not in the event loop's thread."""
        return self._metrics.registry(model_name or as_utf8(self.config.model.model))

    def start_metrics_server(self, port: int, host: str = "127.0.0.1", model_name: str | None = None) -> MetricsServer:
        return self._metrics.serve(self.metrics(model_name), port, host)

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        return await self._call(self._client.reset_prefix_cache, preempt_running)

    async def pause(self, mode: PauseMode = "new") -> None:
        await self._call(self._client.pause, mode)

    async def resume(self) -> None:
        await self._call(self._client.resume)

    async def is_sleeping(self) -> bool:
        return await self._call(self._client.is_sleeping)

    async def sleep(self, level: int = 1, mode: SleepMode = "abort", timeout: float | None = None) -> MemoryReport:
        return await self._call(self._client.sleep, level, mode, timeout)

    async def wake_up(self, tags: Sequence[str] | None = None, timeout: float | None = None) -> MemoryReport:
        return await self._call(self._client.wake_up, tags, timeout)

    async def start_weight_update(self, mode: SleepMode = "keep", timeout: float | None = None) -> MemoryReport:
        return await self._call(self._client.start_weight_update, mode, timeout)

    async def update_weights(
        self, weights: str | os.PathLike[str] | Mapping[str, Any], timeout: float | None = None
    ) -> MemoryReport:
        return await self._call(self._client.update_weights, weights, timeout)

    async def finish_weight_update(self, timeout: float | None = None) -> MemoryReport:
        return await self._call(self._client.finish_weight_update, timeout)

    async def reload_weights(
        self, path: str | os.PathLike[str], mode: SleepMode = "keep", timeout: float | None = None
    ) -> MemoryReport:
        return await self._call(self._client.reload_weights, path, mode, timeout)

    # -----------------------------------------------------------------------------------------------------------
    # Shutdown.

    async def close(self, timeout: float | None = 0.0) -> None:
        """Refuses new requests, waits up to `timeout` seconds (None: without a limit) for unfinished ones, then aborts
        the rest, whose readers get a last output, and ends the engine. Idempotent; later calls raise
        `EngineDeadError`. In a process that was forked from this one it does nothing, and every other call raises
        `RingcoreError`.
        """
        check_timeout("timeout", timeout)
        if self._generations.owner.is_here:
            await self._call(self._generations.close, timeout)

    async def __aenter__(self) -> AsyncEngine:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one reader. It ends after the output that is `finished`."""

    def __init__(self, engine: AsyncEngine, prepare: Callable[[], Preparation]) -> None:
        self._engine = engine  # keeps the engine alive while the stream is read
        self._prepare = prepare
        self._stream: RequestStream | None = None
        self._is_over = self._is_reading = False

    async def __anext__(self) -> RequestOutput:
        if self._is_reading:
            raise RuntimeError("another task is reading this stream")
        if self._is_over:
            raise StopAsyncIteration
        self._is_reading = True
        try:
            if self._stream is None:
                self._stream = await self._engine._begin(self._prepare)
                if self._is_over:  # closed meanwhile
                    self._end()
            output = await self._stream.next()
            if output.error is not None:
                raise output.error
        except BaseException:  # a cancellation too
            self._end()
            raise
        finally:
            self._is_reading = False
        self._is_over = self._is_over or output.finished
        return output

    async def aclose(self) -> None:
        """Aborts the request, unless it has ended. The iteration ends, also for another task that waits in it."""
        self._end()
        if self._stream is not None:
            self._stream.wake()

    def _end(self) -> None:
        self._is_over = True
        if self._stream is not None:
            self._stream.streams.drop(self._stream)

    def __del__(self) -> None:
        if self._stream is not None and not self._is_over:
            self._end()


def _params(sampling_params: SamplingParams | None) -> SamplingParams:
    return SamplingParams() if sampling_params is None else sampling_params
