"""An index of the n-grams of a text: where each stood last, by hash tables in numpy that serve many rows at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["NgramIndex", "ngram_lengths"]

_MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX = np.uint64(0xD6E8_FEB8_6659_FD93)
_SHIFT = np.uint64(32)
_NO_TOKEN = -1  # before the begin of a text

# Places [n] and the indices [n] of the queries that found them -> the first place of each one's text, [n], and whether
# the query may have what is there, [n] bool.
Bounds = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def ngram_lengths(min_match: int) -> tuple[int, ...]:
    """The lengths that are indexed: a longer n-gram tells the right one of several occurrences."""
    return min_match, 2 * min_match, 4 * min_match


class NgramIndex:
    """Direct-mapped tables, one for each length: an n-gram replaces what its entry had. So their size is fixed, adding
    and finding take constant time, and what is found is compared with the text: a collision costs a match, and never
    makes a wrong one.

    Domains: n-grams of one domain do not replace those of another by being equal. Windows: the last tokens before a
    place, [n, width] int64, the nearest first, `_NO_TOKEN` before the begin of their text.
    """

    def __init__(self, text: np.ndarray, lengths: tuple[int, ...], num_tokens: int) -> None:
        """text: [size] int32, which others write. lengths: ascending. num_tokens: how many it is to have n-grams of."""
        self._text, self.lengths, self.width = text, lengths, lengths[-1]
        num_entries = 1 << max(10, (2 * num_tokens - 1).bit_length())
        # np.zeros commits pages on first touch. An entry is a place + 1.
        self._tables = np.zeros((len(lengths), num_entries), dtype=np.int64 if text.size >= 1 << 31 else np.int32)
        self._mask = np.uint64(num_entries - 1)
        self._powers = np.cumprod(np.full(self.width, _MULTIPLIER))
        self._back = np.arange(1, self.width + 1)

    def windows(self, ends: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """ends: [n] places; begins: [n], the first place of each text."""
        places = ends[:, None] - self._back
        inside = places >= begins[:, None]
        return np.where(inside, self._text[np.where(inside, places, 0)], _NO_TOKEN).astype(np.int64)

    def hashes(self, windows: np.ndarray) -> np.ndarray:
        """[n, num_lengths] uint64; of a window that has fewer tokens as well: no match is that short."""
        sums = np.cumsum(windows.view(np.uint64) * self._powers, axis=1)
        return sums[:, [length - 1 for length in self.lengths]]

    def add(self, ends: np.ndarray, hashes: np.ndarray, domains: np.ndarray) -> None:
        """The n-grams [n, num_lengths] of one text or several that end before the places ends [n]; of equal ones the
        last stays."""
        for table, of_length in zip(self._tables, hashes.T, strict=True):
            table[self._entries(of_length, domains)] = ends + 1

    def find(
        self, hashes: np.ndarray, windows: np.ndarray, domains: np.ndarray, bounds: Bounds
    ) -> tuple[np.ndarray, np.ndarray]:
        """-> the place [n] after the last occurrence of each window's longest n-gram that has one, -1 for none; and how
        many of its tokens are the same, [n], 0 for none."""
        places, matched = np.full(len(windows), -1), np.zeros(len(windows), dtype=np.int64)
        for index in range(len(self.lengths) - 1, -1, -1):
            left = np.flatnonzero(places < 0)
            if not len(left):
                break
            found = self._tables[index][self._entries(hashes[left, index], domains[left])].astype(np.int64) - 1
            is_entry = found >= 0
            left, found = left[is_entry], found[is_entry]
            begins, allowed = bounds(found, left)
            same = (self.windows(found, begins) == windows[left]) & (windows[left] != _NO_TOKEN)
            length = np.where(same.all(axis=1), self.width, same.argmin(axis=1))
            good = allowed & (length >= self.lengths[index])
            places[left[good]], matched[left[good]] = found[good], length[good]
        return places, matched

    def _entries(self, hashes: np.ndarray, domains: np.ndarray) -> np.ndarray:
        mixed = (hashes + domains.astype(np.uint64) * _MULTIPLIER) * _MIX
        entries: np.ndarray = ((mixed ^ (mixed >> _SHIFT)) & self._mask).astype(np.int64)
        return entries
