"""Responses: the answer to one body, whole or as events."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from uuid import uuid4

import msgspec

from ringcore import chat
from ringcore.errors import InvalidRequestError
from ringcore.openai_api.chat_generation import ChatGeneration, TakeEvents
from ringcore.openai_api.errors import ApiError, fields_named
from ringcore.openai_api.responses.answers import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from ringcore.openai_api.responses.conversation import CLIENT_NAMES, conversation, read_items
from ringcore.openai_api.responses.output_items import OutputItems
from ringcore.openai_api.responses.schema import ResponsesRequest
from ringcore.openai_api.responses.store import ResponseStore, StoredResponse
from ringcore.openai_api.served_model import Answer, Emit, ServedModel
from ringcore.params.outputs import CompletionOutput, RequestOutput
from ringcore.params.sampling_params import OutputKind, SamplingParams

__all__ = ["Responses"]

_ERROR_CODES: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "invalid_prompt",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded",
}


class Responses:
    """One body: a conversation whose next items are the answer. Raises `InvalidRequestError` and `ApiError`.

    store: has the conversation before it, and gets this one. answer_id: of the response, and so of the engine's
    request; None makes one. seed: of its tokens, which a body of this API cannot give.
    """

    num_prompts = n = 1

    def __init__(
        self,
        model: ServedModel,
        body: ResponsesRequest,
        store: ResponseStore,
        answer_id: str | None = None,
        seed: int | None = None,
    ) -> None:
        model.check_fields(body)
        self._body, self._store, self._seed = body, store, seed
        self._answer = Answer.of("resp", model.name(body.model), answer_id or f"resp_{uuid4().hex}")
        self._messages = read_items(body, store)
        with fields_named(CLIENT_NAMES):
            asked = conversation(body, self._messages, self._params(model.sampling_defaults))
            self._generation = ChatGeneration(model, asked)
        self._output = OutputItems(can_retract=not body.stream)
        self._num_events = 0
        self._check_echo()

    def _check_echo(self) -> None:
        """A response repeats its request's tools and format, and its conversation may be stored. Raises
        `InvalidRequestError` for what is no JSON: halves of surrogate pairs, too deep schemas."""
        for field, said in (("tools", self._response("in_progress", [])), ("input", self._messages.items)):
            try:
                msgspec.json.encode(said)
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(f"{field}: it cannot be written as JSON: {error}", field=field) from error

    def _params(self, defaults: dict[str, Any]) -> SamplingParams:
        """defaults: the model's sampling parameters."""
        body = self._body
        kind: OutputKind = "delta" if body.stream else "final"
        asked = {"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
        given = {name: value for name, value in asked.items() if value is not None}
        return SamplingParams(output_kind=kind, seed=self._seed, **{"max_tokens": None, **defaults, **given})

    async def whole(self) -> ResponseObject:
        async def take(output: RequestOutput, _: CompletionOutput, events: list[chat.ChatEvent]) -> None:
            self._answer.count_prompt(output)
            self._answer.count_completions(output)
            for event in events:
                self._output.add(event)

        reason = await self._run(take)
        self._output.end("incomplete" if reason == "length" else "completed")
        return self._finished(reason)

    async def stream(self, emit: Emit) -> None:
        async def tell(events: list[dict[str, Any]]) -> None:
            for event in events:
                await emit(self._numbered(event))

        async def take(output: RequestOutput, _: CompletionOutput, events: list[chat.ChatEvent]) -> None:
            if self._num_events == 0:
                self._answer.count_prompt(output)
                begun = self._response("in_progress", [])
                await tell([{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")])
            self._answer.count_completions(output)
            for event in events:
                await tell(self._output.add(event))

        reason = await self._run(take)
        await tell(self._output.end("incomplete" if reason == "length" else "completed"))
        response = self._finished(reason)
        await tell([{"type": f"response.{response['status']}", "response": response}])

    async def _run(self, take: TakeEvents) -> str:
        with fields_named(CLIENT_NAMES):
            return await self._generation.run_one(self._answer.id, take)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that an error ends."""
        response = self._response("failed", self._output.items)
        response["error"] = ResponseError(code=_ERROR_CODES.get(error.status, "server_error"), message=error.message)
        return self._numbered({"type": "response.failed", "response": response})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return event

    def _finished(self, reason: str) -> ResponseObject:
        """The whole response, which is stored before its client knows its end."""
        response = self._response("incomplete" if reason == "length" else "completed", self._output.items)
        response["usage"] = self._usage()
        if reason == "length":
            response["incomplete_details"] = IncompleteDetails(reason="max_output_tokens")
        if response["store"]:
            self._store.put(StoredResponse(response, list(self._messages.items.values())))
        return response

    def _response(self, status: Any, output: list[OutputItem]) -> ResponseObject:
        body, answer, params = self._body, self._answer, self._generation.params
        return ResponseObject(
            id=answer.id,
            object="response",
            created_at=answer.created,
            status=status,
            error=None,
            incomplete_details=None,
            model=answer.model,
            output=output,
            usage=None,
            instructions=body.instructions,
            previous_response_id=body.previous_response_id,
            max_output_tokens=body.max_output_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            tools=[tool.model_dump() for tool in body.tools or []],
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": body.reasoning and body.reasoning.effort, "summary": None},
            text={"format": {"type": "text"}} | (body.text.model_dump(exclude_none=True) if body.text else {}),
            truncation="disabled",
            background=False,
            store=body.store is not False and self._store.keeps_any,
            metadata=body.metadata or {},
        )

    def _usage(self) -> ResponseUsage:
        answer, output = self._answer, self._output
        share = output.num_reasoning_chars / max(1, output.num_chars)
        return ResponseUsage(
            input_tokens=answer.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=answer.cached_tokens, cache_write_tokens=0),
            output_tokens=answer.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=round(share * answer.completion_tokens)),
            total_tokens=answer.prompt_tokens + answer.completion_tokens,
        )
