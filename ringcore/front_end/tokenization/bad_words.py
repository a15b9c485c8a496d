"""Bad words as token sequences that must not be generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringcore.params.field_checks import bad_field

__all__ = ["bad_words_token_ids"]


def bad_words_token_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Each word as encoded at the beginning of a text and after a space, which most tokenizers merge into its token.

    encode: the ids of a text, without special tokens. Raises `InvalidRequestError` for a word without tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ")
        found = [ids for text in ((bare, f" {bare}") if bare else (word,)) if (ids := encode(text))]
        if not found:
            raise bad_field("bad_words", word, "the model's tokenizer returns no tokens for this word; leave it out")
        sequences += [ids for ids in found if ids not in sequences]
    return sequences
