"""An index of the n-grams of a text: where each stood last, by hash tables that serve many rows at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ringcore.kernels.native.ngrams import NgramTables, ngram_kernels

__all__ = ["NgramIndex", "Queries", "TextsOf", "ngram_lengths"]

_MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX = np.uint64(0xD6E8_FEB8_6659_FD93)
_SHIFT = np.uint64(32)
_NO_TOKEN = -1  # before the begin of a text
_CHUNK = 1 << 14  # n-grams that numpy adds at once


class Queries(NamedTuple):
    """The last tokens of n texts; places are indices into `text`."""

    text: np.ndarray  # [size] int32
    begins: np.ndarray  # [n] int64: where each text begins
    ends: np.ndarray  # [n] int64: one past its last token
    domains: np.ndarray  # [n] int64


class TextsOf(NamedTuple):
    """Whose each place of an indexed text is, where a query may have what is of its domain."""

    domains: np.ndarray  # [size] int64
    begins: np.ndarray  # [size] int64: the begin of the text that the place is in


def ngram_lengths(min_match: int) -> tuple[int, ...]:
    """The lengths that are indexed: a longer n-gram tells the right one of several occurrences."""
    return min_match, 2 * min_match, 4 * min_match


class NgramIndex:
    """Direct-mapped tables, one for each length: an n-gram replaces what its entry had. So their size is fixed, adding
    and finding take constant time, and what is found is compared with the text: a collision costs a match, and never
    makes a wrong one.

    Domains: n-grams of one domain do not replace those of another by being equal. Both operations are C functions where
    the host has a compiler, else numpy, with the same tables and results.
    """

    def __init__(self, text: np.ndarray, lengths: tuple[int, ...], num_tokens: int, native: bool = True) -> None:
        """text: [size] int32, which others write. lengths: ascending. num_tokens: how many it is to have n-grams of."""
        self._text, self.lengths, self.width = text, lengths, lengths[-1]
        num_entries = 1 << max(10, (2 * num_tokens - 1).bit_length())
        # np.zeros commits pages on first touch. An entry is a place + 1.
        is_wide = text.size >= 1 << 31
        self._tables = np.zeros((len(lengths), num_entries), dtype=np.int64 if is_wide else np.int32)
        self._lengths = np.array(lengths, dtype=np.int64)
        self._kernels = ngram_kernels() if native and not is_wide else None
        if self._kernels is not None:
            self._native = NgramTables.of(text, self._tables, self._lengths)
        self._mask = np.uint64(num_entries - 1)
        self._powers = np.cumprod(np.full(self.width, _MULTIPLIER))
        self._back = np.arange(1, self.width + 1)

    def add(self, begins: np.ndarray, firsts: np.ndarray, pasts: np.ndarray, domains: np.ndarray) -> None:
        """Of texts that begin at begins [n] the n-grams that end before the places firsts[i] to pasts[i], exclusive; of
        equal ones the last stays. All are [n] int64."""
        if self._kernels is not None:
            self._kernels.add(self._native, begins, firsts, pasts, domains)
            return
        counts = pasts - firsts
        begins, domains = np.repeat(begins, counts), np.repeat(domains, counts)
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        ends = np.repeat(firsts, counts) + offsets
        for begin in range(0, len(ends), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            hashes = self._hashes(_windows(self._text, ends[chunk], begins[chunk], self._back))
            for table, of_length in zip(self._tables, hashes.T, strict=True):
                table[self._entries(of_length, domains[chunk])] = ends[chunk] + 1

    def find(self, queries: Queries, texts: TextsOf | None = None) -> tuple[np.ndarray, np.ndarray]:
        """-> the place [n] after the last occurrence of each query's longest n-gram that has one, -1 for none; and how
        many of its last tokens are the same, [n], 0 for none.

        texts: None: the index is of the queries' texts, and a query finds what is in its own."""
        text, begins, ends, domains = queries
        if self._kernels is not None:
            of_place = (None, None) if texts is None else texts
            return self._kernels.find(self._native, text, ends, begins, domains, *of_place)
        windows = _windows(text, ends, begins, self._back)
        hashes = self._hashes(windows)
        places, matched = np.full(len(ends), -1), np.zeros(len(ends), dtype=np.int64)
        for index in range(len(self.lengths) - 1, -1, -1):
            left = np.flatnonzero(places < 0)
            found = self._tables[index][self._entries(hashes[left, index], domains[left])].astype(np.int64) - 1
            is_entry = found >= 0
            left, found = left[is_entry], found[is_entry]
            if texts is None:
                text_begins, allowed = begins[left], (found > begins[left]) & (found < ends[left])
            else:
                text_begins, allowed = texts.begins[found], texts.domains[found] == domains[left]
            found_windows = _windows(self._text, found, text_begins, self._back)
            same = (found_windows == windows[left]) & (windows[left] != _NO_TOKEN)
            length = np.where(same.all(axis=1), self.width, same.argmin(axis=1))
            good = allowed & (length >= self.lengths[index])
            places[left[good]], matched[left[good]] = found[good], length[good]
        return places, matched

    def _hashes(self, windows: np.ndarray) -> np.ndarray:
        """[n, num_lengths] uint64; of a window that has fewer tokens as well: no match is that short."""
        sums = np.cumsum(windows.view(np.uint64) * self._powers, axis=1)
        return sums[:, [length - 1 for length in self.lengths]]

    def _entries(self, hashes: np.ndarray, domains: np.ndarray) -> np.ndarray:
        mixed = (hashes + domains.astype(np.uint64) * _MULTIPLIER) * _MIX
        entries: np.ndarray = ((mixed ^ (mixed >> _SHIFT)) & self._mask).astype(np.int64)
        return entries


def _windows(text: np.ndarray, ends: np.ndarray, begins: np.ndarray, back: np.ndarray) -> np.ndarray:
    """The last tokens before the places ends [n], of texts that begin at begins [n]: [n, width] int64, the nearest
    first, `_NO_TOKEN` before the begin."""
    places = ends[:, None] - back
    inside = places >= begins[:, None]
    return np.where(inside, text[np.where(inside, places, 0)], _NO_TOKEN).astype(np.int64)
