"""The C functions of `ngrams.c`: an index of n-grams, for all rows of a step in one call."""

from __future__ import annotations

import ctypes
import functools
import logging

import numpy as np

from ringcore.kernels.native.compiled import NoLibrary, load_compiled

__all__ = ["NgramKernels", "NgramTables", "ngram_kernels"]

_log = logging.getLogger(__name__)
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64

MOST_LENGTHS = 8  # as in C


class NgramTables(ctypes.Structure):
    """An index as `ngrams.c` sees it: pointers into numpy arrays, which the `NgramIndex` keeps alive."""

    _fields_ = (
        *((name, _pointer) for name in ("text", "tables", "lengths")),
        *((name, _int64) for name in ("num_lengths", "num_entries")),
    )

    @classmethod
    def of(cls, text: np.ndarray, tables: np.ndarray, lengths: np.ndarray) -> NgramTables:
        """text: [size] int32. tables: [num_lengths, num_entries] int32. lengths: [num_lengths] int64, at most 8."""
        assert text.dtype == tables.dtype == np.int32
        assert text.flags.c_contiguous
        assert len(lengths) <= MOST_LENGTHS
        return cls(text.ctypes.data, tables.ctypes.data, lengths.ctypes.data, *tables.shape)


class NgramKernels:
    """Arrays of n queries or ranges are int64, [n]; see `worker.drafts.ngram_index`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add, self._find = library.ngrams_add, library.ngrams_find
        self._add.argtypes = (_pointer, _int64, *[_pointer] * 4)
        self._find.argtypes = (_pointer, _pointer, _int64, *[_pointer] * 7)
        self._add.restype = self._find.restype = None

    def add(
        self, tables: NgramTables, begins: np.ndarray, firsts: np.ndarray, pasts: np.ndarray, domains: np.ndarray
    ) -> None:
        self._add(ctypes.addressof(tables), len(begins), *_addresses(begins, firsts, pasts, domains))

    def find(
        self,
        tables: NgramTables,
        text: np.ndarray,
        ends: np.ndarray,
        begins: np.ndarray,
        domains: np.ndarray,
        owners: np.ndarray | None,
        text_begins: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """-> places and lengths [n] int64."""
        places, lengths = np.empty((2, len(ends)), dtype=np.int64)
        arrays = _addresses(ends, begins, domains, owners, text_begins, places, lengths)
        self._find(ctypes.addressof(tables), text.ctypes.data, len(ends), *arrays)
        return places, lengths


def _addresses(*arrays: np.ndarray | None) -> list[int | None]:
    assert all(array is None or (array.dtype == np.int64 and array.flags.c_contiguous) for array in arrays)
    return [None if array is None else array.ctypes.data for array in arrays]


@functools.cache
def ngram_kernels() -> NgramKernels | None:
    """None where they cannot be compiled, which is logged once."""
    try:
        return NgramKernels(load_compiled("ngrams.c"))
    except NoLibrary as reason:
        _log.info("drafts are looked up by numpy: %s", reason)
        return None
