"""Words that are not to be generated, as the tokens that would make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringcore.params.field_checks import bad_field

__all__ = ["bad_words_token_ids"]


def bad_words_token_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Every word at the beginning of a text and after a space, which most tokenizers write into the word's token.

    encode: the ids of a text, without special tokens. Raises `InvalidRequestError` for a word without tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ")
        found = [ids for text in ((bare, f" {bare}") if bare else (word,)) if (ids := encode(text))]
        if not found:
            raise bad_field("bad_words", word, "the model's tokenizer makes no tokens of this word; leave it out")
        sequences += [ids for ids in found if ids not in sequences]
    return sequences
