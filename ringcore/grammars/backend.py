"""The seam between grammars and the library that matches them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ringcore.params.structured_outputs import StructuredOutputsParams

__all__ = ["Backend", "Progress", "any_of", "schema_of"]


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
    """As an alternative of strings, in Lark's syntax and GBNF alike; no library reads JSON's pairs of surrogates."""
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
