"""Request bodies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

from ringcore.openai_api.conversations import RequestTools, ToolName, choose_tools, function_tool
from ringcore.openai_api.schema import Strings
from ringcore.openai_api.structured import TextForm
from ringcore.params.field_checks import MAX_COUNT

__all__ = ["CountTokensRequest", "MessagesRequest"]


def _block(kind: str, required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {"type": {"const": kind}} | required | optional
    return {"type": "object", "properties": properties, "required": ["type", *required]}


_STRING = {"type": "string"}
_TEXT = _block("text", {"text": _STRING})
_TEXTS = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _TEXT}]}
_THINKING = _block("thinking", {"thinking": _STRING})
_TOOL_USE = _block("tool_use", {"id": _STRING, "name": _STRING, "input": {"type": "object"}})
_TOOL_RESULT = _block("tool_result", {"tool_use_id": _STRING}, content=_TEXTS, is_error={"type": ["boolean", "null"]})


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    content = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": list(blocks)}}]}
    return {
        "type": "object",
        "properties": {"role": {"const": role}, "content": content},
        "required": ["role", "content"],
    }


_MESSAGE = {
    "anyOf": [
        _message("user", _TEXT, _TOOL_RESULT),
        _message("assistant", _TEXT, _THINKING, _TOOL_USE),
        _message("system", _TEXT),
    ]
}
# `chat_messages` validates this schema, with errors that name the path within a message.
Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]
System = Annotated[Any, WithJsonSchema(_TEXTS)]


def _custom(kind: object) -> object:
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"{kind!r} is a tool that Anthropic's servers run, and is not served here; leave it out")
    return kind


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Annotated[Literal["custom"] | None, BeforeValidator(_custom)] = None
    name: ToolName
    description: StrictStr | None = None
    input_schema: dict[str, Any]
    # No effect: prompts are always cached, and a forced call is always constrained to its schema.
    cache_control: dict[str, Any] | None = None
    strict: StrictBool | None = None
    eager_input_streaming: StrictBool | None = None


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    disable_parallel_tool_use: StrictBool = False


class FreeChoice(ToolChoice):
    type: Literal["auto", "any"]


class NoChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["none"]


class NamedChoice(ToolChoice):
    type: Literal["tool"]
    name: StrictStr


class Thinking(BaseModel):
    """budget_tokens, display: no effect."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: StrictInt | None = None
    display: StrictStr | None = None


class JsonFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(BaseModel):
    """What makes a prompt. Other fields are in `model_extra`, for `ServedModel.check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    system: System = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[FreeChoice | NoChoice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # no effect: prompts are always cached

    def request_tools(self) -> RequestTools:
        """Raises `InvalidRequestError`."""
        shown = [
            function_tool(one.name, one.description, one.input_schema, f"tools[{i}].input_schema")
            for i, one in enumerate(self.tools or [])
        ]
        match self.tool_choice:
            case NoChoice():
                return choose_tools(shown, "none")
            case NamedChoice(name=name):
                return choose_tools(shown, "required", name)
            case FreeChoice(type="any"):
                return choose_tools(shown, "required")
            case _:
                return choose_tools(shown, "auto")

    @property
    def is_parallel(self) -> bool:
        return not (isinstance(self.tool_choice, ToolChoice) and self.tool_choice.disable_parallel_tool_use)

    def template_kwargs(self) -> dict[str, Any]:
        """Under the names that chat templates have for it; a template ignores those that it does not know."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            is_thinking = self.thinking.type != "disabled"
            variables = {"enable_thinking": is_thinking, "thinking": is_thinking}
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return variables

    def text_form(self) -> TextForm | None:
        """Raises `InvalidRequestError` for a schema that is none."""
        if self.output_config is None or self.output_config.format is None:
            return None
        return TextForm.named("output_config.format", json=self.output_config.format.schema_)


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)]
    stream: StrictBool | None = None
    stop_sequences: Strings | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    top_k: StrictInt | None = None
    thread: dict[str, Any] | None = None  # refused, in a form that clients know
    # No effect.
    metadata: dict[str, Any] | None = None
    service_tier: StrictStr | None = None
