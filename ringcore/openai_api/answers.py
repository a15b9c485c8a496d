"""Response bodies, in the schema of OpenAI's API and of vLLM's extensions to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NotRequired, assert_never

from typing_extensions import TypedDict  # pydantic needs this one, before Python 3.12

from ringcore import chat
from ringcore.params.outputs import Logprob

__all__ = [
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletionChunk",
    "ChatCompletionResponse",
    "ChatLogprobs",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionResponse",
    "ErrorResponse",
    "HealthResponse",
    "ModelCard",
    "ModelList",
    "ProbeResponse",
    "TextResponse",
    "TokensResponse",
    "UsageInfo",
    "VersionResponse",
    "chat_delta",
    "chat_logprobs",
    "chat_message",
    "completion_logprobs",
    "prompt_logprobs",
]

_LOWEST_LOGPROB = -9999.0  # JSON has no -inf


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class UsageInfo(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(TypedDict):
    """One entry per token; `text_offset` is where the token begins in the completion's text, in characters. The first
    token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # by token id; None for the first token


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]  # of a stream's first chunk
    token_ids: NotRequired[list[int]]


class CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageInfo | None]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]  # of the token's text in UTF-8


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class FunctionCall(TypedDict):
    name: NotRequired[str]
    arguments: str  # JSON text of an object, or the next piece of it


class ToolCall(TypedDict):
    """A tool call, or a delta of one: a delta has the index, and the id, type and name only the first time."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


class ChatMessage(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    refusal: NotRequired[None]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageInfo | None]
    prompt_token_ids: NotRequired[list[int]]  # of the first chunk


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class TokensResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TextResponse(TypedDict):
    prompt: str


class HealthResponse(TypedDict):
    state: str
    num_running: int
    num_waiting: int
    num_restarts: int
    replicas: list[str]  # the state of each engine


class ProbeResponse(TypedDict):
    is_ok: bool
    reason: str | None


class VersionResponse(TypedDict):
    version: str


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None  # the request's field
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorBody


# ---------------------------------------------------------------------------------------------------------------
# Messages.


def chat_message(parsed: chat.ChatMessage) -> ChatMessage:
    """A whole message; its content is None if it has only tool calls."""
    content = None if parsed.tool_calls and not parsed.content else parsed.content
    message = ChatMessage(role="assistant", content=content, refusal=None)
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in parsed.tool_calls
        ]
    return message


def chat_delta(event: chat.ChatEvent) -> ChatMessage | None:
    """The delta of a message for one event; None if the event adds nothing. A tool call that broke off cannot be
    retracted: its text is also sent as content, as in a whole message."""
    match event:
        case chat.ContentDelta(text):
            return ChatMessage(content=text)
        case chat.ReasoningDelta(text):
            return ChatMessage(reasoning_content=text)
        case chat.ToolCallStart(index, call_id, name):
            function = FunctionCall(name=name, arguments="")
            return ChatMessage(tool_calls=[ToolCall(index=index, id=call_id, type="function", function=function)])
        case chat.ToolCallArguments(index, text):
            return ChatMessage(tool_calls=[ToolCall(index=index, function=FunctionCall(arguments=text))])
        case chat.ToolCallEnd():
            return ChatMessage(content=event.text) if event.text else None
        case _:
            assert_never(event)


# ---------------------------------------------------------------------------------------------------------------
# Log-probabilities. At each position the sampled token comes first, then the top tokens, best first.

Position = dict[int, Logprob]


def completion_logprobs(
    positions: Iterable[Position], text_offset: int, first_token: str | None = None
) -> CompletionLogprobs:
    """text_offset: of the first token. Of tokens with equal texts (parts of a character) the likelier one is returned,
    since the schema is keyed by text. first_token: a token before the positions, without log-probabilities."""
    answer = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    if first_token is not None:
        answer["tokens"].append(first_token)
        answer["token_logprobs"].append(None)
        answer["top_logprobs"].append(None)
        answer["text_offset"].append(text_offset)
        text_offset += len(first_token)
    for position in positions:
        sampled = next(iter(position.values()))
        answer["tokens"].append(sampled.decoded_token)
        answer["token_logprobs"].append(_finite(sampled))
        top: dict[str, float] = {}
        for one in position.values():
            top[one.decoded_token] = max(_finite(one), top.get(one.decoded_token, _LOWEST_LOGPROB))
        answer["top_logprobs"].append(top)
        answer["text_offset"].append(text_offset)
        text_offset += len(sampled.decoded_token)
    return answer


def prompt_logprobs(positions: Iterable[Position | None]) -> PromptLogprobs:
    """Of each token of a prompt, in vLLM's schema."""
    return [
        None
        if position is None
        else {
            token_id: PromptLogprob(logprob=_finite(one), rank=one.rank, decoded_token=one.decoded_token)
            for token_id, one in position.items()
        }
        for position in positions
    ]


def chat_logprobs(positions: Iterable[Position], num_top: int) -> ChatLogprobs:
    """num_top: the number of top tokens to return in addition to the sampled one; -1: all."""
    content = []
    for position in positions:
        sampled = next(iter(position.values()))
        likeliest = sorted(position.values(), key=lambda one: one.rank)
        likeliest = likeliest if num_top < 0 else likeliest[:num_top]
        content.append(ChatLogprob(**_top_logprob(sampled), top_logprobs=[_top_logprob(one) for one in likeliest]))
    return ChatLogprobs(content=content)


def _top_logprob(one: Logprob) -> TopLogprob:
    return TopLogprob(token=one.decoded_token, logprob=_finite(one), bytes=list(one.decoded_token.encode()))


def _finite(one: Logprob) -> float:
    return max(one.logprob, _LOWEST_LOGPROB)
