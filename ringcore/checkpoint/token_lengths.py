"""A lower bound of the number of tokens of a text, from the maximum bytes per token, without encoding the text."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

__all__ = ["TokenLengths"]

_MAX_COMPOSED = 3  # NFC and NFKC shorten UTF-8 at most by this factor (Unicode Standard Annex 15)
_COMPOSING = ("NFC", "NFKC")
_EXPANDING = ("NFD", "NFKD", "Prepend", "ByteLevel")  # normalizers that never shorten a text
_KEEPING = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that never drop a character


class TokenLengths:
    """A lower bound of the number of tokens of a text.

    Only for byte-level BPE, and BPE with byte fallback, after steps that drop nothing. Any other tokenizer may drop or
    merge characters without bound: its lower bound is 0.
    """

    def __init__(self, backend: Tokenizer) -> None:
        normalizers = _steps(backend.normalizer, "normalizers")
        pre_tokenizers = _steps(backend.pre_tokenizer, "pretokenizers")
        self._composes = any(step["type"] in _COMPOSING for step in normalizers)
        is_byte_level = any(step["type"] == "ByteLevel" for step in [*normalizers, *pre_tokenizers])
        dropped = _unknown_bytes(backend, is_byte_level)
        self._dropped = dropped or b""
        added = backend.get_added_tokens_decoder().values()
        keeps_all_else = (
            all(map(_normalizer_keeps, normalizers))
            and all(map(_pre_tokenizer_keeps, pre_tokenizers))
            and not any(token.lstrip or token.rstrip for token in added)
        )
        self._max_bytes: int | None = None  # of a token
        if dropped is not None and keeps_all_else:
            of_model = backend.get_vocab(with_added_tokens=False)
            lengths = map(len, of_model if is_byte_level else map(str.encode, of_model))
            self._max_bytes = max(1, *lengths, *(len(token.content.encode()) for token in added))

    def min_num_tokens(self, text: str) -> int:
        if self._max_bytes is None:
            return 0
        max_bytes = self._max_bytes
        if self._composes and not text.isascii():
            max_bytes *= _MAX_COMPOSED
        return -(-len(text.encode(errors="replace").translate(None, self._dropped)) // max_bytes)


def _unknown_bytes(backend: Tokenizer, is_byte_level: bool) -> bytes | None:
    """The bytes without a token, which byte-level BPE drops. None where the model does not work on bytes."""
    if not isinstance(backend.model, models.BPE):
        return None
    if is_byte_level:
        return bytes(byte for byte, token in _byte_level_tokens().items() if backend.token_to_id(token) is None)
    has_every_byte = all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return b"" if backend.model.byte_fallback and has_every_byte else None


def _byte_level_tokens() -> dict[int, str]:
    """The byte-level BPE alphabet: the character of each byte, its own if printable, else from U+0100 on."""
    alphabet = set(ByteLevel.alphabet())
    others = iter(sorted(char for char in alphabet if ord(char) >= 256))
    return {byte: chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)}


def _normalizer_keeps(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return step["type"] in _COMPOSING + _EXPANDING


def _pre_tokenizer_keeps(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING or (step["type"] == "Split" and step["behavior"] != "Removed")


def _steps(component: Any, of_sequence: str) -> list[dict[str, Any]]:
    """A component's steps as in tokenizer.json."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    return list(described[of_sequence]) if described["type"] == "Sequence" else [described]
