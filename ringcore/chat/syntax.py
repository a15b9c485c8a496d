"""What a format is made of: how a model writes a whole output, as a parser reads it and a grammar forces it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringcore.chat.call_rules import literal
from ringcore.chat.events import ChatEvent
from ringcore.chat.tools import ToolSchemas
from ringcore.params.structured_outputs import StructuredOutputsParams

__all__ = ["AnswerForm", "Marks", "OutputParser", "OutputSyntax"]


class OutputParser(Protocol):
    """Parses one output incrementally, as `ChatParser` promises."""

    def feed(self, text: str) -> list[ChatEvent]: ...

    def finish(self) -> list[ChatEvent]: ...


class Marks:
    """The markers of a format in Lark syntax."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids

    def token(self, marker: str) -> str | None:
        return f"<[{self._ids[marker]}]>" if marker in self._ids else None

    def either(self, marker: str) -> str:
        token = self.token(marker)
        return literal(marker) if token is None else f"({token} | {literal(marker)})"

    def text_up_to(self, marker: str, name: str) -> list[str]:
        """The rules of any text and then this marker; the first of them is called `name`."""
        token = self.token(marker)
        lazy = rf"{name}_text[lazy]: /(.|\n)*{_in_regex(marker)}/"
        if token is None:
            return [f"{name}: {name}_text", lazy]
        terminal = name.upper()
        return [f"{name}: {terminal} {token} | {name}_text", lazy, rf"{terminal}: /(.|\n)*/"]


def _in_regex(marker: str) -> str:
    return marker.replace("/", "\\/").replace("|", "\\|")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an output must be: a text of a form, or calls of these functions; reasoning may stand before either.

    is_parallel: more calls may follow the first. prompt_end: as for `ChatParser`.
    """

    text: StructuredOutputsParams | None
    functions: Sequence[Mapping[str, Any]]
    is_parallel: bool
    prompt_end: str
    marks: Marks


class OutputSyntax(ABC):
    """How a model writes an output."""

    @property
    @abstractmethod
    def markers(self) -> frozenset[str]:
        """The texts that a parser must see, even where they are special tokens of the model."""

    @property
    def stops(self) -> frozenset[str]:
        """The markers that end an output, whether or not the model's files have them among its end-of-text tokens."""
        return frozenset()

    def history(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as this format's chat templates expect them."""
        return list(messages)

    @abstractmethod
    def parser(self, tools: ToolSchemas, prompt_end: str, new_id: Callable[[], str]) -> OutputParser: ...

    @abstractmethod
    def rules(self, form: AnswerForm) -> list[str] | None:
        """The grammar of such an output in llguidance's Lark, from the rule `start` on; None where an output is the
        text alone. Raises `InvalidRequestError` for what no grammar can enforce."""
