"""The prompts of one call, checked before any is sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Literal, NamedTuple, get_args

from ringcore.errors import InvalidRequestError, QueueFullError, RingcoreError
from ringcore.front_end.input_processor import Preparation, PreparedRequest
from ringcore.front_end.prompt_checks import is_integer
from ringcore.front_end.tokenization.text_jobs import TextAnswer, TextJob
from ringcore.params.field_checks import bad_field
from ringcore.params.outputs import RequestOutput
from ringcore.params.sampling_params import SamplingParams

__all__ = ["OnError", "Prepare", "as_conversations", "as_prompt_list", "check_choice", "prepare_all", "with_index"]

OnError = Literal["raise", "return"]
Prepare = Callable[[Any, SamplingParams], Preparation]
Submit = Callable[[TextJob], Future[TextAnswer]]

_MAX_SUBMITTED = 64  # prompts in flight at the tokenizer process: enough to keep it busy
_FULL_QUEUE_S = 0.05


class _Submitted(NamedTuple):
    """A prompt submitted to the tokenizer process; `answer` is None if it needs no tokenizer."""

    preparation: Preparation
    answer: Future[TextAnswer] | None

    def finish(self) -> PreparedRequest:
        return self.preparation.finish(None if self.answer is None else self.answer.result())


def prepare_all(
    items: list[Any],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    prepare: Prepare,
    submit: Submit,
    on_error: OnError,
) -> list[PreparedRequest | RequestOutput]:
    """Each item as a request, or (with `on_error="return"`) as an output with its error."""
    check_choice("on_error", on_error, get_args(OnError))
    params = _params_of_each(sampling_params, len(items))
    prepared: list[PreparedRequest | RequestOutput] = []
    taken: set[str] = set()
    for index, submitted in enumerate(_submitted(zip(items, params, strict=True), prepare, submit)):
        try:
            if isinstance(submitted, RingcoreError):
                raise submitted
            request = submitted.finish()
            if request.request_id in taken:
                raise InvalidRequestError(
                    f"request_id={request.request_id!r} occurs twice; give each prompt its own, or none",
                    field="request_id",
                    value=request.request_id,
                )
        except RingcoreError as error:
            if on_error == "raise":
                raise with_index(error, index) from None
            prepared.append(_failed(items[index], index, with_index(error, index)))
        else:
            taken.add(request.request_id)
            prepared.append(request)
    return prepared


def _submitted(
    prompts: Iterable[tuple[Any, SamplingParams]], prepare: Prepare, submit: Submit
) -> Iterator[_Submitted | RingcoreError]:
    """The prompts in their order, submitted ahead by a window of `_MAX_SUBMITTED`."""
    window: deque[_Submitted | RingcoreError] = deque()
    for item, one in prompts:
        try:
            preparation = prepare(item, one)
            answer = None if preparation.job is None else _submit(preparation.job, submit, window)
            window.append(_Submitted(preparation, answer))
        except RingcoreError as error:
            window.append(error)
        if len(window) > _MAX_SUBMITTED:
            yield window.popleft()
    yield from window


def _submit(job: TextJob, submit: Submit, window: Iterable[_Submitted | RingcoreError]) -> Future[TextAnswer]:
    """Submits a job; waits while the queue is full, since this caller blocks anyway."""
    while True:
        try:
            return submit(job)
        except QueueFullError:
            in_flight = [one.answer for one in window if isinstance(one, _Submitted) and one.answer is not None]
            wait(in_flight, timeout=_FULL_QUEUE_S, return_when=FIRST_COMPLETED)
            if all(answer.done() for answer in in_flight):  # the queue is full of other callers' prompts
                time.sleep(_FULL_QUEUE_S)


def _failed(item: Any, index: int, error: RingcoreError) -> RequestOutput:
    fields = item if isinstance(item, Mapping) else {"prompt": item}
    request_id, prompt = fields.get("request_id"), fields.get("prompt")
    return RequestOutput(
        request_id=request_id if isinstance(request_id, str) else f"prompt-{index}",
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        error=error,
    )


def with_index(error: RingcoreError, index: int) -> RingcoreError:
    return type(error)(f"prompt {index}: {error.message}", **(error.details | {"index": index}))


def _params_of_each(
    sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    if not isinstance(sampling_params, list | tuple):
        return [sampling_params] * num_prompts  # type: ignore[list-item]  # `prepare` rejects a wrong type
    if len(sampling_params) != num_prompts:
        raise InvalidRequestError(
            f"sampling_params: {len(sampling_params)} for {num_prompts} prompts; give one for all or one for each",
            field="sampling_params",
            value=len(sampling_params),
        )
    return list(sampling_params)


def as_prompt_list(prompts: Any) -> list[Any]:
    """The prompts of a call: a list of ints is one prompt of token ids, any other list is one of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        remedy = "give a str, a list of token ids, a dict, or a list of these"
        raise bad_field("prompts", type(prompts).__name__, remedy)
    if prompts and all(is_integer(item) for item in prompts):
        return [prompts]
    return list(prompts)


def as_conversations(messages: Any) -> list[Any]:
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(
            f"messages: a {type(messages).__name__}; give a list of messages, or a list of such lists",
            field="messages",
            value=type(messages).__name__,
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidRequestError(
            f"{field}={value!r}: give {' or '.join(map(repr, choices))}", field=field, value=repr(value)
        )
