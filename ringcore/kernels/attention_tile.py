"""One tile of paged attention: its block ids, its K/V loads, and the online softmax update.

The softmax is computed online in base 2 (Milakov and Gimelshein, 2018; FlashAttention-2).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["MASK_VALUE", "attend_tile", "tile_blocks"]

MASK_VALUE = tl.constexpr(-1e30)  # of a masked score: finite, so that a tile whose scores are all masked gives no NaN


@triton.jit
def _token_offsets(
    start, first, end, block_size: tl.constexpr, window: tl.constexpr, tile_tokens: tl.constexpr, masked: tl.constexpr
):
    """Offsets of the tile's tokens from the start of `start`'s block: known to the compiler where possible.

    masked: out-of-bounds tokens are clamped to the nearest visible token: a load mask would cost more than the
    redundant read.
    """
    offsets = tl.arange(0, tile_tokens)
    if masked:
        offsets = tl.minimum(offsets, tl.maximum(end - start, 1) - 1)
        if window > 0:
            offsets = tl.maximum(offsets, first - start)
    if tile_tokens % block_size != 0:  # else tiles begin at block boundaries
        offsets += start % block_size
    return offsets


@triton.jit
def tile_blocks(
    table,  # pointer to the sequence's row of the block table
    start,  # the tile's first token, a multiple of tile_tokens
    first,  # tokens before it are not read; 0 without a window
    end,  # nor tokens from it on; of a tile that begins at or after it nothing is read, not even the table
    block_size: tl.constexpr,
    window: tl.constexpr,  # 0: none
    tile_tokens: tl.constexpr,
):
    """The block ids of a tile: one per token, or a scalar if one block holds the whole tile."""
    table += start // block_size
    if block_size % tile_tokens == 0:
        blocks = tl.load(table, mask=start < end, other=0)
    else:
        offsets = _token_offsets(start, first, end, block_size, window, tile_tokens, True)
        blocks = tl.load(table + offsets // block_size, mask=start < end, other=0)
    return blocks


@triton.jit
def attend_tile(
    query,  # [rows, width]
    row_max,  # [rows] float32: the largest score so far, times scale_log2
    row_sum,  # [rows] float32: the sum of the weights so far
    acc,  # [rows, width] float32: the weighted sum of the values so far
    blocks,  # from `tile_blocks`
    pages,  # pointer to the KV head's keys in block 0
    start,  # this and the next two as for `tile_blocks`
    first,
    end,
    positions,  # of the query rows: [rows, 1], or a scalar
    scale_log2,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,  # 0: none
    tile_tokens: tl.constexpr,
    masked: tl.constexpr,  # whether causality, the window or bounds mask a score of the tile
):
    """The online softmax of `rows` queries, updated with one more tile of keys and values -> (row_max, row_sum, acc).

    The block ids are an argument, so that a loop can load those of the next tile meanwhile: a load whose address
    depends on another load of the same iteration gets half the pipeline stages from the compiler.
    Tokens that no row sees are not read: their slots may hold anything, NaN included, and a weight of zero would not
    mask that.
    """
    half_page: tl.constexpr = num_kv_heads * block_size * head_size
    dim = tl.arange(0, width)[None, :]
    offsets = _token_offsets(start, first, end, block_size, window, tile_tokens, masked) % block_size
    source = pages + (offsets * head_size)[:, None] + dim
    page = blocks.to(tl.int64) * (2 * half_page)  # int64: the cache may be larger than 2^31 elements
    source += page if block_size % tile_tokens == 0 else page[:, None]
    if width == head_size:
        keys = tl.load(source)
        values = tl.load(source + half_page)
    else:
        keys = tl.load(source, mask=dim < head_size, other=0.0)
        values = tl.load(source + half_page, mask=dim < head_size, other=0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if masked:
        tokens = start + tl.arange(0, tile_tokens)
        visible = tokens[None, :] <= positions
        if window > 0:
            visible &= tokens[None, :] > positions - window
        # Scaled before masking: MASK_VALUE scaled in a fused multiply-add, minus the same value rounded, is not 0.
        scores = tl.where(visible, scores * scale_log2, MASK_VALUE)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return new_max, row_sum, acc
