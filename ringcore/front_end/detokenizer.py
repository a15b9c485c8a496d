"""Incremental detokenization, and truncation at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ringcore.params.sampling_params import SamplingParams

__all__ = ["Detokenizer", "NoText", "StopStringMatcher", "TokenStream"]


class TokenStream(Protocol):
    """Returned by `Tokenizer.stream`: text that never ends in half a character."""

    def append(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class NoText:
    """A `TokenStream` for completions that are not detokenized."""

    def append(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class StopStringMatcher:
    """Finds the stop string that is complete first in a text that arrives in pieces.

    "First" is by its last character, and of those that end together the longest: a rule that does not depend on
    how the text is split into pieces. The matcher holds back text that may be the beginning of a stop string, so that
    text that `feed` returned is never retracted.

    Invariant: `_held` is the longest suffix of the text so far that is a proper prefix of a stop string.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop_strings = stop_strings
        self._include_in_output = include_in_output
        self._max_held = max((len(stop) for stop in stop_strings), default=1) - 1
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that can be released after `text`, and the stop string that is complete now, if any.

        With `may_stop=False` no stop string may end in `text`; one that begins in it may still end later.
        """
        if not self._stop_strings:
            return text, None
        buffer = self._held + text
        if may_stop and text and (match := self._first_match(buffer)) is not None:
            end, start, stop = match
            self._held = ""
            return buffer[: end if self._include_in_output else start], stop
        cut = len(buffer) - self._held_length(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def release(self) -> str:
        """The text held back, once the completion has ended."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int, str] | None:
        """(end, start, stop string) of the match that ends first in the part of `buffer` after the held text."""
        matches = []
        for stop in self._stop_strings:
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches, default=None)

    def _held_length(self, buffer: str) -> int:
        for length in range(min(self._max_held, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0


class Detokenizer:
    """The text of one completion, of `num_tokens` tokens.

    The token that ended a completion (the model's EOS token, or one of `stop_token_ids`) has no text unless
    `include_stop_str_in_output`; then `skip_special_tokens` applies, as for every other token.
    """

    def __init__(self, stream: TokenStream, params: SamplingParams) -> None:
        self._stream = stream
        self._matcher: StopStringMatcher | None = None
        if params.stop_strings:
            self._matcher = StopStringMatcher(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self._shows_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text that can be shown: without half a character, and without what may become a stop string."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def take(self) -> str:
        """The text since the last call; `text` then begins after it."""
        pieces = self._pieces
        if not pieces:
            return ""
        self._pieces = []
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def append(self, token_id: int, is_stop_token: bool = False) -> str | None:
        """Appends one token; returns the stop string that it completed, which ends the text."""
        self.num_tokens += 1
        if is_stop_token and not self._shows_stop:
            return None
        text = self._stream.append(token_id)
        if self._matcher is not None:
            return self._match(self._matcher, text)
        if text:
            self._pieces.append(text)
        return None

    def finish(self) -> str | None:
        """Appends the text held back. Returns the stop string that this completed, if any."""
        text = self._stream.flush()
        if self._matcher is None:
            self._pieces.append(text)
            return None
        stop = self._match(self._matcher, text)
        if stop is None:
            self._pieces.append(self._matcher.release())
        return stop

    def _match(self, matcher: StopStringMatcher, text: str) -> str | None:
        released, stop = matcher.feed(text, may_stop=self.num_tokens >= self._min_tokens)
        if released:
            self._pieces.append(released)
        return stop
