"""The types of prompts, for annotations: plain dicts, under vLLM's names."""

from __future__ import annotations

from typing import Any, NotRequired, Required, TypedDict

__all__ = ["ChatPrompt", "TextPrompt", "TokensPrompt"]


class _PromptOptions(TypedDict, total=False):
    request_id: str
    cache_salt: str
    priority: int
    truncate_prompt_tokens: int  # the last ones are kept; -1: as many as leave room for max_tokens


class TextPrompt(_PromptOptions):
    """A prompt of text. add_special_tokens: by default true."""

    prompt: Required[str]
    add_special_tokens: NotRequired[bool]


class ChatPrompt(_PromptOptions):
    """A conversation, as a prompt. add_special_tokens: besides those of the chat template; by default false."""

    messages: Required[list[dict[str, Any]]]
    add_special_tokens: NotRequired[bool]


class TokensPrompt(_PromptOptions):
    """A prompt of token ids."""

    prompt_token_ids: Required[list[int]]
