"""Parsing of chat answers into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringcore.chat import (
    FORCED_CALLS_OF_ANY_MODEL,
    ChatEvent,
    ChatFormat,
    ChatParser,
    ContentDelta,
    SpecialTokenFilter,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    answer_grammar,
)
from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.errors import InvalidRequestError
from ringcore.openai_api.conversations import RequestTools
from ringcore.openai_api.structured import TextForm
from ringcore.params.structured_outputs import StructuredOutputsParams

__all__ = ["PROMPT_END_CHARS", "ChoiceParser", "RequestParsing"]

PROMPT_END_CHARS = 32  # the last characters of the prompt, which a parser inspects
_PROMPT_END_TOKENS = 32  # upper bound of their tokens


class RequestParsing:
    """The parsing of one request's choices. Without tools no text is parsed as a call.

    If a marker of the format is a special token of the model, the text must be detokenized with special tokens
    (`skip_special_tokens` is false); this module then removes the others, unless the client wants them.

    Without a tool call format calls can only be forced. Raises `InvalidRequestError` for tools that may be called, but
    need not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        tools: RequestTools,
        *,
        is_parallel: bool,
        skip_special_tokens: bool,
    ) -> None:
        if tools.must_call and chat_format.tool_calls is None:
            chat_format = replace(chat_format, tool_calls=FORCED_CALLS_OF_ANY_MODEL)
        if tools.shown and chat_format.tool_calls is None:
            raise InvalidRequestError(
                "tools: the tool call format of this model is unknown; force a call by tool_choice ('required' or a "
                "function), leave them out, or start the service with a tool_call_parser",
                field="tools",
            )
        self._tokenizer = tokenizer
        self._format = chat_format if tools.shown else replace(chat_format, tool_calls=None)
        self._tools, self._is_parallel = tools, is_parallel and not tools.is_single
        special = tokenizer.special_tokens
        is_marked = bool(self._format.markers & special)
        self.skip_special_tokens = skip_special_tokens and not is_marked
        self._left_out = special - self._format.markers if skip_special_tokens and is_marked else frozenset()

    def begin(self, prompt_token_ids: Sequence[int], n: int) -> list[ChoiceParser]:
        """Parsers of n choices after this prompt."""
        end = self._tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        return [ChoiceParser(self._parser(end), self._left_out, is_parallel=self._is_parallel) for _ in range(n)]

    def _parser(self, prompt_end: str) -> ChatParser | None:
        """None if the format has neither tool calls nor reasoning."""
        return None if self._format == ChatFormat() else ChatParser(self._format, self._tools.callable, prompt_end)

    @property
    def reasons(self) -> bool:
        return self._format.reasoning is not None

    def structured_outputs(self, form: TextForm | None, prompt_end: str) -> StructuredOutputsParams | None:
        """The grammar of the choices: the form of their text, forced tool calls, and the reasoning before them."""
        if form is not None and self._tools.must_call:
            raise InvalidRequestError(
                f"{form.field}: with this tool_choice an answer is calls alone; leave one of them out", field=form.field
            )
        return answer_grammar(
            self._format,
            text=None if form is None else form.params,
            tools=self._tools.callable,
            must_call=self._tools.must_call,
            is_parallel=self._is_parallel,
            prompt_end=prompt_end,
            marker_ids=self._single_tokens(self._format.markers),
        )

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens that end an output in this format."""
        return sorted(self._single_tokens(self._format.stops).values())

    def _single_tokens(self, markers: frozenset[str]) -> dict[str, int]:
        """Token ids of the markers that are a single token."""
        ids = {marker: self._tokenizer.encode(marker, add_special_tokens=False) for marker in markers}
        return {marker: of[0] for marker, of in ids.items() if len(of) == 1}


class ChoiceParser:
    """Parses the text of one choice incrementally.

    With tool_choice "auto" a model cannot be kept from calling a second tool: without parallel calls, the parser drops
    those after the first complete one.
    """

    def __init__(self, parser: ChatParser | None, left_out: frozenset[str], *, is_parallel: bool) -> None:
        self._parser = parser
        self._special_token_filter = SpecialTokenFilter(left_out) if left_out else None
        self._is_parallel = is_parallel
        self._is_too_many = False  # of the current call
        self._num_complete = self._num_incomplete = 0

    def take(self, text: str, *, is_last: bool) -> list[ChatEvent]:
        """The events that can be released after more text. The text with `is_last` must be the last."""
        if self._special_token_filter is not None:
            text = self._special_token_filter.feed(text, is_last=is_last)
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        return [event for event in events if self._keeps(event)]

    def finish_reason(self, reason: str | None) -> str | None:
        """ "tool_calls" for a choice that stopped and has at least one call, all of them complete."""
        is_called = self._num_complete > 0 and self._num_incomplete == 0
        return "tool_calls" if reason == "stop" and is_called else reason

    def _keeps(self, event: ChatEvent) -> bool:
        match event:
            case ToolCallStart():
                self._is_too_many = self._num_complete > 0 and not self._is_parallel
                return not self._is_too_many
            case ToolCallArguments():
                return not self._is_too_many
            case ToolCallEnd():
                if not self._is_too_many:
                    self._num_complete += event.is_complete
                    self._num_incomplete += not event.is_complete
                return not self._is_too_many
            case _:
                return True
