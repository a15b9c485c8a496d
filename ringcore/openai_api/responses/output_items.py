"""An answer as output items, and as the events of a stream of them."""

from __future__ import annotations

from typing import Any, Literal, assert_never
from uuid import uuid4

from ringcore import chat
from ringcore.openai_api.responses.answers import OutputItem, OutputPart

__all__ = ["OutputItems", "new_id"]

_Event = dict[str, Any]
_Status = Literal["completed", "incomplete"]


class _Texts:
    """A message or reasoning, of one part that grows."""

    def __init__(self, kind: Literal["message", "reasoning"], at: int) -> None:
        self.kind, self._pieces = kind, list[str]()
        name = "output" if kind == "message" else "reasoning"
        self._part_type, self._prefix = f"{name}_text", f"response.{name}_text"
        self.item = OutputItem(id=new_id("msg" if kind == "message" else "rs"), type=kind, status="in_progress")
        if kind == "message":
            self.item["role"] = "assistant"
        else:
            self.item["summary"] = []
        self.item["content"] = []
        self._at = {"item_id": self.item["id"], "output_index": at, "content_index": 0}

    def begin(self) -> list[_Event]:
        return [{"type": "response.content_part.added", **self._at, "part": self._part("")}]

    def add(self, text: str) -> _Event:
        self._pieces.append(text)
        return {"type": f"{self._prefix}.delta", **self._at, "delta": text, **self._logprobs()}

    def end(self) -> list[_Event]:
        text = "".join(self._pieces)
        part = self._part(text)
        self.item["content"] = [part]
        return [
            {"type": f"{self._prefix}.done", **self._at, "text": text, **self._logprobs()},
            {"type": "response.content_part.done", **self._at, "part": part},
        ]

    def _part(self, text: str) -> OutputPart:
        part = OutputPart(type=self._part_type, text=text)
        if self.kind == "message":
            part["annotations"], part["logprobs"] = [], []
        return part

    def _logprobs(self) -> dict[str, list[Any]]:
        return {"logprobs": []} if self.kind == "message" else {}


class _Call:
    """A call of a function, whose arguments grow."""

    kind = "function_call"

    def __init__(self, start: chat.ToolCallStart, at: int) -> None:
        self._pieces = list[str]()
        self.item = OutputItem(
            id=new_id("fc"),
            type="function_call",
            status="in_progress",
            call_id=start.id,
            name=start.name,
            arguments="",
        )
        self._at = {"item_id": self.item["id"], "output_index": at}

    def begin(self) -> list[_Event]:
        return []

    def add(self, text: str) -> _Event:
        self._pieces.append(text)
        return {"type": "response.function_call_arguments.delta", **self._at, "delta": text}

    def end(self) -> list[_Event]:
        arguments = self.item["arguments"] = "".join(self._pieces)
        name = self.item["name"]
        return [
            {"type": "response.function_call_arguments.done", **self._at, "name": name, "arguments": arguments},
        ]


class OutputItems:
    """Makes items of the events of a parsed answer, in their order; only the last one is open.

    can_retract: of a whole answer: a call that broke off is text. In a stream it stays, incomplete, and its text
    follows.
    """

    def __init__(self, *, can_retract: bool) -> None:
        self._can_retract = can_retract
        self.items: list[OutputItem] = []
        self._open: _Texts | _Call | None = None
        self.num_chars = self.num_reasoning_chars = 0

    def add(self, event: chat.ChatEvent) -> list[_Event]:
        """The events of the stream, without their sequence numbers."""
        match event:
            case chat.ContentDelta(text):
                return self._text("message", text)
            case chat.ReasoningDelta(text):
                self.num_reasoning_chars += len(text)
                return self._text("reasoning", text)
            case chat.ToolCallStart():
                return [*self.end(), *self._begin(_Call(event, len(self.items)))]
            case chat.ToolCallArguments(_, text):
                return [self._grow(text)]
            case chat.ToolCallEnd(_, is_complete, text):
                ended = self.end("completed" if is_complete else "incomplete")
                if not is_complete and self._can_retract:
                    self.items.pop()
                return ended + (self._text("message", text) if text else [])
            case _:
                assert_never(event)

    def end(self, status: _Status = "completed") -> list[_Event]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        ended, self._open = self._open, None
        events = ended.end()
        ended.item["status"] = status
        at = len(self.items) - 1
        return [*events, {"type": "response.output_item.done", "output_index": at, "item": ended.item}]

    def _text(self, kind: Literal["message", "reasoning"], text: str) -> list[_Event]:
        begun: list[_Event] = []
        if self._open is None or self._open.kind != kind:
            begun = [*self.end(), *self._begin(_Texts(kind, len(self.items)))]
        return [*begun, self._grow(text)]

    def _begin(self, one: _Texts | _Call) -> list[_Event]:
        added = {"type": "response.output_item.added", "output_index": len(self.items), "item": one.item.copy()}
        self.items.append(one.item)
        self._open = one
        return [added, *one.begin()]

    def _grow(self, text: str) -> _Event:
        assert self._open is not None, "no item is open"
        self.num_chars += len(text)
        return self._open.add(text)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
