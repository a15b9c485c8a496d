"""Response bodies of OpenAI's Responses API, as the OpenAPI document here describes them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs this one, before Python 3.12

__all__ = [
    "DeletedResponse",
    "InputItemList",
    "InputTokens",
    "OutputItem",
    "OutputPart",
    "ResponseObject",
    "ResponseUsage",
]


class OutputPart(TypedDict):
    """Of type "output_text", which has annotations and log-probabilities (none), or "reasoning_text"."""

    type: str
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any]]


class OutputItem(TypedDict):
    """A message, reasoning, or a call of a function."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputPart]]
    summary: NotRequired[list[Any]]  # of reasoning: none, since its content is whole
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]  # JSON text of an object


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """reasoning_tokens: estimated by the share of reasoning in the characters of the output."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: str


class ResponseObject(TypedDict):
    """With the options of its request."""

    id: str
    object: Literal["response"]
    created_at: int  # seconds since 1970
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    text: dict[str, Any]
    truncation: Literal["disabled"]
    background: Literal[False]
    store: bool
    metadata: dict[str, str]


class InputItemList(TypedDict):
    """A page of the items that a response answers, each with an id."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None  # None: the page is empty
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
