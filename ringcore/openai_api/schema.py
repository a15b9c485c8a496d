"""Request bodies, in the schema of OpenAI's API and of vLLM's extensions to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from ringcore.errors import InvalidRequestError
from ringcore.openai_api.conversations import Message, RequestTools, Tool, request_tools
from ringcore.openai_api.structured import Choices, ResponseFormat, StructuredOutputs, TextForm
from ringcore.params.sampling_params import SamplingParams

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "ReasoningEffort",
    "SamplingRequest",
    "StreamOptions",
    "TokenizeRequest",
]

TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]  # report only the first of many wrong ids
Strings = Annotated[list[StrictStr], Field(fail_fast=True)]
_SAMPLING_PARAMS = {f.name for f in fields(SamplingParams)} - {"structured_outputs"}
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  # vLLM's: with include_usage, the usage so far in every chunk
    include_obfuscation: StrictBool = False  # OpenAI's; no effect here


class SamplingRequest(BaseModel):
    """The common fields of completions and chat. None means not given: the model's default applies.

    Other fields are in `model_extra`, for `ServedModel.check_fields`.
    """

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    n: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    seed: StrictInt | None = None
    stop: StrictStr | Strings | None = None
    presence_penalty: StrictFloat | None = None
    frequency_penalty: StrictFloat | None = None
    logit_bias: dict[int, StrictFloat] | None = None
    # vLLM's.
    top_k: StrictInt | None = None
    min_p: StrictFloat | None = None
    repetition_penalty: StrictFloat | None = None
    min_tokens: StrictInt | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    prompt_logprobs: StrictInt | None = None
    vllm_xargs: dict[str, Any] | None = None  # for user-defined logits processors
    structured_outputs: StructuredOutputs | None = None
    priority: StrictInt = 0
    cache_salt: StrictStr | None = None
    request_id: StrictStr | None = None  # of the answer's id, and of the engine's request
    return_token_ids: StrictBool | None = None
    add_special_tokens: StrictBool | None = None  # default: with a prompt, and not with messages
    truncate_prompt_tokens: StrictInt | None = None
    # No effect.
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    session_id: StrictStr | None = None
    verbosity: StrictStr | None = None
    prediction: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's older names for `structured_outputs`.
    guided_json: StrictStr | dict[str, Any] | None = None
    guided_regex: StrictStr | None = None
    guided_choice: Choices | None = None
    guided_grammar: StrictStr | None = None

    def sampling_params(self, defaults: Mapping[str, Any], **others: Any) -> SamplingParams:
        """Raises `InvalidRequestError`. defaults: of fields that are not given; `others` override fields of the same
        name."""
        self._check_stream()
        names = _SAMPLING_PARAMS & type(self).model_fields.keys()
        given = self.model_dump(include={*names, "vllm_xargs"}, exclude_none=True)
        given["extra_args"] = given.pop("vllm_xargs", None)
        for name in ("logit_bias", "bad_words", "extra_args"):
            if not given.get(name):  # empty means not given
                given.pop(name, None)
        return SamplingParams(**{**defaults, **given, "n": self.num_completions, **others})

    def text_form(self) -> TextForm | None:
        """The structured output that constrains the answer's text, if any."""
        guided = {name: self.__dict__[name] for name in type(self).model_fields if name.startswith("guided_")}
        return TextForm.of(self.response_format, self.structured_outputs, guided)

    @property
    def num_completions(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.wants_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def _check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options: only of use with stream=true; leave it out", field="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs: not part of a stream; leave it out, or stream", field="prompt_logprobs"
            )


class CompletionRequest(SamplingRequest):
    prompt: StrictStr | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: StrictInt | Literal[False] | None = None
    echo: StrictBool = False

    @property
    def num_logprobs(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """At least one."""
        prompt = self.prompt
        if not prompt:
            raise InvalidRequestError("prompt: it is empty; give at least one character or token", field="prompt")
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)


class ChatCompletionRequest(SamplingRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    # vLLM's.
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template: StrictStr | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: StrictBool = True
    tools: list[Tool] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: ReasoningEffort | None = None

    def request_tools(self) -> RequestTools:
        return request_tools(self.tools, self.tool_choice)

    def template_kwargs(self) -> dict[str, Any] | None:
        """The variables for the chat template. Raises `InvalidRequestError` for one that is given twice.

        The effort "none" also sets those by which templates are told not to reason."""
        given, own = self.chat_template_kwargs or {}, dict[str, Any]()
        for name in ("reasoning_effort", "documents"):
            if (value := self.__dict__[name]) is None:
                continue
            if name in given:
                raise InvalidRequestError(f"{name}: chat_template_kwargs gives it too; leave one out", field=name)
            own[name] = value
        if self.reasoning_effort == "none":
            own = {"enable_thinking": False, "thinking": False} | own
        return own | given or None


class TokenizeRequest(BaseModel):
    """A prompt, or messages. Other fields are in `model_extra`, for `ServedModel.check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None  # with messages
    return_token_strs: StrictBool = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
