"""Chat completions: the answer to one body, whole or as chunks."""

from __future__ import annotations

from ringcore.chat import MessageBuilder
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
        model.check_n(body.num_completions)
        model.check_logprobs("top_logprobs", body.top_logprobs)
        model.check_logprobs("prompt_logprobs", body.prompt_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequestError("top_logprobs: only of use with logprobs=true", field="top_logprobs")
        self._body = body
        self._num_top = body.top_logprobs or 0
        self._generation = ChatGeneration(model, self._conversation())
        self._answer = Answer.of("chatcmpl", model.name(body.model), answer_id)
        self.n = body.num_completions

    def _conversation(self) -> Conversation:
        body = self._body
        # If neither is given, the answer is limited by max_model_len only.
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return Conversation(
            body.messages,
            body.request_tools(),
            body.sampling_params(
                max_tokens=max_tokens,
                logprobs=self._num_top if body.logprobs else None,
                output_kind="delta" if body.stream else "final",
            ),
            form=body.text_form(),
            template_kwargs=body.template_kwargs(),
            is_parallel=body.parallel_tool_calls is not False,
            add_generation_prompt=body.add_generation_prompt,
            priority=body.priority,
            cache_salt=body.cache_salt,
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
        return response

    async def stream(self, emit: Emit) -> None:
        begun, finished = set[int](), set[int]()
        parsers: list[ChoiceParser] = []

        async def take(output: RequestOutput) -> None:
            if not parsers:
                self._answer.count_prompt(output)
                parsers.extend(self._generation.begin(output))
            self._answer.count_completions(output)
            for completion in changed_completions(output, finished):
                if completion.index not in begun:
                    begun.add(completion.index)
                    await emit(self._chunk(completion.index, ChatMessage(role="assistant", content="")))
                await self._emit_deltas(completion, parsers[completion.index], emit)

        await self._generation.run(self._answer.id, take)
        if self._body.wants_usage:
            await emit(self._response([], self._answer.usage()))

    async def _emit_deltas(self, completion: CompletionOutput, parser: ChoiceParser, emit: Emit) -> None:
        """Emits each delta of one choice as a chunk, and at its end a chunk with the finish reason.

        The first chunk has the log-probabilities of all new tokens, also of those whose text is held back.
        """
        is_last = completion.finish_reason is not None
        deltas = [delta for event in parser.take(completion.text, is_last=is_last) if (delta := chat_delta(event))]
        logprobs = self._logprobs(completion.logprobs or None)
        for delta in deltas or ([ChatMessage(content="")] if logprobs else []):
            await emit(self._chunk(completion.index, delta, logprobs))
            logprobs = None
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
        builder.add(parser.take(completion.text, is_last=True))
        return ChatChoice(
            index=completion.index,
            message=chat_message(builder.message),
            logprobs=self._logprobs(completion.logprobs),
            finish_reason=parser.finish_reason(completion.finish_reason),
            stop_reason=completion.stop_reason,
        )

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
