"""Incremental detokenization of one completion."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

__all__ = ["REPLACEMENT", "IncrementalDecoder", "TokenTexts"]

REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character
# Prompt tokens that give a completion's decoder its context: a SentencePiece decoder drops the space before the first
# word.
_CONTEXT_TOKENS = 8
# Consecutive tokens that may be held back without text. A character has at most 4 bytes, so a longer run consists of
# skipped special tokens or of invalid UTF-8: it is flushed, which bounds the work per token.
_MAX_HELD_TOKENS = 64
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Decoding(Protocol):
    """The part of a `Tokenizer` that decodes."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TokenTexts(dict[int, str | None]):
    """The text of each token inside a text, by id; None for a token whose text depends on the tokens around it. An
    entry is decoded when it is first asked for, so there are at most as many as the vocabulary has tokens.

    anchor: a token to decode before another, and its text.
    """

    def __init__(
        self, tokenizer: Decoding, backend: Backend, skip_special_tokens: bool, anchor: tuple[list[int], str]
    ) -> None:
        super().__init__()
        self._tokenizer, self._backend, self._skip_special_tokens = tokenizer, backend, skip_special_tokens
        self._anchor_ids, self._anchor_text = anchor
        self._are_fixed = _joins_texts(backend.decoder)

    def __missing__(self, token_id: int) -> str | None:
        text = self._tokenizer.decode([*self._anchor_ids, token_id], self._skip_special_tokens)
        text = text[len(self._anchor_text) :]
        is_byte = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None
        self[token_id] = text if self._are_fixed and not is_byte and REPLACEMENT not in text else None
        return self[token_id]


def _joins_texts(decoder: Any) -> bool:
    """Whether a text is the texts of its tokens one after the other, but for runs of byte tokens and for spaces before
    the first word: the decoders of byte-level BPE and of SentencePiece's models."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    match [step["type"] for step in steps]:
        case ["ByteLevel"] | ["Replace", "ByteFallback", "Fuse"]:
            return True
        case ["Replace", "ByteFallback", "Fuse", "Strip"]:
            return bool(steps[-1]["stop"] == 0)
        case _:
            return False


class IncrementalDecoder:
    """Incremental detokenizer of one completion, which never returns a partial character.

    The pieces and the flush, joined, equal the text of decoding all tokens at once; only for invalid UTF-8 a
    SentencePiece decoder may return a different number of U+FFFD, since it decodes runs of bytes as a whole.
    `_held`: the tokens since text was last returned. `_context`: the tokens of that text, which the next ones need to
    be decoded. `_stream`: None as long as the text ends in a whole character; then most tokens have a text of their
    own in `_texts`.
    """

    def __init__(
        self, tokenizer: Decoding, backend: Backend, texts: TokenTexts, skip_special_tokens: bool, prompt: Sequence[int]
    ) -> None:
        self._tokenizer, self._backend, self._texts = tokenizer, backend, texts
        self._skip_special_tokens = skip_special_tokens
        self._held: list[int] = []
        self._context = list(prompt[-_CONTEXT_TOKENS:])
        before = tokenizer.decode(self._context, skip_special_tokens) if self._context else ""
        if before.endswith(REPLACEMENT):  # the prompt ends within a character, which is not the completion's text
            self._context, before = [], ""
        self._stream: DecodeStream | None = None if before else self._make_stream()

    def _make_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=self._skip_special_tokens)

    def append(self, token_id: int) -> str:
        """The text completed by this token; "" within a character."""
        if self._stream is None:
            text = self._texts[token_id]
            if text is not None:
                if text:
                    self._context = [token_id]
                return text
            self._stream = self._make_stream()
        return self._append(self._stream, token_id)

    def _append(self, stream: DecodeStream, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text: str | None = stream.step(self._backend, token_id)
        except Exception as error:  # tokenizers raises plain Exception
            # The returned text is not a prefix of the new decoding: invalid bytes were regrouped.
            if "prefix" not in str(error).lower():
                raise
            return self.flush()
        if text:
            self._context, self._held, self._stream = self._held, [], None
            return text
        return self.flush() if len(self._held) >= _MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        """The text of the tokens held back, at the end of the completion; a partial character is U+FFFD."""
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._context, self._skip_special_tokens)
        text = self._tokenizer.decode(self._context + self._held, self._skip_special_tokens)
        self._context, self._held = self._held, []
        self._stream = self._make_stream()
        return text[len(before) :]
