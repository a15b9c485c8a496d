"""Where the answers of `ringcore chat` come from: an engine of this process, or a service behind a URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ringcore.chat import ChatParser, ContentDelta, ReasoningDelta, SpecialTokenFilter, choose_format
from ringcore.params.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ringcore.front_end.async_engine import AsyncEngine
    from ringcore.http_client import OpenAIClient

__all__ = ["ChatBackend", "EngineChat", "Piece", "UrlChat"]

_PROMPT_END_TOKENS = 32  # what a parser looks at
Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """More of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class ChatBackend(Protocol):
    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """params: sampling parameters by name. Raises `RingcoreError`. Leaving the iteration ends the request."""
        ...


@dataclass(frozen=True)
class UrlChat:
    """An entered client, and the service's name of the model."""

    client: OpenAIClient
    model: str

    async def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> AsyncIterator[Piece]:
        body = {"model": self.model, **params, "messages": list(messages)}
        async for chunk in self.client.stream("chat/completions", body):
            if chunk.reasoning:
                yield Piece(chunk.reasoning, is_reasoning=True)
            if chunk.text:
                yield Piece(chunk.text)


class EngineChat:
    """A started engine. Reasoning is told from the answer by the format of the model's chat template."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self._tokenizer = engine, engine.get_tokenizer()
        self._format = replace(choose_format(self._tokenizer.chat_template, "auto", "auto"), tool_calls=None)
        markers, special = self._format.markers, self._tokenizer.special_tokens
        self._is_marked = bool(markers & special)  # then the text must have special tokens, of which others are removed
        self._left_out = special - markers if self._is_marked else frozenset[str]()

    async def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> AsyncIterator[Piece]:
        asked = {"max_tokens": None, **self._engine.config.model.sampling_defaults, **params, "output_kind": "delta"}
        if self._is_marked:
            asked["skip_special_tokens"] = False
        parser: ChatParser | None = None
        kept = SpecialTokenFilter(self._left_out) if self._left_out else None
        async for output in self._engine.chat(messages, SamplingParams(**asked)):
            parser = parser or ChatParser(self._format, [], self._prompt_end(output.prompt_token_ids))
            text = output.outputs[0].text if output.outputs else ""
            if kept is not None:
                text = kept.feed(text, is_last=output.finished)
            for event in [*parser.feed(text), *(parser.finish() if output.finished else ())]:
                match event:
                    case ReasoningDelta(piece):
                        yield Piece(piece, is_reasoning=True)
                    case ContentDelta(piece):
                        yield Piece(piece)

    def _prompt_end(self, prompt_token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
