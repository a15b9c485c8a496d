"""The interface of a grammar library."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ringcore.params.structured_outputs import StructuredOutputsParams

__all__ = ["Backend", "Progress", "any_of", "schema_of"]


class Progress(Protocol):
    """A backend's matcher state of one completion. It does not handle end-of-text tokens."""

    def accept(self, token_id: int) -> bool:
        """Advances by a token. False if the grammar rejects it; the object is then invalid."""
        ...

    def can_end(self) -> bool:
        """Whether the accepted text is a complete sentence of the grammar."""
        ...

    def must_end(self) -> bool:
        """Whether it is complete and no token can follow."""
        ...

    def failure(self) -> str | None:
        """Why matching cannot continue although every token was accepted: a limit of the library. None if it can."""
        ...


class Backend(ABC):
    """Compiles grammars for one vocabulary. `compile` is thread-safe; one thread calls the other methods."""

    @abstractmethod
    def compile(self, spec: StructuredOutputsParams) -> Any:
        """-> the compiled grammar, for `begin`. Raises `InvalidRequestError` that names the problem.

        No constraint is ignored silently: one that the library cannot enforce is refused.
        """

    @abstractmethod
    def begin(self, compiled: Any) -> Progress: ...

    @abstractmethod
    def fill(self, parts: Sequence[tuple[int, Any]], masks: np.ndarray) -> None:
        """Writes token bitmasks to rows of masks [k, ceil(vocab_size / 32)] int32, for each (row, `Progress` of
        `begin`).

        The bit of the first end-of-text token, which represents all of them, says whether the completion may end here.
        """


def schema_of(spec: StructuredOutputsParams) -> dict[str, Any]:
    """The JSON schema of a `spec` of kind "json" or "json_object"."""
    match spec.json:
        case None:
            return {"type": "object"}
        case str():
            schema: dict[str, Any] = json.loads(spec.json)
            return schema
        case _:
            return spec.json


def any_of(choices: Sequence[str]) -> str:
    """An alternation of strings, valid in Lark and GBNF; unescaped, since no library reads JSON's surrogate pairs."""
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
