"""Messages: the answer to one body, whole or as events."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from uuid import uuid4

from ringcore import chat
from ringcore.anthropic_api.answers import ContentBlock, MessageResponse, TokenCount, Usage
from ringcore.anthropic_api.content_blocks import ContentBlocks
from ringcore.anthropic_api.conversations import chat_messages
from ringcore.anthropic_api.schema import CountTokensRequest, MessagesRequest
from ringcore.openai_api.chat_generation import ChatGeneration, Conversation, TakeEvents
from ringcore.openai_api.errors import ApiError, fields_named
from ringcore.openai_api.served_model import Answer, Emit, ServedModel
from ringcore.params.outputs import CompletionOutput, RequestOutput
from ringcore.params.sampling_params import OutputKind, SamplingParams

__all__ = ["Messages", "count_tokens"]

_NAMES = {"stop": "stop_sequences", "prompt": "messages"}


class Messages:
    """One body: a conversation whose next message is the answer. Raises `InvalidRequestError` and `ApiError`."""

    num_prompts = n = 1

    def __init__(self, model: ServedModel, body: MessagesRequest) -> None:
        model.check_fields(body)
        if body.thread is not None:
            raise _unthreaded()
        self._max_model_len = model.max_model_len
        self._answer = Answer.of("msg", model.name(body.model), f"msg_{uuid4().hex}")
        with fields_named(_NAMES):
            self._generation = ChatGeneration(model, _conversation(body, _params(body, model.sampling_defaults)))
        self._blocks = ContentBlocks()
        self._stop_sequence: str | None = None

    async def whole(self) -> MessageResponse:
        async def take(output: RequestOutput, completion: CompletionOutput, events: list[chat.ChatEvent]) -> None:
            self._count(output, completion)
            self._answer.count_prompt(output)
            for event in events:
                self._blocks.add(event)

        stop_reason = self._stop_reason(await self._run(take))
        self._blocks.end()
        return self._message(self._blocks.blocks, stop_reason)

    async def stream(self, emit: Emit) -> None:
        is_begun = False

        async def take(output: RequestOutput, completion: CompletionOutput, events: list[chat.ChatEvent]) -> None:
            nonlocal is_begun
            if not is_begun:
                is_begun = True
                self._answer.count_prompt(output)
                await emit({"type": "message_start", "message": self._message([])})
                await emit({"type": "ping"})
            self._count(output, completion)
            for event in events:
                for told in self._blocks.add(event):
                    await emit(told)

        stop_reason = self._stop_reason(await self._run(take))
        for told in self._blocks.end():
            await emit(told)
        delta = {"stop_reason": stop_reason, "stop_sequence": self._stop_sequence}
        await emit({"type": "message_delta", "delta": delta, "usage": self._usage()})
        await emit({"type": "message_stop"})

    async def _run(self, take: TakeEvents) -> str:
        with fields_named(_NAMES):
            return await self._generation.run_one(self._answer.id, take)

    def _count(self, output: RequestOutput, completion: CompletionOutput) -> None:
        self._answer.count_completions(output)
        if isinstance(completion.stop_reason, str):
            self._stop_sequence = completion.stop_reason

    def _stop_reason(self, reason: str) -> str:
        if reason == "tool_calls":
            self._stop_sequence = None
            return "tool_use"
        if reason == "stop":
            return "end_turn" if self._stop_sequence is None else "stop_sequence"
        answer = self._answer
        is_full = answer.prompt_tokens + answer.completion_tokens >= self._max_model_len
        return "model_context_window_exceeded" if is_full else "max_tokens"

    def _message(self, content: list[ContentBlock], stop_reason: str | None = None) -> MessageResponse:
        return MessageResponse(
            id=self._answer.id,
            type="message",
            role="assistant",
            model=self._answer.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=self._stop_sequence,
            usage=self._usage(),
        )

    def _usage(self) -> Usage:
        answer = self._answer
        return Usage(
            input_tokens=answer.prompt_tokens - answer.cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=answer.cached_tokens,
            output_tokens=answer.completion_tokens,
        )


async def count_tokens(model: ServedModel, body: CountTokensRequest) -> TokenCount:
    """Of the prompt that such messages make. Raises `InvalidRequestError` and `ApiError`."""
    model.check_fields(body)
    model.name(body.model)
    generation = ChatGeneration(model, _conversation(body, SamplingParams()))
    return TokenCount(input_tokens=await generation.count_tokens())


def _conversation(body: CountTokensRequest, params: SamplingParams) -> Conversation:
    return Conversation(
        chat_messages(body.system, body.messages),
        body.request_tools(),
        params,
        form=body.text_form(),
        template_kwargs=body.template_kwargs(),
        is_parallel=body.is_parallel,
    )


def _params(body: MessagesRequest, defaults: dict[str, Any]) -> SamplingParams:
    """defaults: the model's."""
    asked: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }
    kind: OutputKind = "delta" if body.stream else "final"
    given = {name: value for name, value in asked.items() if value is not None}
    return SamplingParams(output_kind=kind, **defaults | given)


def _unthreaded() -> ApiError:
    """By its details the tool runners of Anthropic's clients know that they have to send whole conversations."""
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        "thread: conversations are not kept here; leave it out and send all messages",
        details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    )
