"""What finished requests wrote, to draft from for others of the same salt."""

from __future__ import annotations

import numpy as np

from ringcore.worker.drafts.ngram_index import NgramIndex, Queries, TextsOf

__all__ = ["SharedTexts"]

_NO_ONE = -1  # the owner of a place without a text


class SharedTexts:
    """A ring of tokens: a text replaces the oldest ones. Each place has the salt and the bounds of its text, so that
    nothing is read across them; what is left of a partly replaced text is dropped."""

    def __init__(self, num_tokens: int, lengths: tuple[int, ...]) -> None:
        self._tokens = np.zeros(num_tokens, dtype=np.int32)
        self._index = NgramIndex(self._tokens, lengths, num_tokens)
        self._owners = np.full(num_tokens, _NO_ONE, dtype=np.int64)
        self._begins, self._ends = np.zeros((2, num_tokens), dtype=np.int64)
        self._texts = TextsOf(self._owners, self._begins)
        self._next = 0
        self.max_context = self._index.width

    def add(self, text: np.ndarray, num_context: int, salt: int) -> None:
        """text: [n] int32, of which the first num_context tokens are there for the n-grams of those after them. The
        end of a text longer than the ring is kept."""
        text = text[-len(self._tokens) :]
        begin = self._next
        if begin + len(text) > len(self._tokens):
            self._owners[begin:] = _NO_ONE  # older texts than those at the begin of the ring
            begin = 0
        end = begin + len(text)
        self._drop(begin, end)
        self._tokens[begin:end] = text
        self._owners[begin:end] = salt
        self._begins[begin:end], self._ends[begin:end] = begin, end
        self._next = end
        bounds = begin, begin + min(max(num_context, 1), len(text)), end, salt
        self._index.add(*(np.array([bound], dtype=np.int64) for bound in bounds))

    def _drop(self, begin: int, end: int) -> None:
        """Forgets every text that has a place from `begin` to `end`."""
        first, last = begin, end
        for place in (begin, end - 1):
            if self._owners[place] != _NO_ONE:
                first, last = min(first, int(self._begins[place])), max(last, int(self._ends[place]))
        self._owners[first:last] = _NO_ONE

    def find(self, queries: Queries, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What followed the ends of n texts in others of their salts, which are the queries' domains -> tokens [n,
        num_tokens], how many tokens matched, and how many of the found ones count, [n] each, 0 for none."""
        places, lengths = self._index.find(queries, self._texts)
        begins = np.where(places < 0, 0, places)
        counts = np.where(places < 0, 0, np.minimum(self._ends[begins] - begins, num_tokens))
        inside = np.minimum(begins[:, None] + np.arange(num_tokens), len(self._tokens) - 1)
        return self._tokens[inside], lengths, counts
