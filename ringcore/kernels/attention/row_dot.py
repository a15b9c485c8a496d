"""Products of few rows by tensor cores, whose tiles have 16 rows or more but 8 columns: the rows are the columns.

No product and no register is then for rows that only pad a tile. The other factor is transposed, and transposed
pointers load it: a tile that is transposed after its load is not copied asynchronously.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["are_few", "dot_of_rows", "load_factor"]

_TILE_ROWS = 16


@triton.constexpr_function
def are_few(num_rows):
    return num_rows < _TILE_ROWS


@triton.jit
def dot_of_rows(rows, factor, total):
    """rows [m, k] @ factor [k, n] + total [m, n] float32 -> [m, n] float32; of few rows the factor is [n, k]."""
    if are_few(rows.shape[0]):
        total = tl.trans(tl.dot(factor, tl.trans(rows), tl.trans(total), input_precision="ieee"))
    else:
        total = tl.dot(rows, factor, total, input_precision="ieee")
    return total


@triton.jit
def load_factor(source, mask, num_rows: tl.constexpr):
    """source: pointers [k, n]; mask: None, or [1, n] -> what `dot_of_rows` takes with so many rows."""
    if are_few(num_rows):
        source = tl.trans(source)
    if mask is None:
        factor = tl.load(source)
    elif are_few(num_rows):
        factor = tl.load(source, mask=tl.trans(mask), other=0)
    else:
        factor = tl.load(source, mask=mask, other=0)
    return factor
