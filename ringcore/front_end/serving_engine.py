"""What a service needs of what generates: one engine (`AsyncEngine`), or several alike (`ReplicaSet`)."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.config import EngineConfig
from ringcore.errors import RingcoreError
from ringcore.front_end.engine_calls import EngineCalls
from ringcore.front_end.engine_health import merged_health
from ringcore.front_end.engine_metrics import ServingTotals
from ringcore.front_end.input_processor import InputProcessor, Preparation, Prompt
from ringcore.front_end.output_stream import BegunStream, OutputStream
from ringcore.front_end.tokenization.pool import TokenizerPool
from ringcore.front_end.tokenization.text_jobs import TextAnswer, TextJob
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.messages import EngineHealth, EngineReady
from ringcore.protocol.requests import EngineStats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["ServingEngine"]


class ServingEngine(EngineCalls):
    """Prompts in, streams of outputs out, for any number of tasks at once. No method blocks the event loop.

    config: of the engine, or of the first one. has_request_spans: whether requests have OpenTelemetry spans.
    """

    config: EngineConfig
    has_request_spans: bool
    _tokenizer_pool: TokenizerPool

    # -----------------------------------------------------------------------------------------------------------
    # Life.

    @abstractmethod
    async def start(self) -> EngineReady:
        """Waits until it is ready; raises the error that ended the start. Idempotent."""

    @property
    @abstractmethod
    def ready(self) -> EngineReady:
        """The report of the start: blocks, token capacity, memory, the seconds of each phase. Raises `RingcoreError`
        while nothing is ready."""

    @property
    @abstractmethod
    def is_starting(self) -> bool:
        """Whether requests would wait, for an engine that starts or restarts."""

    @abstractmethod
    async def wait_dead(self) -> RingcoreError | None:
        """Waits until nothing is left that could answer, and returns the cause; None once it was closed."""

    @abstractmethod
    async def close(self, timeout: float | None = 0.0) -> None:
        """Refuses new requests, waits up to `timeout` seconds (None: without a limit) for unfinished ones, then aborts
        the rest, whose readers get a last output, and ends the engine. Idempotent; later calls raise
        `EngineDeadError`. In a process that was forked from this one it does nothing, and every other call raises
        `RingcoreError`.
        """

    async def __aenter__(self) -> Self:
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

    # -----------------------------------------------------------------------------------------------------------
    # Requests.

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> OutputStream:
        """Completes one prompt. The first step of the iteration sends the request, and raises `InvalidRequestError` (or
        `UnknownOptionError`) for an invalid one.

        prompt: a str, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and optionally "request_id",
            "cache_salt" and "priority"; arguments of these names take precedence. Also "truncate_prompt_tokens" and
            "add_special_tokens", as for `LLM.generate`. No two unfinished requests may have
            the same `request_id`.

        Yields outputs by `sampling_params.output_kind`; outputs that a slow reader has not read are merged into one.
        Leaving the loop, `aclose()` and the end of the reading task abort the request. Raises `SleepingError`,
        `WorkerError` and `EngineDeadError` when they occur.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        options: dict[str, Any] = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}

        def prepare() -> Preparation:
            return self._inputs.prepare(prompt, params, **options)

        return OutputStream(partial(self._begin, prepare))

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
        continue_final_message: bool = False,
        chat_template: str | None = None,
        add_special_tokens: bool = False,
        truncate_prompt_tokens: int | None = None,
    ) -> OutputStream:
        """Answers one conversation, rendered by the model's own chat template. Everything else is as for `generate`.

        messages: dicts with "role" and "content". tools: descriptions of functions, in the template's format.
        chat_template_kwargs: further variables for the template. continue_final_message: the answer goes on with the
        final message; needs `add_generation_prompt=False`. chat_template: the text of a jinja template, instead of the
        model's own. add_special_tokens: besides those that the template writes.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        options: dict[str, Any] = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}

        def prepare() -> Preparation:
            return self._inputs.prepare_chat(
                messages,
                params,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                add_special_tokens=add_special_tokens,
                truncate_prompt_tokens=truncate_prompt_tokens,
                **options,
            )

        return OutputStream(partial(self._begin, prepare))

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a call that gives none: of the model's generation_config.json, by the option `generation_config`."""
        return SamplingParams(**self.config.model.sampling_defaults)

    @abstractmethod
    async def _begin(self, prepare: Callable[[], Preparation]) -> BegunStream:
        """Sends the request that `prepare` checks, once an engine is ready."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets a last output, with finish reason "abort". Ignores unknown ids."""

    @property
    @abstractmethod
    def unfinished_ids(self) -> list[str]:
        """Of requests that were sent, or queued to be sent, and have not ended."""

    @property
    def num_unfinished(self) -> int:
        return len(self.unfinished_ids)

    # -----------------------------------------------------------------------------------------------------------
    # Text.

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer: ...

    @property
    @abstractmethod
    def _inputs(self) -> InputProcessor:
        """Raises `RingcoreError` before anything is ready."""

    async def run_text_job(self, job: TextJob) -> TextAnswer:
        """Runs the model's chat template and tokenizer in the tokenizer process. Raises `InvalidRequestError` for a job
        that they refuse or that exceeds its deadline, and `QueueFullError`. Cancelling drops the job."""
        return await asyncio.wrap_future(self._tokenizer_pool.submit(job))

    def encode_job(self, text: str, add_special_tokens: bool = True, *, return_token_texts: bool = False) -> TextJob:
        """A job that encodes a text. Raises `InvalidRequestError` for a text longer than any prompt of this model."""
        return self._inputs.encode_job(text, add_special_tokens, return_token_texts=return_token_texts)

    @property
    def num_tokenizer_jobs(self) -> int:
        """Prompts that wait for the tokenizer process, or that it encodes."""
        return self._tokenizer_pool.num_jobs

    @property
    def num_tokenizer_refusals(self) -> int:
        """Prompts refused because the tokenizer's queue was full."""
        return self._tokenizer_pool.num_refused

    # -----------------------------------------------------------------------------------------------------------
    # State.

    @abstractmethod
    def live_replicas(self) -> Mapping[int, EngineCalls]:
        """The calls of each engine alone, by its number, without those that are lost; of all once all are."""

    @abstractmethod
    async def replica_healths(self, timeout: float = 1.0) -> list[EngineHealth]:
        """The health of each engine, within about `timeout` seconds; also while it starts, does not answer, or is
        dead."""

    async def health(self, timeout: float = 1.0) -> EngineHealth:
        """`replica_healths` as one: ready as soon as one engine is, dead once all are."""
        return merged_health(await self.replica_healths(timeout))

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """The state after the last step, as last reported. Counters continue over restarts; a dead engine has no
        running or waiting requests."""

    @abstractmethod
    def totals(self) -> ServingTotals:
        """What all engines have computed since the first call, as far as their requests have sent it."""

    @abstractmethod
    def metrics(self, model_name: str | None = None) -> CollectorRegistry:
        """`LLM.metrics`. A scrape may take seconds while an engine does not answer: not in the event loop's thread."""
