"""Request bodies of OpenAI's Responses API."""

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

from ringcore.errors import InvalidRequestError
from ringcore.openai_api.conversations import RequestTools, ToolName, choose_tools, function_tool
from ringcore.openai_api.schema import ReasoningEffort
from ringcore.openai_api.structured import JsonObjectFormat, JsonSchema, TextForm, TextFormat
from ringcore.params.field_checks import MAX_COUNT

__all__ = ["InputTokensRequest", "ResponsesRequest"]


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _texts(kind: str) -> dict[str, Any]:
    part = _object({"type": {"const": kind}, "text": _STRING})
    return {"anyOf": [_STRING, {"type": "array", "items": part}]}


_STRING = {"type": "string"}
_ITEM = {
    "anyOf": [
        _object({"role": {"enum": ["user", "system", "developer"]}, "content": _texts("input_text")}),
        _object({"role": {"const": "assistant"}, "content": _texts("output_text")}),
        _object({"type": {"const": "function_call"}, "call_id": _STRING, "name": _STRING, "arguments": _STRING}),
        _object({"type": {"const": "function_call_output"}, "call_id": _STRING, "output": _texts("input_text")}),
        _object({"type": {"const": "item_reference"}, "id": _STRING}),
    ]
}
# `ItemMessages` validates this schema, with errors that name the path within an item.
Item = Annotated[dict[str, Any], WithJsonSchema(_ITEM)]
Input = StrictStr | Annotated[list[Item], Field(min_length=1)]


def _only(*served: Any) -> BeforeValidator:
    """Of a field that has a neutral value, which alone is served."""

    def check(value: Any) -> Any:
        if not any(value is one or (type(value) is type(one) and value == one) for one in (None, *served)):
            raise ValueError("not served here; leave it out")
        return value

    return BeforeValidator(check)


def _function(kind: object) -> object:
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"{kind!r} is a built-in tool of OpenAI's, and is not served here; give 'function' tools")
    return kind


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Annotated[Literal["function"], BeforeValidator(_function)]
    name: ToolName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None  # no effect: a forced call is always constrained to `parameters`


class Reasoning(BaseModel):
    """summary, generate_summary: no effect, since reasoning comes whole."""

    model_config = ConfigDict(extra="forbid")

    effort: ReasoningEffort | None = None
    summary: StrictStr | None = None
    generate_summary: StrictStr | None = None


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_obfuscation: StrictBool = False  # no effect here


class InputTokensRequest(BaseModel):
    """What makes a prompt. Other fields are in `model_extra`, for `ServedModel.check_fields`."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    input: Input | None = None
    instructions: StrictStr | None = None
    previous_response_id: StrictStr | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    # Refused, except for neutral values.
    truncation: Annotated[Literal["disabled"] | None, _only("disabled")] = None
    conversation: Annotated[None, _only()] = None
    personality: Annotated[None, _only()] = None

    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []

    def request_tools(self) -> RequestTools:
        """Raises `InvalidRequestError`."""
        shown = [
            function_tool(one.name, one.description, one.parameters, f"tools[{i}].parameters")
            for i, one in enumerate(self.tools or [])
        ]
        match self.tool_choice:
            case None | "auto" | "none" | "required":
                return choose_tools(shown, self.tool_choice or "auto")
            case {"type": "function", "name": str(name)}:
                return choose_tools(shown, "required", name)
        raise InvalidRequestError(
            "tool_choice: invalid; give 'auto', 'none', 'required' or {'type': 'function', 'name': ...}",
            field="tool_choice",
        )

    def template_kwargs(self) -> dict[str, Any]:
        """Under the names that chat templates have for it; a template ignores those that it does not know."""
        match self.reasoning.effort if self.reasoning else None:
            case None:
                return {}
            case "none":
                return {"enable_thinking": False, "thinking": False}
            case effort:
                return {"reasoning_effort": effort}

    def text_form(self) -> TextForm | None:
        """Raises `InvalidRequestError` for a schema that is none."""
        match self.text.format if self.text else None:
            case JsonObjectFormat():
                return TextForm.named("text.format", json_object=True)
            case SchemaFormat(schema_=schema):
                return TextForm.named("text.format", json=schema)
            case _:
                return None


class ResponsesRequest(InputTokensRequest):
    """A conversation whose next items are asked for."""

    input: Input  # required here
    store: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)] | None = None
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    metadata: dict[str, StrictStr] | None = None
    # No effect; what `include` may ask for is never encrypted here.
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    service_tier: StrictStr | None = None
    # Refused, except for neutral values.
    background: Annotated[Literal[False] | None, _only(False)] = None
    top_logprobs: Annotated[Literal[0] | None, _only(0)] = None
    max_tool_calls: Annotated[None, _only()] = None
    prompt: Annotated[None, _only()] = None
