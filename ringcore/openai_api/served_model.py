"""What all completions need: an engine, its names and bounds, and the loop that consumes a prompt's outputs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from ringcore.chat import choose_format
from ringcore.errors import InvalidRequestError, UnknownOptionError
from ringcore.front_end.output_stream import OutputStream
from ringcore.front_end.serving_engine import ServingEngine
from ringcore.openai_api.answers import PromptTokensDetails, UsageInfo
from ringcore.openai_api.conversations import Message, text_messages
from ringcore.openai_api.errors import ApiError
from ringcore.openai_api.request_fields import ExtraFields
from ringcore.openai_api.structured import name_field
from ringcore.params.outputs import CompletionOutput, RequestOutput

__all__ = ["Answer", "Emit", "ServedModel", "all_of", "changed_completions", "unix_seconds"]

Emit = Callable[[Any], Awaitable[None]]  # sends one event: a value that is encoded as JSON
Observe = Callable[[RequestOutput], None]


class ServedModel:
    """An engine, by the names that a request may ask for, with the bounds of a request.

    names: a response has the first one. max_n: the most completions of a prompt. tool_call_parser, reasoning_parser:
    see `choose_format`. is_strict: unknown fields of a request are refused. takes_chat_templates: a request may bring
    one. observe: called with each output of a prompt, before it is used; what it raises ends the prompt.
    """

    def __init__(
        self,
        engine: ServingEngine,
        *,
        names: Sequence[str],
        max_n: int,
        tool_call_parser: str | None,
        reasoning_parser: str | None,
        is_strict: bool = True,
        takes_chat_templates: bool = False,
        observe: Observe | None = None,
    ) -> None:
        self.engine, self.names = engine, names
        self.sampling_defaults = engine.config.model.sampling_defaults
        self.max_model_len = engine.ready.max_model_len
        chat_template = engine.get_tokenizer().chat_template
        self.chat_format = choose_format(chat_template, tool_call_parser, reasoning_parser)
        self._template_format = choose_format(chat_template)
        self._max_n, self._observe = max_n, observe
        self._extra_fields = ExtraFields(is_strict=is_strict)
        self._takes_chat_templates = takes_chat_templates

    def observed_by(self, observe: Observe) -> ServedModel:
        """The same model, for requests that something else follows."""
        other = copy.copy(self)
        other._observe = observe
        return other

    def name(self, asked: str | None) -> str:
        """The model's name in a response. Raises 404 for a model that is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            message = f"the model {asked!r} is not served; give one of: {', '.join(self.names)}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return asked

    def template_messages(self, messages: list[Message]) -> list[Message]:
        """The messages as the model's chat template expects them. Raises `InvalidRequestError`.

        Each has at least one token, so there cannot be more than max_model_len; checked first, since 100,000 messages
        would block the event loop for a third of a second."""
        if len(messages) > self.max_model_len:
            raise InvalidRequestError(
                f"messages: there are {len(messages)}, and max_model_len is {self.max_model_len} tokens; send fewer",
                field="messages",
                value=len(messages),
            )
        return text_messages(messages, self._template_format)

    def check_fields(self, body: BaseModel) -> None:
        """Raises `InvalidRequestError` (or `UnknownOptionError`) for a field that is not served."""
        self._extra_fields.check(body.model_extra or {}, type(body).model_fields)

    def check_chat_template(self, chat_template: str | None) -> None:
        if chat_template is not None and not self._takes_chat_templates:
            raise InvalidRequestError(
                "chat_template: requests bring none here; leave it out, or start the service with "
                "--trust-request-chat-template",
                field="chat_template",
            )

    def check_n(self, n: int) -> None:
        _check_bounds("n", n, 1, self._max_n, "max_n")

    def check_logprobs(self, field: str, num_logprobs: int | None) -> None:
        """-1, the whole vocabulary, is allowed only if the engine's max_logprobs is unlimited."""
        limit = self.engine.config.scheduler.max_logprobs
        if num_logprobs is not None and limit >= 0:
            _check_bounds(field, num_logprobs, 0, limit, "max_logprobs")

    async def consume(
        self,
        outputs: OutputStream,
        take: Callable[[RequestOutput], Awaitable[None]],
        form_field: str | None = None,
    ) -> None:
        """Passes each output of one prompt to `take`; raises the request's error. Cancellation aborts the request in
        the engine. form_field: the client's field that requires the structured outputs."""
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if self._observe is not None:
                        self._observe(output)
                    await take(output)
        except UnknownOptionError:
            raise
        except InvalidRequestError as error:
            raise name_field(error, form_field) from error


@dataclass(slots=True)
class Answer:
    """The id, time and model of one response, and its token counts so far."""

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, prefix: str, model: str, answer_id: str | None = None, request_id: str | None = None) -> Answer:
        """answer_id: the whole id; request_id: what comes after the prefix, as a client wants it."""
        return cls(answer_id or f"{prefix}-{request_id or uuid4().hex}", unix_seconds(), model)

    def count_prompt(self, output: RequestOutput) -> None:
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens

    def count_completions(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    def usage(self) -> UsageInfo:
        return UsageInfo(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )


def changed_completions(
    output: RequestOutput, finished: set[int], *, sends_token_ids: bool = False
) -> list[CompletionOutput]:
    """The completions of a delta output that have something to send. `finished`: those whose end was sent."""
    changed = []
    for completion in output.outputs:
        if completion.index in finished:
            continue
        if completion.finish_reason is not None:
            finished.add(completion.index)
        elif not completion.text and not completion.logprobs and not (sends_token_ids and completion.token_ids):
            continue  # for example a token that is part of a character
        changed.append(completion)
    return changed


async def all_of(works: list[Coroutine[Any, Any, None]]) -> None:
    """Runs all concurrently; the first failure cancels the others and is raised."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _check_bounds(field: str, value: int, low: int, high: int, option: str) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(
            f"{field}={value}: give an integer from {low} to {high}, or raise {option} of the service",
            field=field,
            value=value,
        )


def unix_seconds() -> int:
    """Wall-clock time for display; durations use the monotonic clock."""
    return int(datetime.now(UTC).timestamp())
