"""Synthetic prompts of given lengths: those with one prefix id share it, all others differ from the first block on."""

from __future__ import annotations

import numpy as np

__all__ = ["PromptMaker"]

_POOL_TOKENS = 1 << 16


class PromptMaker:
    """Token ids for requests of a trace. A prompt is [its prefix][a unique number in digits][padding].

    The prefix cache matches from the first block on, so the unique number comes first; the padding may be the same in
    all prompts. It is a slice of one list of random tokens, which is cheap.
    """

    def __init__(self, vocab_size: int, num_numbers: int) -> None:
        """num_numbers: requests and prefixes in the trace, at most."""
        self._vocab_size = vocab_size
        self._num_digits = 1
        while vocab_size**self._num_digits < 2 * num_numbers + 2:
            self._num_digits += 1
        pool = np.random.default_rng(0).integers(vocab_size, size=_POOL_TOKENS)
        self._pool: list[int] = pool.tolist()
        self._prefixes: dict[int, list[int]] = {}

    def make(self, index: int, num_tokens: int, prefix: int, num_prefix_tokens: int) -> list[int]:
        """The prompt of request `index`; `prefix` is used only if num_prefix_tokens > 0."""
        if not num_prefix_tokens:
            return self._numbered(2 * index, num_tokens)
        shared = self._prefixes.get(prefix, [])
        if len(shared) < num_prefix_tokens:
            shared = self._prefixes[prefix] = self._numbered(2 * prefix + 1, num_prefix_tokens)
        if num_prefix_tokens == num_tokens:
            return shared[:num_tokens]
        return shared[:num_prefix_tokens] + self._numbered(2 * index, num_tokens - num_prefix_tokens)

    def _numbered(self, number: int, num_tokens: int) -> list[int]:
        tokens, rest = [], number
        for _ in range(self._num_digits):
            rest, digit = divmod(rest, self._vocab_size)
            tokens.append(digit)
        missing = num_tokens - len(tokens)
        while missing > 0:
            tokens += self._pool[:missing]
            missing -= _POOL_TOKENS
        return tokens[:num_tokens]
