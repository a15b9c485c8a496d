"""Splits reasoning, `<think>...</think>` at the start of the output, from the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ringcore.chat.markers import TextRun, partial_marker_length

__all__ = ["ReasoningSplitter", "ReasoningSyntax", "reasoning_of_prompt"]

OPEN, CLOSE = "<think>", "</think>"
MAX_BLANKS = 16  # before the opening tag

PromptReasoning = Literal["open", "closed", "none"]


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How a model family writes its reasoning.

    thinks_first: whether an output without an opening tag is reasoning up to the closing tag.
    """

    thinks_first: bool


def reasoning_of_prompt(prompt_end: str) -> PromptReasoning:
    """The state of the reasoning at the end of the prompt, from its last characters with markers.

    "open": the template has already written `<think>`; "closed": it has written an empty reasoning block.
    """
    end = prompt_end.rstrip()
    if end.endswith(OPEN):
        return "open"
    return "closed" if end.endswith(CLOSE) else "none"


class ReasoningSplitter:
    """Splits one output. A tag that neither starts nor ends the reasoning is text.

    Reasoning that is never closed, as in a truncated output, extends to the end.
    """

    def __init__(self, syntax: ReasoningSyntax | None, prompt: PromptReasoning = "none") -> None:
        self._thinks_first = prompt == "open" or (syntax is not None and syntax.thinks_first)
        self._state: Literal["start", "reasoning", "content"] = "start"
        if syntax is None or prompt == "closed":
            self._state = "content"
        self._pending = ""
        self._run = TextRun()
        self.has_closed = False

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that `text` releases."""
        self._pending += text
        if self._state == "start":
            self._start()
        reasoning = self._reason() if self._state == "reasoning" else ""
        if self._state != "content":
            return reasoning, ""
        content, self._pending = self._pending, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """(reasoning, content) held back until now."""
        pending, self._pending = self._pending, ""
        if self._state == "reasoning" or (self._state == "start" and self._thinks_first):
            return self._run.push(pending) + self._run.release(), ""
        return "", pending

    def _start(self) -> None:
        body = self._pending.lstrip()
        num_blanks = len(self._pending) - len(body)
        if num_blanks <= MAX_BLANKS:
            if body.startswith(OPEN):
                self._pending = body[len(OPEN) :]
                self._begin_reasoning()
                return
            if OPEN.startswith(body):
                return  # it may still become the tag
        if self._thinks_first:
            self._begin_reasoning()
        else:
            self._state = "content"

    def _begin_reasoning(self) -> None:
        self._state = "reasoning"
        self._run.begin_after_marker()

    def _reason(self) -> str:
        end = self._pending.find(CLOSE)
        if end >= 0:
            reasoning = self._run.push(self._pending[:end])
            self._pending = self._pending[end + len(CLOSE) :]
            self._state, self.has_closed = "content", True
            return reasoning
        cut = len(self._pending) - partial_marker_length(self._pending, [CLOSE])
        reasoning, self._pending = self._run.push(self._pending[:cut]), self._pending[cut:]
        return reasoning
