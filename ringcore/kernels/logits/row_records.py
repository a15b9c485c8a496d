"""Records of row parameters as int32 words. Their layout is a structured numpy dtype of 32- and 64-bit fields, which
the caller declares: kernels copy whole records, and read the fields that they use by word offset.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

__all__ = ["load_float32", "load_int64", "num_words", "word_of"]


def num_words(record: np.dtype) -> int:
    assert record.itemsize % 4 == 0, record
    return record.itemsize // 4


def word_of(record: np.dtype, name: str) -> int:
    """The first word of a field."""
    assert record.fields is not None, record
    return record.fields[name][1] // 4


@triton.jit
def load_float32(words):
    return tl.load(words).to(tl.float32, bitcast=True)


@triton.jit
def load_int64(words):
    low = tl.load(words).to(tl.uint32, bitcast=True).to(tl.int64)
    return low | (tl.load(words + 1).to(tl.int64) << 32)
