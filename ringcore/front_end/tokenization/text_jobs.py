"""Jobs and answers of the tokenizer process: the work on a prompt whose duration the model's own files determine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = [
    "Decode",
    "Encode",
    "EncodeChat",
    "Encoded",
    "Failed",
    "RenderChat",
    "Rendered",
    "TextAnswer",
    "TextJob",
]


class Encode(msgspec.Struct, frozen=True, tag=True):
    """-> `Encoded`. text: None if the prompt is token ids, and only `bad_words` are to be encoded."""

    text: str | None
    add_special_tokens: bool = True
    bad_words: Sequence[str] = ()
    return_token_texts: bool = False


class EncodeChat(msgspec.Struct, frozen=True, tag=True):
    """-> `Encoded`. conversation: of `checkpoint.chat_template.conversation_json`. max_num_tokens: a conversation whose
    text length alone implies more tokens is refused. chat_template: None is the model's."""

    conversation: str
    bad_words: Sequence[str] = ()
    max_num_tokens: int | None = None
    return_token_texts: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None


class RenderChat(msgspec.Struct, frozen=True, tag=True):
    """-> `Rendered`: the last `num_chars` characters of the conversation as the chat template renders it."""

    conversation: str
    num_chars: int
    chat_template: str | None = None


class Decode(msgspec.Struct, frozen=True, tag=True):
    """-> `Rendered`: the text of token ids, special tokens included."""

    token_ids: list[int]


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """token_texts: of each token, if `return_token_texts`."""

    token_ids: list[int]
    bad_words_token_ids: list[list[int]]
    token_texts: list[str] | None = None


class Rendered(msgspec.Struct, frozen=True, tag=True):
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """error: in its wire form."""

    error: dict[str, Any]


TextJob = Encode | EncodeChat | RenderChat | Decode
TextAnswer = Encoded | Rendered | Failed
