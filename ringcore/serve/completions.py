"""POST /v1/completions: texts that go on from prompts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi.responses import Response
from starlette.types import Receive

from ringcore.errors import InvalidRequestError
from ringcore.outputs import CompletionOutput, RequestOutput
from ringcore.serve.answers import CompletionChoice, CompletionResponse, UsageInfo, completion_logprobs
from ringcore.serve.errors import json_response
from ringcore.serve.schema import CompletionRequest
from ringcore.serve.service import Answer, Service, news
from ringcore.serve.streaming import Emit, EventStream, all_of, while_connected

__all__ = ["complete"]


async def complete(service: Service, body: CompletionRequest, receive: Receive) -> Response:
    """The answer to one request: whole, or as a stream of chunks."""
    completions = _Completions(service, body)
    if body.stream:
        return EventStream(completions.stream)
    return json_response(await while_connected(receive, completions.whole()))


class _Completions:
    """One request: each of its prompts is one of the engine, and has n choices, numbered prompt after prompt."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        service.check_n(body.num_completions)
        service.check_logprobs("logprobs", body.logprobs)
        if body.echo and body.logprobs is not None:
            raise InvalidRequestError(
                "echo: the prompt's log-probabilities are not served; leave out echo or logprobs", field="echo"
            )
        self._service, self._body = service, body
        self._prompts = body.prompts()
        self._params = body.sampling_params(output_kind="delta" if body.stream else "final")
        self._answer = Answer.of("cmpl", service.model_name(body.model))

    async def whole(self) -> CompletionResponse:
        last: list[RequestOutput | None] = [None] * len(self._prompts)

        async def follow(index: int) -> None:
            async def take(output: RequestOutput) -> None:
                last[index] = output

            await self._follow(index, take)

        with self._service.places.taken(self._prompts, self._params.n):
            await all_of([follow(index) for index in range(len(self._prompts))])
        choices = []
        for index, output in enumerate(last):
            assert output is not None, "an iterator ended without an output"
            self._answer.count_prompt(output)
            self._answer.count_completions(output)
            choices += [self._choice(index, completion, self._echo(output)) for completion in output.outputs]
        return self._response(choices, usage=self._answer.usage())

    async def stream(self, emit: Emit) -> None:
        with self._service.places.taken(self._prompts, self._params.n):
            await all_of([self._stream_prompt(index, emit) for index in range(len(self._prompts))])
        if self._body.wants_usage:
            await emit(self._response([], usage=self._answer.usage()))

    async def _stream_prompt(self, index: int, emit: Emit) -> None:
        n = self._params.n
        is_begun, offsets, finished = [False] * n, [0] * n, set[int]()

        async def take(output: RequestOutput) -> None:
            if not any(is_begun):
                self._answer.count_prompt(output)
            self._answer.count_completions(output)
            for completion in news(output, finished):
                i = completion.index
                prefix = "" if is_begun[i] else self._echo(output)
                is_begun[i] = True
                await emit(self._response([self._choice(index, completion, prefix, offsets[i])], usage=None))
                offsets[i] += sum(len(next(iter(p.values())).decoded_token) for p in completion.logprobs or [])

        await self._follow(index, take)

    async def _follow(self, index: int, take: Callable[[RequestOutput], Awaitable[None]]) -> None:
        outputs = self._service.engine.generate(
            self._prompts[index],
            self._params,
            request_id=f"{self._answer.id}-{index}",
            priority=self._body.priority,
            cache_salt=self._body.cache_salt,
        )
        await self._service.follow(outputs, self._params, take)

    def _echo(self, output: RequestOutput) -> str:
        """What stands before a completion's text: its prompt, where that was asked for."""
        if not self._body.echo:
            return ""
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._service.engine.get_tokenizer()
        return tokenizer.decode(output.prompt_token_ids, self._params.skip_special_tokens)

    def _choice(
        self, prompt_index: int, completion: CompletionOutput, prefix: str, text_offset: int = 0
    ) -> CompletionChoice:
        logprobs = completion.logprobs
        return CompletionChoice(
            index=prompt_index * self._params.n + completion.index,
            text=prefix + completion.text,
            logprobs=None if logprobs is None else completion_logprobs(logprobs, text_offset),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def _response(self, choices: list[CompletionChoice], usage: UsageInfo | None) -> CompletionResponse:
        answer = self._answer
        response = CompletionResponse(
            id=answer.id, object="text_completion", created=answer.created, model=answer.model, choices=choices
        )
        if usage is not None or self._body.wants_usage:
            response["usage"] = usage
        return response
