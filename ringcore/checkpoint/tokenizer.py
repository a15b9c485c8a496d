"""Tokenizes and detokenizes, in the front end only: the engine and its workers see token ids.

Built on the `tokenizers` library, directly from the model's files; transformers (seconds to import) converts only
folders without a tokenizer.json.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ringcore.checkpoint import ModelFiles
from ringcore.checkpoint.chat_template import ChatTemplate, conversation_json, request_template
from ringcore.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from ringcore.checkpoint.incremental_decoder import IncrementalDecoder, TokenTexts
from ringcore.checkpoint.model_files import find_tokenizer
from ringcore.checkpoint.token_lengths import TokenLengths
from ringcore.checkpoint.tokenizer_files import TokenizerFiles, check_tokenizer_folder, read_tokenizer_folder
from ringcore.errors import InvalidRequestError

__all__ = [
    "Tokenizer",
    "check_tokenizer_files",
    "check_unicode",
    "load_tokenizer",
    "read_tokenizer_files",
]

_LONG_TEXT = 1 << 12  # characters, which take some milliseconds


def load_tokenizer(source: str | os.PathLike[str] | ModelFiles) -> Tokenizer:
    """The tokenizer of a model, or of a folder, a tokenizer.json, a .gguf file or a hub id.

    Raises `ModelLoadError` where it is missing or broken.
    """
    return Tokenizer(read_tokenizer_files(source))


def check_tokenizer_files(files: ModelFiles) -> None:
    """Raises `ModelLoadError` where a model has no tokenizer, without reading it; a .gguf file is not checked."""
    if not files.tokenizer_path.endswith(".gguf"):
        check_tokenizer_folder(Path(files.tokenizer_path))


def read_tokenizer_files(source: str | os.PathLike[str] | ModelFiles) -> TokenizerFiles:
    """The tokenizer files that `load_tokenizer` reads; raises as it does."""
    path = Path(source.tokenizer_path) if isinstance(source, ModelFiles) else find_tokenizer(source)
    return read_gguf_tokenizer(str(path)) if path.suffix == ".gguf" else read_tokenizer_folder(path)


def check_unicode(text: str, field: str = "prompt") -> None:
    """Raises `InvalidRequestError` for a text that has no UTF-8 form."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidRequestError(
            f"{field}: character {at} is half of a surrogate pair and stands for nothing; remove it",
            field=field,
            value=repr(text[max(0, at - 20) : at + 20]),
        ) from error


class Tokenizer:
    """A model's tokenizer. Thread-safe."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self._backend = files.backend
        self._chat_template: ChatTemplate | None = None
        self._texts: dict[bool, TokenTexts] = {}  # by skip_special_tokens

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones. A model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    def _special_id(self, name: str) -> int | None:
        token = self._files.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def special_tokens(self) -> frozenset[str]:
        """The texts of the tokens that `skip_special_tokens` skips."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes a text, with the special tokens that the model's files add (often a BOS, or none)."""
        check_unicode(text)
        try:
            if len(text) <= _LONG_TEXT:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:  # without offsets, and releases the GIL
                ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of tokenizers' Rust code: cannot be imported
                raise
            raise InvalidRequestError(
                f"prompt: the model's tokenizer fails at it: {error}", field="prompt", value=repr(text[:80])
            ) from None
        return ids

    @cached_property
    def _lengths(self) -> TokenLengths:
        return TokenLengths(self._backend)

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text, from its length; 0 for tokenizers without a bound."""
        return self._lengths.min_num_tokens(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Detokenizes; invalid UTF-8 becomes U+FFFD, ids beyond the vocabulary are skipped."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text, also of special tokens; U+FFFD for a partial character."""
        # A SentencePiece decoder drops the space before the first word, so the token is decoded as the second one.
        anchor_ids, anchor_text = self._anchor
        return self.decode([*anchor_ids, token_id], skip_special_tokens=False)[len(anchor_text) :]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A plain token to decode before another, and its text. Most vocabularies have the token a."""
        token_id = self._backend.token_to_id("a")
        ids = self.encode("a", add_special_tokens=False) if token_id is None else [token_id]
        return ids, self.decode(ids)

    def stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder for one completion, which follows `prompt_ids`."""
        texts = self._texts.get(skip_special_tokens)
        if texts is None:
            texts = TokenTexts(self, self._backend, skip_special_tokens, self._anchor)
            texts = self._texts.setdefault(skip_special_tokens, texts)
        return IncrementalDecoder(self, self._backend, texts, skip_special_tokens, prompt_ids)

    @property
    def has_chat_template(self) -> bool:
        return self._files.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The template's source. It shows the tool call syntax that the model was trained on."""
        return self._files.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, in the format the model was trained on.

        messages: dicts with "role" and "content", or "tool_calls" whose arguments are dicts.
        add_generation_prompt: adds the start of the assistant's answer.
        tools: the callable tools, in OpenAI's format: `{"type": "function", "function": {"name", ...}}`.
        chat_template_kwargs: the template's own variables, as `{"enable_thinking": False}`; unknown ones
            have no effect.

        Raises `InvalidRequestError` where an argument is malformed, and where the model has no template or its
        template refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt, tools, chat_template_kwargs)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, with special tokens as text; see `apply_chat_template`."""
        return self.render_conversation(conversation_json(messages, add_generation_prompt, tools, chat_template_kwargs))

    def render_conversation(self, conversation: str, chat_template: str | None = None) -> str:
        """`render_chat` with the arguments encoded by `conversation_json`. chat_template: instead of the model's."""
        if chat_template is not None:
            return request_template(chat_template, self._files.special_tokens).render(conversation)
        if self._chat_template is None:
            if self._files.chat_template is None:
                raise InvalidRequestError(
                    f"messages: the model in {self._files.path} has no chat template (chat_template.jinja, or the "
                    "field chat_template of tokenizer_config.json); give a prompt instead, or a chat model",
                    field="messages",
                    value=conversation[:200],
                )
            self._chat_template = ChatTemplate(self._files.chat_template, self._files.special_tokens, self._files.path)
        return self._chat_template.render(conversation)
