"""Spans of a context for batch-invariant attention, and the merge of their partials.

A token's output is that of its spans, each with a softmax of its own, merged in their order. A span begins where a
position says, and is computed tile by tile by one program; so which program has which span does not show in a result: a
prompt's program merges all of them, a decode's those of its tile range, and what other programs computed of the same
context comes as a partial for each span.

The first 64 tiles of a context are spans of two, and every further power of two has 16 spans: few enough partials for
long contexts, small enough steps for an even split.

    tile    0 2 4 ...  62 64  68  72 ...  124 128     136     144 ...
    span    |0|1|2|...|31| 32| 33| 34|...| 47|  48   |  49   | ...

Where a window or chunks bound what is read, all spans are of one length (`local_shift`).

Everything that is merged has two numbers, of which `merge_partials` makes two again: a weighted mean of values, and the
log-sum-exp of its scores. A span of which a token sees nothing has the log-sum-exp MASK_VALUE and adds 0. The kernels
are compiled without fused multiply-adds (`FIXED_ROUNDINGS`): which a compiler fuses may differ between two kernels.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = [
    "FIXED_ROUNDINGS",
    "SUMS",
    "local_shift",
    "merge_partials",
    "span_end",
    "span_index",
    "span_partial",
    "span_start",
    "span_tile_tokens",
    "span_warps",
]

FIXED_ROUNDINGS: dict[str, Any] = {"enable_fp_fusion": False}  # keyword arguments of a launch

SUMS = tl.constexpr(8)  # columns of a row's sum of weights, all alike: the fewest of a product of tensor cores

_SHIFT = tl.constexpr(1)  # log2 of the tiles of the shortest span
_SPANS = 16  # of a power of two of tiles, and of a window
_SPANS_SHIFT = tl.constexpr(_SPANS.bit_length() - 1)


def local_shift(reach: int | None, tile_tokens: int) -> int:
    """log2 of the tiles of every span where no token sees more than `reach` tokens; None: all of them, gives 0."""
    if reach is None:
        return 0
    return max(_SHIFT.value, (-(-reach // (tile_tokens * _SPANS)) - 1).bit_length())


def span_tile_tokens(width: int, itemsize: int) -> int:
    """Of a tile, for heads of `width` numbers, padded, of `itemsize` bytes."""
    if itemsize == 4:
        return 32 if width <= 64 else 16
    return 64 if width <= 128 else 32


def span_warps(width: int) -> int:
    """Of a program with 64 rows of queries: wide heads need the registers for two sums of values."""
    return 4 if width <= 128 else 8


@triton.jit
def _span_shift(tile, local_shift: tl.constexpr):
    """log2 of the tiles of the span that holds `tile`."""
    if local_shift > 0:
        shift = tile * 0 + local_shift
    else:
        power = (tile.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # log2, rounded down; negative for 0
        shift = tl.maximum(power - _SPANS_SHIFT, _SHIFT)
    return shift


@triton.jit
def span_start(tile, local_shift: tl.constexpr):
    """The first tile of the span that holds `tile`, both counted from the start of the context; int32."""
    shift = _span_shift(tile, local_shift)
    return tile >> shift << shift


@triton.jit
def span_end(tile, local_shift: tl.constexpr):
    """The first tile after that span."""
    shift = _span_shift(tile, local_shift)
    return ((tile >> shift) + 1) << shift


@triton.jit
def span_index(tile, local_shift: tl.constexpr):
    """Which span of the context holds `tile`."""
    shift = _span_shift(tile, local_shift)
    index = tile >> shift
    if local_shift == 0:  # each power of two after the first ones begins where 16 of its spans would
        index += (shift - _SHIFT) << _SPANS_SHIFT
    return index


@triton.jit
def span_partial(row_max, row_sum, acc):
    """What `attend_tile` gave for a span, row_sum [rows, SUMS] -> its partial: (mean [rows, width], log_sum_exp [rows,
    1])."""
    total = tl.max(row_sum, 1)[:, None]  # all columns are alike
    return acc * (1.0 / total), row_max[:, None] + tl.log2(total)


@triton.jit
def merge_partials(mean, log_sum_exp, next_mean, next_log_sum_exp):
    """A partial and the next one in order -> their partial: (mean, log_sum_exp), in base 2."""
    largest = tl.maximum(log_sum_exp, next_log_sum_exp)
    share = tl.exp2(log_sum_exp - largest)
    next_share = tl.exp2(next_log_sum_exp - largest)
    total = share + next_share
    scale = 1.0 / total
    return mean * (share * scale) + next_mean * (next_share * scale), largest + tl.log2(total)
