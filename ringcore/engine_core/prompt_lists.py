"""The prompts of one call, checked before any is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from ringcore.engine_core.input_processor import PreparedRequest
from ringcore.errors import InvalidRequestError, RingcoreError
from ringcore.outputs import RequestOutput
from ringcore.sampling_params import SamplingParams

__all__ = ["OnError", "Prepare", "as_conversations", "check_choice", "prepare_all", "with_index"]

OnError = Literal["raise", "return"]
Prepare = Callable[[Any, SamplingParams], PreparedRequest]


def prepare_all(
    items: list[Any],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    prepare: Prepare,
    on_error: OnError,
) -> list[PreparedRequest | RequestOutput]:
    """Each item as a request, or (with `on_error="return"`) as the output that says what is wrong with it."""
    check_choice("on_error", on_error, get_args(OnError))
    params = _params_of_each(sampling_params, len(items))
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
                raise with_index(error, index) from None
            prepared.append(_failed(item, index, with_index(error, index)))
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


def with_index(error: RingcoreError, index: int) -> RingcoreError:
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
