"""Renders a chat template. A template comes with a model, so it is code of a stranger: it runs in jinja2's sandbox.

The environment gives what transformers gives a template: blocks are trimmed, `break` and `continue` work, and
`tojson`, `raise_exception` and `strftime_now` are there. Rendering takes no template from a request.
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

__all__ = ["ChatTemplate"]

MAX_RENDERED_CHARS = 16 << 20


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training: here its body is plain text."""

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
    """jinja2's own filter escapes HTML, which no model expects."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], path: str) -> None:
        """`path` says where it came from, for messages. Raises `ModelLoadError` where the template is not valid."""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelLoadError(f"{path}: the chat template is not valid: {error}", path=path) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The conversation as one text. Raises `InvalidRequestError` where the template refuses the messages."""
        plain = _plain_messages(messages)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise _bad(f"the chat template renders more than {MAX_RENDERED_CHARS} characters", messages)
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except Exception as error:  # a template can fail in any way that Python can
            raise _bad(f"the model's chat template refuses them: {type(error).__name__}: {error}", messages) from error
        return "".join(pieces)


def _bad(what: str, messages: object) -> InvalidRequestError:
    value = repr(messages)
    return InvalidRequestError(f"messages: {what}", field="messages", value=value[:200])


def _plain_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as builtin values: the sandbox knows what those can do. Checks their shape."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _bad(f"a list of dicts is needed, got {type(messages).__name__}", messages)
    if not messages:
        raise _bad("the conversation is empty; give at least one message", messages)
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"message {position} is {message!r}, a dict with 'role' and 'content' is needed", messages)
        if not isinstance(message.get("role"), str):
            raise _bad(f"message {position} has no 'role' (system, user, assistant)", messages)
        if not ("content" in message or "tool_calls" in message):
            raise _bad(f"message {position} has no 'content'", messages)
    try:
        plain: list[dict[str, Any]] = json.loads(json.dumps(list(map(dict, messages))))
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad(f"only strings, numbers, lists and dicts can be rendered: {error}", messages) from error
    return plain
