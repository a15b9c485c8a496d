"""Clients' messages and tools: validation, and conversion to the form of chat templates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, WithJsonSchema

from ringcore.chat import ChatFormat, to_template_messages
from ringcore.errors import InvalidRequestError

__all__ = [
    "Message",
    "RequestTools",
    "Tool",
    "ToolName",
    "choose_tools",
    "function_tool",
    "request_tools",
    "text_messages",
]

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]},
        "reasoning_content": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role"],
}
# `text_messages` validates this schema, with errors that name the path within a message.
Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]


ToolName = Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class ToolFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: ToolName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    # No effect: a forced call is always constrained to `parameters`, and one of tool_choice "auto" is unconstrained.
    strict: StrictBool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: ToolFunction


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request, in OpenAI's form.

    shown: in the prompt. callable: those that the model may call. must_call: the answer must be calls only; is_single:
    exactly one.
    """

    shown: list[dict[str, Any]]
    callable: list[dict[str, Any]]
    must_call: bool = False
    is_single: bool = False


def request_tools(tools: list[Tool] | None, tool_choice: str | dict[str, Any] | None = None) -> RequestTools:
    """No tools for the choice "none". Raises `InvalidRequestError`."""
    functions = [tool.function for tool in tools or []]
    shown = [
        function_tool(one.name, one.description, one.parameters, f"tools[{i}].function.parameters")
        for i, one in enumerate(functions)
    ]
    match tool_choice:
        case None | "auto" | "none" | "required":
            return choose_tools(shown, tool_choice or "auto")
        case {"type": "function", "function": {"name": str(name)}}:
            return choose_tools(shown, "required", name)
    named_form = "{'type': 'function', 'function': {'name': ...}}"
    raise _bad("tool_choice", f"invalid; give 'auto', 'none', 'required' or {named_form}")


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """A tool in OpenAI's form. where: the client's field of the parameters' schema. Raises `InvalidRequestError`."""
    _check_parameters(where, parameters)
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def choose_tools(
    shown: list[dict[str, Any]], choice: Literal["auto", "none", "required"], name: str | None = None
) -> RequestTools:
    """name: of the only tool that may be called, with "required". Raises `InvalidRequestError`."""
    for repeated, times in Counter(tool["function"]["name"] for tool in shown).items():
        if times > 1:
            raise InvalidRequestError(f"tools: {times} have the name {repeated!r}; give each its own", field="tools")
    if name is not None:
        named = [tool for tool in shown if tool["function"]["name"] == name]
        if not named:
            raise _bad("tool_choice", f"no tool has the name {name!r}; give the name of one of tools")
        return RequestTools(shown, named, must_call=True, is_single=True)
    if choice == "none":
        return RequestTools([], [])
    if choice == "required" and not shown:
        raise _bad("tool_choice", "a call is required, which needs tools; give some, or leave it out")
    return RequestTools(shown, shown, must_call=choice == "required")


def _check_parameters(where: str, schema: dict[str, Any] | None) -> None:
    if schema is None:
        return
    if schema.get("type", "object") != "object":
        raise _bad(f"{where}.type", "arguments are an object; give 'object'")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise _bad(f"{where}.properties", "give an object with a JSON schema for each argument")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _bad(f"{where}.required", "give a list of names of arguments")


def text_messages(messages: list[Message], template_format: ChatFormat) -> list[Message]:
    """The messages with content as one text each and tool call arguments as objects, as chat templates of this format
    expect. Raises `InvalidRequestError`."""
    for i, message in enumerate(messages):
        _check_message(f"messages[{i}]", message)
    return to_template_messages([_without_empty_fields(message) for message in messages], template_format)


def _check_message(where: str, message: Message) -> None:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise _bad(f"{where}.role", "it has no role; give for example 'user'")
    if not (content is None or isinstance(content, str) or (isinstance(content, list) and content)):
        raise _bad(f"{where}.content", "give a string, or a list of parts of type 'text'")
    for name in ("reasoning_content", "tool_call_id"):
        if not isinstance(message.get(name), str | None):
            raise _bad(f"{where}.{name}", "give a string")
    if calls is None:
        return
    if role != "assistant":
        raise _bad(f"{where}.tool_calls", f"only messages of the role 'assistant' have calls, and this is {role!r}'s")
    if not isinstance(calls, list):
        raise _bad(f"{where}.tool_calls", "give a list of calls")
    for i, call in enumerate(calls):
        _check_call(f"{where}.tool_calls[{i}]", call)


def _check_call(where: str, call: Any) -> None:
    match call:
        case {"function": {"name": str(name), "arguments": str() | dict()}} if name:
            if call.get("type", "function") != "function":
                raise _bad(f"{where}.type", "give 'function'")
            if not isinstance(call.get("id"), str | None):
                raise _bad(f"{where}.id", "give a string")
        case _:
            raise _bad(where, "give {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': JSON text}}")


def _without_empty_fields(message: Message) -> Message:
    """Drops empty optional fields, which clients send back with an answer: templates test whether they exist."""
    optional = ("tool_calls", "reasoning_content", "refusal", "function_call", "audio", "annotations")
    said = {name: value for name, value in message.items() if value or name not in optional}
    return said | {"content": message.get("content") or ""}


def _bad(field: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {remedy}", field=field)
