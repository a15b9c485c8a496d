"""What the chat APIs have in common: a conversation in the engine, whose outputs are read as events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from ringcore.chat import ChatEvent
from ringcore.checkpoint.chat_template import conversation_json
from ringcore.errors import InvalidRequestError
from ringcore.front_end.tokenization.text_jobs import EncodeChat, Encoded, RenderChat, Rendered
from ringcore.openai_api.conversations import Message, RequestTools
from ringcore.openai_api.errors import request_aborted
from ringcore.openai_api.parsing import PROMPT_END_CHARS, ChoiceParser, RequestParsing
from ringcore.openai_api.served_model import ServedModel
from ringcore.openai_api.structured import TextForm, name_field
from ringcore.params.outputs import CompletionOutput, RequestOutput
from ringcore.params.sampling_params import SamplingParams

__all__ = ["ChatGeneration", "Conversation", "TakeEvents"]

TakeEvents = Callable[[RequestOutput, CompletionOutput, list[ChatEvent]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation whose next message is asked for.

    messages: in the form of OpenAI's chat completions. params: without the grammar of `form` and `tools`, which is
    added to them. template_kwargs: further variables of the chat template. chat_template: instead of the model's own.
    """

    messages: list[Message]
    tools: RequestTools
    params: SamplingParams
    form: TextForm | None = None
    template_kwargs: dict[str, Any] | None = None
    is_parallel: bool = True
    add_generation_prompt: bool = True
    priority: int = 0
    cache_salt: str | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None


class ChatGeneration:
    """One conversation, with `params.n` choices for its next message. Raises `InvalidRequestError`."""

    def __init__(self, model: ServedModel, asked: Conversation) -> None:
        self._model, self._asked = model, asked
        self._messages = model.template_messages(asked.messages)
        has_no_text = asked.tools.must_call and asked.form is not None and asked.form.is_of_text
        self._form = None if has_no_text else asked.form
        self._parsing = RequestParsing(
            model.engine.get_tokenizer(),
            model.chat_format,
            asked.tools,
            is_parallel=asked.is_parallel,
            skip_special_tokens=asked.params.skip_special_tokens,
        )
        self.params = replace(
            asked.params,
            skip_special_tokens=self._parsing.skip_special_tokens,
            stop_token_ids=self._stop_token_ids(),
        )

    def _stop_token_ids(self) -> list[int]:
        """The client's, and those by which an output of the format ends, where the model's files do not name them."""
        given = self._asked.params.stop_token_ids or []
        if self._asked.params.ignore_eos:
            return given
        eos_token_ids = self._model.engine.config.model.spec.eos_token_ids
        return given + [token_id for token_id in self._parsing.stop_token_ids if token_id not in eos_token_ids]

    def begin(self, output: RequestOutput) -> list[ChoiceParser]:
        """A parser of each choice, by the prompt of any output."""
        return self._parsing.begin(output.prompt_token_ids, self.params.n)

    async def run(self, request_id: str, take: Callable[[RequestOutput], Awaitable[None]]) -> None:
        """Passes each output to `take`; raises the request's error."""
        asked = self._asked
        params = await self._bounded_params()
        outputs = self._model.engine.chat(
            self._messages,
            params,
            request_id=request_id,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            add_generation_prompt=asked.add_generation_prompt,
            tools=asked.tools.shown,
            chat_template_kwargs=asked.template_kwargs,
            continue_final_message=asked.continue_final_message,
            chat_template=asked.chat_template,
            add_special_tokens=asked.add_special_tokens,
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
        )
        await self._model.consume(outputs, take, self._form_field)

    async def run_one(self, request_id: str, take: TakeEvents) -> str:
        """Passes the outputs of a single choice to `take`, each with the events that it releases. Returns why the
        choice ended: "stop", "length" or "tool_calls". Raises `ApiError` if it was aborted."""
        assert self.params.n == 1, f"there are {self.params.n} choices"
        parser: ChoiceParser | None = None
        reason: str | None = None

        async def parse(output: RequestOutput) -> None:
            nonlocal parser, reason
            if parser is None:
                (parser,) = self.begin(output)
            for completion in output.outputs:
                is_last = completion.finish_reason is not None
                await take(output, completion, parser.take(completion.text, is_last=is_last))
                reason = parser.finish_reason(completion.finish_reason)

        await self.run(request_id, parse)
        if reason not in ("stop", "length", "tool_calls"):
            raise request_aborted()
        return reason

    async def count_tokens(self) -> int:
        """Of the prompt. Raises `InvalidRequestError` if it is certainly longer than the model's longest."""
        answer = await self._model.engine.run_text_job(
            EncodeChat(self._conversation_json(), max_num_tokens=self._model.max_model_len)
        )
        assert isinstance(answer, Encoded)
        return len(answer.token_ids)

    async def _bounded_params(self) -> SamplingParams:
        """The parameters with the grammar of the answer, which may depend on the end of the rendered prompt."""
        if self._form is None and not self._asked.tools.must_call:
            return self.params
        prompt_end = await self._prompt_end() if self._parsing.reasons else ""
        try:
            bounds = self._parsing.structured_outputs(self._form, prompt_end)
            return replace(self.params, structured_outputs=bounds)
        except InvalidRequestError as error:
            raise name_field(error, self._form_field) from error

    @property
    def _form_field(self) -> str:
        """The client's field that requires structured outputs."""
        return "tools" if self._form is None else self._form.field

    async def _prompt_end(self) -> str:
        job = RenderChat(self._conversation_json(), PROMPT_END_CHARS, self._asked.chat_template)
        answer = await self._model.engine.run_text_job(job)
        assert isinstance(answer, Rendered)
        return answer.text

    def _conversation_json(self) -> str:
        asked = self._asked
        return conversation_json(
            self._messages,
            asked.add_generation_prompt,
            asked.tools.shown,
            asked.template_kwargs,
            asked.continue_final_message,
        )
