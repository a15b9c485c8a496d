"""LLM: prompts in, texts out. The blocking front end of an engine process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.config import EngineConfig
from ringcore.engine_core.memory.methods import MemoryMethods
from ringcore.errors import InvalidRequestError
from ringcore.executor.rpc_call import RpcCaller, WorkerCall
from ringcore.front_end.embeddings import embedding_of, pooling_params
from ringcore.front_end.engine_metrics import EngineMetrics, make_registry_of, serve_metrics
from ringcore.front_end.front_end import FrontEnd, start_engine
from ringcore.front_end.input_processor import PreparedRequest, Prompt
from ringcore.front_end.observers import observers_of
from ringcore.front_end.progress import progress_bar
from ringcore.front_end.prompt_lists import (
    OnError,
    Prepare,
    as_conversations,
    as_prompt_list,
    check_choice,
    prepare_all,
    with_index,
)
from ringcore.front_end.tokenization.pool import TokenizerPool
from ringcore.host.file_names import as_utf8
from ringcore.host.owner_process import OwnerProcess
from ringcore.params.outputs import RequestOutput
from ringcore.params.sampling_params import OutputKind, Pooling, SamplingParams
from ringcore.params.vllm_api import LLM_METHODS
from ringcore.protocol.messages import EngineHealth, EngineReady, MemoryReport
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.operations import MemoryOperation
from ringcore.tracing import Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from ringcore.metrics.server import MetricsServer

__all__ = ["LLM"]

Message = Mapping[str, Any]


class LLM(RpcCaller, MemoryMethods):
    """A model ready to generate. Keywords are the engine options (`EngineConfig.options()`).

        with LLM("path/to/model", dtype="float32") as llm:
            for output in llm.generate(["Water boils at", "The sky is"], SamplingParams(temperature=0)):
                print(output.outputs[0].text)

    The constructor raises, before the engine starts, `UnknownOptionError`, `ConfigError` and `ModelLoadError` for
    errors that are known by then; and the error of a failed start-up: `ModelLoadError`, `CapacityError`,
    `EngineDeadError`. Dropping it, or leaving the script, ends the engine too. No `__main__` guard is needed.

    Thread-safe: `generate`, `chat` and `stream` exclude each other, the other calls do not wait for them. In a process
    that was forked from this one every call raises `RingcoreError`, except `close`, which does nothing.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, tracer_provider: TracerProvider | None = None, **engine_options: Any
    ) -> None:
        """tracer_provider: gets OpenTelemetry spans of every request (extra `otel`)."""
        self.config = EngineConfig.from_options(model=model, **engine_options)
        tracer, self._observers = Tracer(), observers_of(tracer_provider, self.config)
        self._client = start_engine(self.config, tracer, self._observers)
        self._caller_lock = _CallerLock(self._client.owner)
        self._tokenizer_pool = TokenizerPool(self.config, tracer)
        self._finalizer = weakref.finalize(self, self._tokenizer_pool.close)  # also when dropped, and at exit
        self._metrics = EngineMetrics(self.config, self._observers, weakref.ref(self._client))
        try:
            self._tokenizer_pool.start()
            self._front_end = FrontEnd(self.config, self._client)
        except BaseException:  # whose traceback may keep this object for long
            self.close()
            raise

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        return cls(**vars(engine_args))

    if not TYPE_CHECKING:  # to which it would be any attribute

        def __getattr__(self, name: str) -> Any:
            """Of what there is not."""
            told = f": {LLM_METHODS[name]}" if name in LLM_METHODS else ""
            raise AttributeError(f"LLM has no {name!r}{told}", name=name, obj=self)

    # -----------------------------------------------------------------------------------------------------------
    # Generating.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Completes prompts; one output per prompt, in their order.

        prompts: a str, a list of token ids (a list of ints is one prompt), a dict with "prompt", "prompt_token_ids" or
            "messages" (a conversation) and optionally "request_id", "cache_salt", "priority", "truncate_prompt_tokens"
            (how many tokens are kept, the last ones; -1: as many as leave room for max_tokens) and
            "add_special_tokens" (False: none), or a list of these.
        sampling_params: one for all, or a list with one for each; None means
            `get_default_sampling_params()`.
        use_tqdm: a progress bar on stderr.
        on_error: "raise" checks every prompt before any is sent, and raises a later error once the others are
            done; "return" returns for an invalid prompt an output with `error` set, in its place.

        Raises `InvalidRequestError` (or `UnknownOptionError`) whose details name the prompt's `index`, and
        `EngineDeadError`.
        """
        prepare = self._front_end.inputs.prepare
        return self._generate(as_prompt_list(prompts), prepare, sampling_params, use_tqdm, on_error)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, rendered by the model's own chat template.

        messages: one conversation (a list of dicts with "role" and "content"), or a list of conversations.
        tools: descriptions of functions, in the template's format. The answers are the model's raw text;
            `ringcore.chat` parses tool calls and reasoning out of it.
        chat_template_kwargs: further variables for the template.
        continue_final_message: the answer goes on with the final message; needs `add_generation_prompt=False`.
        chat_template: the text of a jinja template, instead of the model's own.
        Everything else is as for `generate`.
        """

        prepare = partial(
            self._front_end.inputs.prepare_chat,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
        )
        return self._generate(as_conversations(messages), prepare, sampling_params, use_tqdm, on_error)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling = "last",
        normalize: bool = True,
        use_tqdm: bool = False,
    ) -> list[np.ndarray]:
        """The hidden states of each prompt after the final norm, pooled: [hidden_size] float32, of length 1 if
        `normalize`.

        pooling: "last" token, or "mean" over all of them; what the model was trained for. A prompt may be as long as
            one that is to get a token. Raises what `generate` raises.
        """
        outputs = self.generate(prompts, pooling_params(pooling), use_tqdm)
        return [embedding_of(output, normalize) for output in outputs]

    def _generate(
        self,
        items: list[Any],
        prepare: Prepare,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        on_error: OnError,
    ) -> list[RequestOutput]:
        self._client.owner.check()
        prepared = self._prepare_all(items, sampling_params, prepare, on_error)
        with self._caller_lock:
            outputs = iter(self._run([p for p in prepared if isinstance(p, PreparedRequest)], use_tqdm))
        results = [p if isinstance(p, RequestOutput) else next(outputs) for p in prepared]
        if on_error == "raise":
            for index, result in enumerate(results):
                if result.error is not None:
                    raise with_index(result.error, index)
        return results

    def _prepare_all(
        self,
        items: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        prepare: Prepare,
        on_error: OnError,
    ) -> list[PreparedRequest | RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return prepare_all(items, sampling_params, prepare, self._tokenizer_pool.submit, on_error)

    def _run(self, prepared: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Generates until every request is finished; final outputs, in the order of the requests."""
        front_end = self._front_end
        try:
            states = front_end.add(prepared, "final")
            with progress_bar(len(prepared), use_tqdm) as progress:
                while front_end.outputs.has_unfinished:
                    processed = front_end.receive_and_abort()
                    progress(len(processed.changed), processed.num_new_tokens)
        except BaseException:  # Ctrl-C too: the engine stays usable
            front_end.drop_unfinished()
            raise
        return [state.take_last() for state in states]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        by: Literal["request", "token"] = "request",
        on_error: OnError = "raise",
    ) -> Iterator[RequestOutput]:
        """Completes prompts, and yields outputs as they arrive.

        by: "request" yields each prompt's final output when it is finished; "token" yields every output of every
            prompt, by its `SamplingParams.output_kind`. `request_id` and `prompt` identify the prompt.
        prompts, sampling_params, on_error: as for `generate`; "raise" raises an error after all outputs.

        Leaving the iteration aborts the unfinished requests. `generate`, `chat` and other streams wait until then; in
        the same thread they raise `InvalidRequestError`. Raises at once the errors that `generate` raises before
        anything is sent.
        """
        self._client.owner.check()
        check_choice("by", by, ("request", "token"))
        prepare = self._front_end.inputs.prepare
        prepared = self._prepare_all(as_prompt_list(prompts), sampling_params, prepare, on_error)
        return self._stream(prepared, "final" if by == "request" else None, on_error)

    def _stream(
        self, prepared: list[PreparedRequest | RequestOutput], kind: OutputKind | None, on_error: OnError
    ) -> Iterator[RequestOutput]:
        front_end, failed = self._front_end, None
        yield from (one for one in prepared if isinstance(one, RequestOutput))
        with self._caller_lock:
            try:
                states = front_end.add([one for one in prepared if isinstance(one, PreparedRequest)], kind)
                while front_end.outputs.has_unfinished:
                    for state in front_end.receive_and_abort().changed:
                        output = state.take()
                        if output is None:
                            continue
                        if output.error is not None and on_error == "raise":
                            failed = failed or with_index(output.error, states.index(state))
                        else:
                            yield output
            finally:
                front_end.drop_unfinished()
        if failed is not None:
            raise failed

    # -----------------------------------------------------------------------------------------------------------
    # Administration.

    @property
    def ready(self) -> EngineReady:
        """The engine's report of its start: blocks, token capacity, memory, the seconds of each phase."""
        return self._client.ready

    def metrics(self, model_name: str | None = None) -> CollectorRegistry:
        """A registry of Prometheus metrics, under vLLM's names where it has them; counted from the first call on.

        model_name: their label; default: the `model` option. Raises `ConfigError` without `ringcore[metrics]`.
        """
        return make_registry_of([self._metrics], self._tokenizer_pool, model_name or as_utf8(self.config.model.model))

    def start_metrics_server(self, port: int, host: str = "127.0.0.1", model_name: str | None = None) -> MetricsServer:
        """Serves `metrics` at http://host:port/metrics until it is closed. It does not keep the engine alive."""
        return serve_metrics(self.metrics(model_name), port, host)

    def get_tokenizer(self) -> Tokenizer:
        return self._front_end.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a call that gives none: of the model's generation_config.json, by the option `generation_config`.
        `dataclasses.replace` changes some of them."""
        return SamplingParams(**self.config.model.sampling_defaults)

    def call_workers(self, call: WorkerCall) -> Any:
        return self._client.call_workers(call)

    def methods(self) -> list[RpcMethod]:
        """The methods that can be called by name: those of the workers (`collective_rpc`) with their extension, and the
        engine's own; each with its signature and description."""
        return self._client.methods()

    def health(self, timeout: float = 1.0) -> EngineHealth:
        """The health of the engine and its workers, within about `timeout` seconds; also if it is silent or dead."""
        return self._client.health(timeout)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Evicts the whole prefix cache. Returns False and changes nothing while requests run, unless `preempt_running`
        preempts them (by recompute)."""
        return self._client.reset_prefix_cache(preempt_running)

    def is_sleeping(self) -> bool:
        return self._client.is_sleeping()

    def _operate(self, operation: MemoryOperation, timeout: float | None) -> MemoryReport:
        return self._client._operate(operation, timeout)

    def close(self) -> None:
        """Ends the engine and its workers. Idempotent; every later call raises `EngineDeadError`."""
        self._client.close()
        self._finalizer()
        for observer in self._observers:
            observer.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _CallerLock:
    """A lock for one caller at a time. It raises in a thread that would wait for itself, and in a forked process."""

    def __init__(self, owner: OwnerProcess) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        self._owner.check()
        if self._holder == threading.get_ident():
            raise InvalidRequestError(
                "this thread has an unfinished stream; read it to its end or close() it first",
                field="prompts",
                value=None,
            )
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._holder = None
        self._lock.release()
