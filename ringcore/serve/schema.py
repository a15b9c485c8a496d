"""What clients send, in the words of OpenAI's interface and of vLLM's additions to it."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from ringcore.errors import InvalidRequestError
from ringcore.sampling_params import SamplingParams
from ringcore.serve.conversations import Tool, template_tools, text_messages

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "SamplingRequest",
    "StreamOptions",
    "TokenizeRequest",
]

TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]  # of a million wrong ids the first is enough
Strings = Annotated[list[StrictStr], Field(fail_fast=True)]
_SAMPLING_PARAMS = frozenset(f.name for f in fields(SamplingParams))


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # of OpenAI's own; nothing is added here


class SamplingRequest(BaseModel):
    """What completions and chat have in common. None is "not given" throughout, and means `SamplingParams`'s default.

    A field that nobody knows is refused: a misspelt one would otherwise be ignored.
    """

    model_config = ConfigDict(extra="forbid")

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
    priority: StrictInt = 0
    cache_salt: StrictStr | None = None
    # Without effect here.
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    # Refused, but for a value that asks for nothing.
    response_format: dict[str, Any] | None = None

    def sampling_params(self, **others: Any) -> SamplingParams:
        """Raises `InvalidRequestError`; `others` take the place of fields of the same name."""
        self._refuse_unsupported()
        given = self.model_dump(include=set(_SAMPLING_PARAMS), exclude_none=True)
        if given.get("top_k") == -1:  # vLLM's way to say all
            given["top_k"] = 0
        return SamplingParams(**{**given, "n": self.num_completions, **others})

    @property
    def num_completions(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        """Of a stream: a last chunk with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        """The fields that are not served, each with the values that ask for nothing."""
        sampling: dict[str, tuple[Any, ...]] = {
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "repetition_penalty": (1,),
            "logit_bias": ({},),
            "allowed_token_ids": (),
            "bad_words": ([],),
        }
        missing = {name: values for name, values in sampling.items() if name not in _SAMPLING_PARAMS}
        return missing | {"response_format": ({"type": "text"},)}

    def _refuse_unsupported(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options: only of use with stream=true; leave it out", field="stream_options"
            )
        for name, neutral in self.neutral_values().items():
            value = self.__dict__[name]
            if value is not None and value not in neutral:
                raise InvalidRequestError(f"{name}: not served here; leave it out", field=name)


class CompletionRequest(SamplingRequest):
    prompt: StrictStr | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: StrictInt | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral_values() | {"best_of": (1,), "suffix": ("",)}

    def prompts(self) -> list[str | list[int]]:
        """At least one."""
        prompt = self.prompt
        if not prompt:
            raise InvalidRequestError("prompt: it is empty; give at least one character or token", field="prompt")
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)


class ChatCompletionRequest(SamplingRequest):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    # vLLM's.
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None  # "auto" or "none": calls cannot be forced
    parallel_tool_calls: StrictBool | None = None
    # Refused, but for values that ask for nothing.
    functions: list[dict[str, Any]] | None = None
    function_call: StrictStr | dict[str, Any] | None = None
    modalities: list[StrictStr] | None = None

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral_values() | {
            "functions": ([],),
            "function_call": ("none", "auto"),
            "modalities": (["text"],),
        }

    def text_messages(self) -> list[dict[str, Any]]:
        return text_messages(self.messages)

    def shown_tools(self) -> list[dict[str, Any]]:
        """Those that the model may call."""
        return template_tools(self.tools, self.tool_choice)


class TokenizeRequest(BaseModel):
    """A prompt, or messages."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
