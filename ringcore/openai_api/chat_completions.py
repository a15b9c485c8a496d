"""Chat completions: the answer to one body, whole or as chunks."""

from __future__ import annotations

from typing import Any

from ringcore.chat import ChatEvent, MessageBuilder, ReasoningDelta
from ringcore.errors import InvalidRequestError
from ringcore.openai_api.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    UsageInfo,
    chat_delta,
    chat_logprobs,
    chat_message,
    prompt_logprobs,
)
from ringcore.openai_api.chat_generation import ChatGeneration, Conversation
from ringcore.openai_api.parsing import ChoiceParser
from ringcore.openai_api.schema import ChatCompletionRequest
from ringcore.openai_api.served_model import Answer, Emit, ServedModel, changed_completions
from ringcore.params.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["Chat"]


class Chat:
    """One body: a conversation with n choices for its next message. Raises `InvalidRequestError` and `ApiError`.

    answer_id: of the response, and so of the engine's request; None makes one.
    """

    num_prompts = 1

    def __init__(self, model: ServedModel, body: ChatCompletionRequest, answer_id: str | None = None) -> None:
        model.check_fields(body)
        model.check_chat_template(body.chat_template)
        model.check_n(body.num_completions)
        model.check_logprobs("top_logprobs", body.top_logprobs)
        model.check_logprobs("prompt_logprobs", body.prompt_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequestError("top_logprobs: only of use with logprobs=true", field="top_logprobs")
        self._body = body
        self._num_top = body.top_logprobs or 0
        self._generation = ChatGeneration(model, self._conversation(model.sampling_defaults))
        self._answer = Answer.of("chatcmpl", model.name(body.model), answer_id, body.request_id)
        self.n = body.num_completions

    def _conversation(self, defaults: dict[str, Any]) -> Conversation:
        """defaults: the model's sampling parameters."""
        body = self._body
        bound = {} if body.max_completion_tokens is None else {"max_tokens": body.max_completion_tokens}
        return Conversation(
            body.messages,
            body.request_tools(),
            body.sampling_params(
                # If no one bounds it, the answer is limited by max_model_len only.
                {"max_tokens": None} | defaults,
                **bound,
                logprobs=self._num_top if body.logprobs else None,
                output_kind="delta" if body.stream else "final",
            ),
            form=body.text_form(),
            template_kwargs=body.template_kwargs(),
            is_parallel=body.parallel_tool_calls is not False,
            add_generation_prompt=body.add_generation_prompt,
            priority=body.priority,
            cache_salt=body.cache_salt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            add_special_tokens=bool(body.add_special_tokens),
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )

    async def whole(self) -> ChatCompletionResponse:
        last: RequestOutput | None = None

        async def take(output: RequestOutput) -> None:
            nonlocal last
            last = output

        await self._generation.run(self._answer.id, take)
        assert last is not None, "an iterator ended without an output"
        answer, parsers = self._answer, self._generation.begin(last)
        answer.count_prompt(last)
        answer.count_completions(last)
        response = ChatCompletionResponse(
            id=answer.id,
            object="chat.completion",
            created=answer.created,
            model=answer.model,
            choices=[self._choice(one, parser) for one, parser in zip(last.outputs, parsers, strict=True)],
            usage=answer.usage(),
        )
        if last.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(last.prompt_logprobs)
        if self._body.return_token_ids:
            response["prompt_token_ids"] = last.prompt_token_ids
        return response

    async def stream(self, emit: Emit) -> None:
        begun, finished = set[int](), set[int]()
        parsers: list[ChoiceParser] = []

        async def take(output: RequestOutput) -> None:
            if not parsers:
                self._answer.count_prompt(output)
                parsers.extend(self._generation.begin(output))
            self._answer.count_completions(output)
            sends_token_ids = bool(self._body.return_token_ids)
            for completion in changed_completions(output, finished, sends_token_ids=sends_token_ids):
                if completion.index not in begun:
                    chunk = self._chunk(completion.index, ChatMessage(role="assistant", content=""))
                    if sends_token_ids and not begun:
                        chunk["prompt_token_ids"] = output.prompt_token_ids
                    begun.add(completion.index)
                    await emit(chunk)
                await self._emit_deltas(completion, parsers[completion.index], emit)

        await self._generation.run(self._answer.id, take)
        if self._body.wants_usage:
            await emit(self._response([], self._answer.usage()))

    async def _emit_deltas(self, completion: CompletionOutput, parser: ChoiceParser, emit: Emit) -> None:
        """Emits each delta of one choice as a chunk, and at its end a chunk with the finish reason.

        The first chunk has the log-probabilities and ids of all new tokens, also of those whose text is held back.
        """
        is_last = completion.finish_reason is not None
        events = self._shown(parser.take(completion.text, is_last=is_last))
        deltas = [delta for event in events if (delta := chat_delta(event))]
        logprobs = self._logprobs(completion.logprobs or None)
        token_ids = completion.token_ids if self._body.return_token_ids else []
        for delta in deltas or ([ChatMessage(content="")] if logprobs or token_ids else []):
            chunk = self._chunk(completion.index, delta, logprobs)
            if token_ids:
                chunk["choices"][0]["token_ids"] = token_ids
            await emit(chunk)
            logprobs, token_ids = None, []
        if is_last:
            chunk = self._chunk(completion.index, ChatMessage())
            choice = chunk["choices"][0]
            choice["finish_reason"] = parser.finish_reason(completion.finish_reason)
            choice["stop_reason"] = completion.stop_reason
            await emit(chunk)

    def _logprobs(self, logprobs: list[dict[int, Logprob]] | None) -> ChatLogprobs | None:
        return None if logprobs is None else chat_logprobs(logprobs, self._num_top)

    def _choice(self, completion: CompletionOutput, parser: ChoiceParser) -> ChatChoice:
        builder = MessageBuilder()
        builder.add(self._shown(parser.take(completion.text, is_last=True)))
        choice = ChatChoice(
            index=completion.index,
            message=chat_message(builder.message),
            logprobs=self._logprobs(completion.logprobs),
            finish_reason=parser.finish_reason(completion.finish_reason),
            stop_reason=completion.stop_reason,
        )
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _shown(self, events: list[ChatEvent]) -> list[ChatEvent]:
        if self._body.include_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def _chunk(self, index: int, delta: ChatMessage, logprobs: ChatLogprobs | None = None) -> ChatCompletionChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)
        return self._response([choice], self._answer.usage() if self._body.wants_usage_so_far else None)

    def _response(self, choices: list[ChatChunkChoice], usage: UsageInfo | None) -> ChatCompletionChunk:
        answer = self._answer
        chunk = ChatCompletionChunk(
            id=answer.id,
            object="chat.completion.chunk",
            created=answer.created,
            model=answer.model,
            choices=choices,
        )
        if self._body.wants_usage:
            chunk["usage"] = usage
        return chunk
