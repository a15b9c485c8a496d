"""Renders a chat template. A template comes with a model, so it is untrusted code: it runs in jinja2's sandbox.

The environment is that of transformers: blocks are trimmed, `break` and `continue` work, and `tojson`,
`raise_exception` and `strftime_now` are defined. A request supplies a template only where the service allows it; its
values are builtins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ringcore.errors import InvalidRequestError, ModelLoadError

__all__ = ["ChatTemplate", "conversation_json", "request_template"]

MAX_RENDERED_CHARS = 16 << 20
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_CONTINUE = "continue_final_message"
_END_OF_MESSAGE = "[end-of-the-final-message]"


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training: here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter, which no model expects."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """`dict` as a plain callable: a template cannot reach the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace, which accepts any attribute name, without names that start with an underscore."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}; rename it")
        super().__setitem__(name, value)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """A model's template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], path: str) -> None:
        """path: its origin, for errors. Raises `ModelLoadError` where the template is not valid."""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"{path}: the chat template is not valid: {error}", path=path) from error
        self._special_tokens = dict(special_tokens)

    def render(self, conversation: str) -> str:
        """Renders a conversation, from `conversation_json`, to one text. Raises `InvalidRequestError` where the
        template refuses it."""
        given = json.loads(conversation)
        messages = given["messages"]
        end = _mark_end(messages[-1], conversation) if given.pop("continue_final_message", False) else None
        variables = self._special_tokens | {"documents": None} | given.pop("chat_template_kwargs") | given
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise _bad(f"the chat template renders more than {MAX_RENDERED_CHARS} characters", messages)
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except MemoryError:
            raise _bad("the model's chat template takes too much memory for them; send less", messages) from None
        except Exception as error:  # a template can raise anything
            raise _bad(f"the model's chat template refuses them: {type(error).__name__}: {error}", messages) from error
        text = "".join(pieces)
        if end is None:
            return text
        content, is_found, _ = text.rpartition(end)
        if not is_found:
            raise _bad("the chat template does not write the content of the final message", messages, _CONTINUE)
        return content


def request_template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """A template that a request brings. Raises `InvalidRequestError` where it is not valid."""
    try:
        return ChatTemplate(source, special_tokens, "chat_template")
    except ModelLoadError as error:
        raise InvalidRequestError(error.message, field="chat_template", value=source[:200]) from error


def _mark_end(message: dict[str, Any], conversation: str) -> str:
    """Ends the content with a text that occurs nowhere else, and returns it."""
    end = _END_OF_MESSAGE
    while end in conversation:
        end = f"[{end}]"
    message["content"] += end
    return end


def _bad(what: str, value: object, field: str = "messages") -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {what}", field=field, value=repr(value)[:200])


def conversation_json(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> str:
    """The variables of a chat template as JSON, so that the sandbox handles only builtin values.

    None and an empty list of tools are equivalent; `chat_template_kwargs` are further variables of the template. With
    `continue_final_message` the text ends with the content of the final message, which is not closed. Raises
    `InvalidRequestError` for values of a wrong shape.
    """
    fields: dict[str, Any] = {
        "messages": _checked_messages(messages),
        "tools": _checked_tools(tools),
        "chat_template_kwargs": _checked_kwargs(chat_template_kwargs),
        "add_generation_prompt": bool(add_generation_prompt),
    }
    if continue_final_message:
        _check_continued(fields["messages"][-1], add_generation_prompt)
        fields["continue_final_message"] = True
    return "{" + ", ".join(f'"{name}": {_json(value, name)}' for name, value in fields.items()) + "}"


def _json(value: Any, field: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(f"only strings, numbers, lists and dicts can be rendered: {error}", value, field) from error


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _bad(f"a list of dicts is needed, got {type(messages).__name__}", messages)
    if not messages:
        raise _bad("the conversation is empty; give at least one message", messages)
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"message {position} is {message!r}, a dict with 'role' and 'content' is needed", messages)
        if not isinstance(message.get("role"), str):
            raise _bad(f"message {position} has no 'role' (system, user, assistant, tool)", messages)
        if not ("content" in message or "tool_calls" in message):
            raise _bad(f"message {position} has no 'content'", messages)
    return list(map(dict, messages))


def _check_continued(message: Mapping[str, Any], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise _bad("a message is continued, or a new one begun; give add_generation_prompt=False", True, _CONTINUE)
    content = message.get("content")
    if not isinstance(content, str) or not content:
        raise _bad("the final message has no text to continue; give it content", content, _CONTINUE)


def _checked_tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise _bad(f"a list of dicts is needed, got {type(tools).__name__}", tools, "tools")
    for position, tool in enumerate(tools):
        form = "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': JSON schema}}"
        if not isinstance(tool, Mapping):
            raise _bad(f"tool {position} is {tool!r}; give {form}", tools, "tools")
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _bad(f"tool {position} has no 'name'; give {form}", tools, "tools")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise _bad(f"the 'parameters' of tool {position} are no JSON schema, which is a dict", tools, "tools")
    return list(map(dict, tools)) or None


def _checked_kwargs(kwargs: object) -> dict[str, Any]:
    field = "chat_template_kwargs"
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise _bad(f"a dict of the template's variables is needed, got {type(kwargs).__name__}", kwargs, field)
    for name in kwargs:
        if not isinstance(name, str):
            raise _bad(f"{name!r} is no variable's name, a string is needed", kwargs, field)
        if name in _OWN_VARIABLES:
            raise _bad(f"{name!r} has a parameter of its own; give it there", kwargs, field)
    return dict(kwargs)
