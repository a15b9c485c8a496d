"""Response bodies of Anthropic's Messages API, as its OpenAPI document here describes them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one, before Python 3.12

__all__ = ["ContentBlock", "MessageResponse", "MessagesError", "TokenCount", "Usage"]


class Usage(TypedDict):
    """input_tokens: of the prompt without those that were read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(TypedDict):
    """Of type "text" with `text`, "thinking" with `thinking` and `signature`, or "tool_use" with the other fields."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[Any]  # the call's arguments, an object


class MessageResponse(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(TypedDict):
    input_tokens: int


class ErrorDetails(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class MessagesError(TypedDict):
    type: Literal["error"]
    error: ErrorDetails
