"""Completions: the answer to one body, whole or as chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from ringcore.openai_api.answers import (
    CompletionChoice,
    CompletionResponse,
    UsageInfo,
    completion_logprobs,
    prompt_logprobs,
)
from ringcore.openai_api.schema import CompletionRequest
from ringcore.openai_api.served_model import Answer, Emit, ServedModel, all_of, changed_completions
from ringcore.params.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["Completions"]


@dataclass(frozen=True, slots=True)
class _Echo:
    """An echoed prompt: its text, and the log-probabilities of its tokens after the first."""

    text: str = ""
    first_token: str | None = None
    positions: Sequence[dict[int, Logprob]] = ()


_NO_ECHO = _Echo()


class Completions:
    """One body: each of its prompts is one engine request with n choices, numbered prompt by prompt. Raises
    `InvalidRequestError` and `ApiError`.

    answer_id: of the response, and so of the engine's requests; None makes one.
    """

    def __init__(self, model: ServedModel, body: CompletionRequest, answer_id: str | None = None) -> None:
        model.check_fields(body)
        model.check_n(body.num_completions)
        model.check_logprobs("logprobs", body.num_logprobs)
        model.check_logprobs("prompt_logprobs", body.prompt_logprobs)
        self._model, self._body = model, body
        self._prompts = body.prompts()
        self._form = body.text_form()
        self._params = body.sampling_params(
            model.sampling_defaults,
            structured_outputs=None if self._form is None else self._form.params,
            logprobs=body.num_logprobs,
            output_kind="delta" if body.stream else "final",
            **self._echo_params(),
        )
        self._answer = Answer.of("cmpl", model.name(body.model), answer_id, body.request_id)
        self.num_prompts, self.n = len(self._prompts), self._params.n

    def _echo_params(self) -> dict[str, int | None]:
        """Sampling parameters of an echo: the prompt's log-probabilities if the completion has them; and for
        max_tokens=0, which returns the prompt only, one token that is dropped."""
        body, params = self._body, dict[str, int | None]()
        if body.echo and body.prompt_logprobs is None:
            params["prompt_logprobs"] = body.num_logprobs
        if self._is_prompt_alone:
            params["max_tokens"] = 1
        return params

    @property
    def _is_prompt_alone(self) -> bool:
        return self._body.echo and self._body.max_tokens == 0

    async def whole(self) -> CompletionResponse:
        last: list[RequestOutput | None] = [None] * len(self._prompts)

        async def generate_one(index: int) -> None:
            async def take(output: RequestOutput) -> None:
                last[index] = output

            await self._generate(index, take)

        await all_of([generate_one(index) for index in range(len(self._prompts))])
        choices = []
        for index, output in enumerate(last):
            assert output is not None, "an iterator ended without an output"
            self._answer.count_prompt(output)
            self._count_completions(output)
            echo = self._echo(output)
            choices += [self._choice(index, completion, echo)[0] for completion in output.outputs]
            if self._body.return_token_ids:
                for choice in choices[-len(output.outputs) :]:
                    choice["prompt_token_ids"] = output.prompt_token_ids
            if self._body.prompt_logprobs is not None:
                positions = prompt_logprobs(output.prompt_logprobs or [])
                for choice in choices[-len(output.outputs) :]:
                    choice["prompt_logprobs"] = positions
        return self._response(choices, usage=self._answer.usage())

    async def stream(self, emit: Emit) -> None:
        await all_of([self._stream_prompt(index, emit) for index in range(len(self._prompts))])
        if self._body.wants_usage:
            await emit(self._response([], usage=self._answer.usage()))

    async def _stream_prompt(self, index: int, emit: Emit) -> None:
        n = self._params.n
        is_begun, offsets, finished = [False] * n, [0] * n, set[int]()
        waiting: list[RequestOutput] = []  # until the prompt's log-probabilities arrive with one of the n completions
        echo, is_early = _NO_ECHO, True
        sends_token_ids = bool(self._body.return_token_ids)

        async def take(output: RequestOutput) -> None:
            nonlocal echo, is_early
            if not is_early:
                await give(output)
                return
            waiting.append(output)
            if self._is_early(output):
                return
            is_early = False
            self._answer.count_prompt(output)
            echo = self._echo(output)
            for ready in waiting:
                await give(ready)
            waiting.clear()

        async def give(output: RequestOutput) -> None:
            self._count_completions(output)
            for completion in changed_completions(output, finished, sends_token_ids=sends_token_ids):
                i = completion.index
                choice, offsets[i] = self._choice(index, completion, _NO_ECHO if is_begun[i] else echo, offsets[i])
                if sends_token_ids and not is_begun[i]:
                    choice["prompt_token_ids"] = output.prompt_token_ids
                is_begun[i] = True
                usage = self._answer.usage() if self._body.wants_usage_so_far else None
                await emit(self._response([choice], usage))

        await self._generate(index, take)

    def _is_early(self, output: RequestOutput) -> bool:
        """Whether the prompt's log-probabilities, which must be sent first, have not arrived yet."""
        return self._has_echoed_logprobs and output.prompt_logprobs is None and not output.finished

    @property
    def _has_echoed_logprobs(self) -> bool:
        return self._body.echo and self._body.num_logprobs is not None

    async def _generate(self, index: int, take: Callable[[RequestOutput], Awaitable[None]]) -> None:
        prompt, body = self._prompts[index], self._body
        outputs = self._model.engine.generate(
            {
                "prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt,
                "add_special_tokens": body.add_special_tokens,
                "truncate_prompt_tokens": body.truncate_prompt_tokens,
            },
            self._params,
            request_id=f"{self._answer.id}-{index}",
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        await self._model.consume(outputs, take, None if self._form is None else self._form.field)

    def _echo(self, output: RequestOutput) -> _Echo:
        """The echoed prompt before a completion; empty without `echo`."""
        if not self._body.echo:
            return _NO_ECHO
        tokenizer = self._model.engine.get_tokenizer()
        text = output.prompt
        if text is None:
            text = tokenizer.decode(output.prompt_token_ids, self._params.skip_special_tokens)
        if not self._has_echoed_logprobs:
            return _Echo(text)
        known = [position for position in output.prompt_logprobs or () if position is not None]
        return _Echo(text, tokenizer.token_text(output.prompt_token_ids[0]), known)

    def _choice(
        self, prompt_index: int, completion: CompletionOutput, echo: _Echo, text_offset: int = 0
    ) -> tuple[CompletionChoice, int]:
        """A choice, and the text offset after its last token."""
        if self._is_prompt_alone:
            logprobs_of_none: list[dict[int, Logprob]] | None = None if completion.logprobs is None else []
            completion = replace(
                completion, text="", token_ids=[], logprobs=logprobs_of_none, finish_reason="length", stop_reason=None
            )
        logprobs = None
        if completion.logprobs is not None:
            logprobs = completion_logprobs([*echo.positions, *completion.logprobs], text_offset, echo.first_token)
            text_offset += sum(map(len, logprobs["tokens"]))
        choice = CompletionChoice(
            index=prompt_index * self._params.n + completion.index,
            text=echo.text + completion.text,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice, text_offset

    def _count_completions(self, output: RequestOutput) -> None:
        if not self._is_prompt_alone:
            self._answer.count_completions(output)

    def _response(self, choices: list[CompletionChoice], usage: UsageInfo | None) -> CompletionResponse:
        answer = self._answer
        response = CompletionResponse(
            id=answer.id, object="text_completion", created=answer.created, model=answer.model, choices=choices
        )
        if usage is not None or self._body.wants_usage:
            response["usage"] = usage
        return response
