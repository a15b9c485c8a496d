"""LLM: prompts in, texts out. The thin front end of an engine in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

from ringcore.config import EngineConfig
from ringcore.engine_core.client import EngineCoreClient
from ringcore.engine_core.input_processor import InputProcessor, PreparedRequest, Prompt, as_prompt_list
from ringcore.engine_core.memory_methods import MemoryMethods
from ringcore.engine_core.output_processor import OutputProcessor
from ringcore.errors import InvalidRequestError, RingcoreError
from ringcore.outputs import RequestOutput
from ringcore.protocol import EngineHealth, EngineReady, MemoryReport
from ringcore.sampling_params import SamplingParams
from ringcore.tokenizer import Tokenizer, load_tokenizer

__all__ = ["LLM"]

Message = Mapping[str, Any]
OnError = Literal["raise", "return"]
Prepare = Callable[[Any, SamplingParams], PreparedRequest]

_REFRESH_S = 0.5


class LLM(MemoryMethods):
    """A model ready to generate. Keywords are the engine options (`EngineConfig.options()`).

        with LLM("path/to/model", dtype="float32") as llm:
            for output in llm.generate(["Water boils at", "The sky is"], SamplingParams(temperature=0)):
                print(output.outputs[0].text)

    Raises at construction, before any process starts, `UnknownOptionError`, `ConfigError` and `ModelLoadError`
    for what can be known then; and whatever stopped the engine's start-up: `ModelLoadError`, `CapacityError`,
    `EngineDeadError`. Dropping it, or leaving the script, ends the engine too. No `__main__` guard is needed.

    Thread-safe: `generate` and `chat` take turns, the other calls do not wait for them.
    """

    def __init__(self, model: str | os.PathLike[str], **engine_options: Any) -> None:
        self.config = EngineConfig.from_options(model=model, **engine_options)
        self._generating = threading.Lock()
        self._client = EngineCoreClient(self.config)
        try:
            # While the engine process starts and loads the weights.
            self._tokenizer = load_tokenizer(self.config.model.tokenizer or self.config.model.files)
            self._outputs = OutputProcessor(self._tokenizer)
            ready = self._client.wait_ready()
            self._inputs = InputProcessor(self.config, self._tokenizer, ready.max_model_len)
        except BaseException:
            self._client.close()
            raise

    # -----------------------------------------------------------------------------------------------------------
    # Generating.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Completes prompts; one output a prompt, in their order.

        prompts: a str, a list of token ids (a list of ints is one prompt), a dict with "prompt" or
            "prompt_token_ids" and optionally "request_id", "cache_salt" and "priority", or a list of these.
        sampling_params: one for all, or a list with one for each; None means `SamplingParams()`.
        use_tqdm: a progress bar on stderr.
        on_error: "raise" checks every prompt before any is sent, and raises a later error once the others are
            done; "return" gives a wrong prompt an output with `error` set, in its place.

        Raises `InvalidRequestError` (or `UnknownOptionError`) whose details name the prompt's `index`, and
        `EngineDeadError`.
        """
        return self._generate(as_prompt_list(prompts), self._inputs.process, sampling_params, use_tqdm, on_error)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers conversations, written out by the model's own chat template.

        messages: one conversation (a list of dicts with "role" and "content"), or a list of conversations.
        Everything else is as for `generate`.
        """

        def prepare(conversation: Any, params: SamplingParams) -> PreparedRequest:
            token_ids = self._tokenizer.apply_chat_template(conversation, add_generation_prompt)
            return self._inputs.process(token_ids, params)

        return self._generate(_as_conversations(messages), prepare, sampling_params, use_tqdm, on_error)

    def _generate(
        self,
        items: list[Any],
        prepare: Prepare,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        on_error: OnError,
    ) -> list[RequestOutput]:
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(
                f"on_error={on_error!r}: give 'raise' or 'return'", field="on_error", value=on_error
            )
        prepared = _prepare_all(items, _params_of_each(sampling_params, len(items)), prepare, on_error)
        with self._generating:
            outputs = self._run([p for p in prepared if isinstance(p, PreparedRequest)], use_tqdm)
        results = [p if isinstance(p, RequestOutput) else outputs[p.request.request_id] for p in prepared]
        if on_error == "raise":
            for index, result in enumerate(results):
                if result.error is not None:
                    raise _with_index(result.error, index)
        return results

    def _run(self, prepared: list[PreparedRequest], use_tqdm: bool) -> dict[str, RequestOutput]:
        """Generates until every request is finished; outputs by the engine's request ids."""
        results: dict[str, RequestOutput] = {}
        try:
            for one in prepared:
                self._outputs.add_request(one.request, request_id=one.request_id, prompt=one.prompt)
            self._client.add_requests([one.request for one in prepared])
            with _progress(len(prepared), use_tqdm) as progress:
                while self._outputs.has_unfinished:
                    processed = self._outputs.process(self._client.get_outputs().outputs)
                    if processed.abort_ids:
                        self._client.abort(processed.abort_ids)
                    results |= processed.finished
                    progress(len(processed.finished), processed.num_new_tokens)
        except BaseException:  # Ctrl-C too: the engine stays usable
            self._drop_unfinished()
            raise
        return results

    def _drop_unfinished(self) -> None:
        unfinished = self._outputs.unfinished_ids
        self._outputs.forget(unfinished)
        try:
            self._client.abort(unfinished)
        except RingcoreError:
            return  # the engine is dead, and its requests with it

    # -----------------------------------------------------------------------------------------------------------
    # Administration.

    @property
    def ready(self) -> EngineReady:
        """What the engine learned at start: blocks, token capacity, memory, the seconds of each phase."""
        return self._client.ready

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Calls an `@rpc` method on every worker; one value a rank, in rank order, or `unique_reply_rank`'s alone.

        method: a name; or, with the option `allow_callables`, a function that each worker calls as
        f(worker, *args, **kwargs).

        Raises `WorkerError` if it raised there, `RpcTimeoutError` after `timeout` seconds, `InvalidRequestError` for
        what cannot be sent; the engine goes on.
        """
        return self._client.collective_rpc(method, args, kwargs, timeout, unique_reply_rank)

    def health(self, timeout: float = 1.0) -> EngineHealth:
        """How the engine and its workers do, within about `timeout` seconds; also of one that is silent or dead."""
        return self._client.health(timeout)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forgets all cached prefixes. False, and nothing changed, while a request is running."""
        return self._client.reset_prefix_cache(preempt_running)

    def is_sleeping(self) -> bool:
        return self._client.is_sleeping()

    def _operate(self, name: str, kwargs: Mapping[str, Any], timeout: float | None) -> MemoryReport:
        return self._client._operate(name, kwargs, timeout)

    def close(self) -> None:
        """Ends the engine and its workers. Idempotent; every later call raises `EngineDeadError`."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------------------
# Before anything is sent.


def _prepare_all(
    items: list[Any], params: list[SamplingParams], prepare: Prepare, on_error: OnError
) -> list[PreparedRequest | RequestOutput]:
    """Each item as a request, or (with `on_error="return"`) as the output that says what is wrong with it."""
    prepared: list[PreparedRequest | RequestOutput] = []
    taken: set[str] = set()
    for index, (item, one) in enumerate(zip(items, params, strict=True)):
        try:
            request = prepare(item, one)
            if request.request_id in taken:
                raise InvalidRequestError(
                    f"request_id={request.request_id!r} is there twice; give each prompt its own, or none",
                    field="request_id",
                    value=request.request_id,
                )
        except RingcoreError as error:
            if on_error == "raise":
                raise _with_index(error, index) from None
            prepared.append(_failed(item, index, _with_index(error, index)))
        else:
            taken.add(request.request_id)
            prepared.append(request)
    return prepared


def _failed(item: Any, index: int, error: RingcoreError) -> RequestOutput:
    fields = item if isinstance(item, Mapping) else {"prompt": item}
    request_id, prompt = fields.get("request_id"), fields.get("prompt")
    return RequestOutput(
        request_id=request_id if isinstance(request_id, str) else f"prompt-{index}",
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        error=error,
    )


def _with_index(error: RingcoreError, index: int) -> RingcoreError:
    return type(error)(f"prompt {index}: {error.message}", **(error.details | {"index": index}))


def _params_of_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if not isinstance(sampling_params, list | tuple):
        return [sampling_params] * num_prompts  # type: ignore[list-item]  # one of a wrong type is refused by each prompt
    if len(sampling_params) != num_prompts:
        raise InvalidRequestError(
            f"sampling_params: {len(sampling_params)} for {num_prompts} prompts; give one for all or one for each",
            field="sampling_params",
            value=len(sampling_params),
        )
    return list(sampling_params)


def _as_conversations(messages: Any) -> list[Any]:
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(
            f"messages: a {type(messages).__name__}; give a list of messages, or a list of such lists",
            field="messages",
            value=type(messages).__name__,
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


@contextmanager
def _progress(num_prompts: int, use_tqdm: bool) -> Iterator[Callable[[int, int], None]]:
    """A function that is told of each message: how many prompts it finished, and how many new tokens it had."""
    if not use_tqdm:
        yield lambda num_finished, num_new_tokens: None
        return
    from tqdm import tqdm

    with tqdm(total=num_prompts, desc="prompts", unit="prompt", dynamic_ncols=True, smoothing=0) as bar:
        started = shown = time.monotonic()
        num_tokens = 0

        def advance(num_finished: int, num_new_tokens: int) -> None:
            nonlocal num_tokens, shown
            num_tokens += num_new_tokens
            now = time.monotonic()
            if num_finished or now - shown > _REFRESH_S:  # tokens come, even where no prompt is finished
                bar.set_postfix_str(f"{num_tokens / max(now - started, 1e-9):.0f} output tokens/s")
                bar.update(num_finished)
                shown = now

        yield advance
