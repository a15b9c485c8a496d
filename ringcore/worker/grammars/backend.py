"""The seam between grammars and the library that matches them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ringcore.errors import InvalidRequestError
from ringcore.structured_outputs import StructuredOutputsParams

__all__ = ["MAX_WHITESPACE", "Backend", "Progress", "any_of", "grammar_error", "schema_text", "whole_regex"]

MAX_WHITESPACE = 64  # characters between two parts of JSON: a model that writes spaces alone must get on
_MAX_ERROR_CHARS = 1000


class Progress(Protocol):
    """How far one completion has come in its grammar. It knows no end-of-text tokens."""

    def accept(self, token_id: int) -> bool:
        """False where the token does not fit; nothing more may be asked of it then."""
        ...

    def can_end(self) -> bool:
        """Whether what was accepted is a whole sentence of the grammar."""
        ...

    def must_end(self) -> bool:
        """Whether it is one that nothing can follow."""
        ...

    def failure(self) -> str | None:
        """Why it cannot go on although all tokens fitted: a limit of the library. None where it can."""
        ...


class Backend(ABC):
    """Compiles grammars for one vocabulary. `compile` may be called by several threads, each other method by one."""

    @abstractmethod
    def compile(self, spec: StructuredOutputsParams) -> Any:
        """What `begin` needs. Raises `InvalidRequestError` that says what is wrong with it.

        No constraint of it is left out silently: one that cannot be kept is refused.
        """

    @abstractmethod
    def begin(self, compiled: Any) -> Progress: ...

    @abstractmethod
    def fill(self, parts: Sequence[tuple[int, Any]], masks: np.ndarray) -> None:
        """Writes rows of masks [k, ceil(vocab_size / 32)] int32, each by (row, `Progress` of `begin`).

        The first end of text stands for all of them: its bit says whether the completion may end here.
        """


def schema_text(spec: StructuredOutputsParams) -> str:
    """The JSON schema of a `spec` of kind "json" or "json_object"."""
    if spec.json is None:
        return '{"type": "object"}'
    return spec.json if isinstance(spec.json, str) else json.dumps(spec.json)


def any_of(choices: Sequence[str]) -> str:
    """As an alternative of strings, in Lark's syntax and GBNF alike; no library reads JSON's pairs of surrogates."""
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def whole_regex(regex: str) -> str:
    """The expression without anchors around it: it is matched as a whole anyway, and libraries know none."""
    inner = regex[1:] if regex.startswith("^") else regex
    if inner.endswith("$"):
        num_escapes = len(inner) - 1 - len(inner[:-1].rstrip("\\"))
        if num_escapes % 2 == 0:
            inner = inner[:-1]
    return inner


def grammar_error(spec: StructuredOutputsParams, why: str) -> InvalidRequestError:
    """The error of a grammar that cannot be kept."""
    field, why = f"structured_outputs.{spec.kind}", " ".join(why.split())
    if len(why) > _MAX_ERROR_CHARS:
        why = f"{why[:_MAX_ERROR_CHARS]}..."
    return InvalidRequestError(f"{field}: {why}; change it, or leave structured_outputs out", field=field, value=None)
