"""The bytes of each token, against which grammars are matched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringcore.errors import InvalidRequestError

if TYPE_CHECKING:
    from ringcore.checkpoint.tokenizer_files import TokenizerFiles  # which imports tokenizers

__all__ = ["Vocabulary", "read_vocabulary"]

_SPACE = "\u2581"  # SentencePiece's
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, by id, for every column of its logits.

    tokens: the bytes of each; empty for an unused id. special_ids: ids that are not part of any text: special tokens,
    and ids unknown to the tokenizer. eos_token_ids: the model's end-of-text tokens. encode: tokenizes a text without
    special tokens.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


def read_vocabulary(files: TokenizerFiles, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """vocab_size: of the logits, which may be larger or smaller than the tokenizer's.

    Raises `InvalidRequestError` where grammars are not supported: the tokenizer is neither byte-level BPE nor
    SentencePiece, or the model has no end-of-text token.
    """
    eos = tuple(dict.fromkeys(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size))
    if not eos:
        raise _cannot("the model's files name no end-of-text token (eos_token_id), by which a completion could end")
    read_token = _reader(files)
    tokens, special_ids = [b""] * vocab_size, set(range(vocab_size))
    for text, token_id in files.backend.get_vocab(with_added_tokens=False).items():
        if token_id < vocab_size:
            tokens[token_id] = read_token(text)
            special_ids.discard(token_id)
    for token_id, added in files.backend.get_added_tokens_decoder().items():
        if token_id >= vocab_size:
            continue
        tokens[token_id] = added.content.encode()
        if added.special:
            special_ids.add(token_id)
        else:
            special_ids.discard(token_id)
    return Vocabulary(
        tokens,
        sorted(special_ids | set(eos)),
        eos,
        lambda text: files.backend.encode(text, add_special_tokens=False).ids,
    )


def _reader(files: TokenizerFiles) -> Callable[[str], bytes]:
    """The function from a token's spelling in the vocabulary to its bytes."""
    decoder = files.backend.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    kinds = {step.get("type") for step in _steps(state)}
    if "ByteLevel" in kinds:
        return _byte_level
    has_spaces = any(_SPACE in json.dumps(step, ensure_ascii=False) for step in _steps(state))
    if "Metaspace" in kinds or has_spaces:
        return _with_byte_fallback if "ByteFallback" in kinds else _sentencepiece
    raise _cannot(
        f"the tokenizer in {files.path} is neither byte-level BPE nor SentencePiece (its decoder is "
        f"{', '.join(sorted(filter(None, kinds))) or 'missing'})"
    )


def _steps(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a decoder."""
    if state.get("type") == "Sequence":
        for inner in state["decoders"]:
            yield from _steps(inner)
    else:
        yield state


def _letters() -> dict[str, int]:
    """The byte-level BPE alphabet: printable bytes as themselves, the others as characters from U+0100 on."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTERS = _letters()


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_LETTERS[letter] for letter in text])
    except KeyError:  # an added token, spelled literally
        return text.encode()


def _sentencepiece(text: str) -> bytes:
    return text.replace(_SPACE, " ").encode()


def _with_byte_fallback(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return _sentencepiece(text)


def _cannot(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs: {why}; leave structured_outputs out", field="structured_outputs", value=None
    )
