"""An answer as content blocks, and as the events of a stream of them."""

from __future__ import annotations

from typing import Any, assert_never

import msgspec

from ringcore import chat
from ringcore.anthropic_api.answers import ContentBlock

__all__ = ["ContentBlocks"]


class ContentBlocks:
    """Makes blocks of the events of a parsed answer, in their order; only the last one is open.

    A call that broke off is text in a whole message. In a stream it cannot be retracted: its block ends as it is, and
    its text follows.
    """

    def __init__(self) -> None:
        self._blocks: list[ContentBlock] = []
        self._pieces: list[str] = []  # of the open block
        self._open: str | None = None  # its type
        self._num_begun = 0

    def add(self, event: chat.ChatEvent) -> list[dict[str, Any]]:
        """The events of the stream."""
        match event:
            case chat.ContentDelta(text):
                return self._text(text)
            case chat.ReasoningDelta(text):
                begun = self._begin("thinking", ContentBlock(type="thinking", thinking="", signature=""))
                return [*begun, self._delta(text, {"type": "thinking_delta", "thinking": text})]
            case chat.ToolCallStart(_, call_id, name):
                block = ContentBlock(type="tool_use", id=call_id, name=name, input={})
                return [*self.end(), *self._begin("tool_use", block)]
            case chat.ToolCallArguments(_, text):
                return [self._delta(text, {"type": "input_json_delta", "partial_json": text})]
            case chat.ToolCallEnd(_, is_complete, text):
                ended = self.end()
                if not is_complete:
                    self._blocks.pop()
                return ended + (self._text(text) if text else [])
            case _:
                assert_never(event)

    def end(self) -> list[dict[str, Any]]:
        """Ends the open block, if there is one."""
        if self._open is None:
            return []
        block, joined = self._blocks[-1], "".join(self._pieces)
        match self._open:
            case "text":
                block["text"] = joined
            case "thinking":
                block["thinking"] = joined
            case _:
                block["input"] = msgspec.Raw(joined.encode())
        self._open, self._pieces = None, []
        return [{"type": "content_block_stop", "index": self._num_begun - 1}]

    @property
    def blocks(self) -> list[ContentBlock]:
        """Of the whole message; all have ended."""
        assert self._open is None, f"a block of type {self._open} is open"
        return self._blocks

    def _text(self, text: str) -> list[dict[str, Any]]:
        begun = self._begin("text", ContentBlock(type="text", text=""))
        return [*begun, self._delta(text, {"type": "text_delta", "text": text})]

    def _begin(self, kind: str, block: ContentBlock) -> list[dict[str, Any]]:
        """Begins a block, unless one of this type is open."""
        if self._open == kind:
            return []
        events = self.end()
        started = {"type": "content_block_start", "index": self._num_begun, "content_block": block.copy()}
        self._blocks.append(block)
        self._open, self._num_begun = kind, self._num_begun + 1
        return [*events, started]

    def _delta(self, text: str, delta: dict[str, Any]) -> dict[str, Any]:
        self._pieces.append(text)
        return {"type": "content_block_delta", "index": self._num_begun - 1, "delta": delta}
