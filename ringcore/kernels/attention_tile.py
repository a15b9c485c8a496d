"""One tile of paged attention: where its keys and values lie, and the running softmax with them.

The softmax is computed online in base 2 (Milakov and Gimelshein, 2018; FlashAttention-2).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["HIDDEN", "attend_tile", "tile_blocks"]

HIDDEN = tl.constexpr(-1e30)  # a score of nothing: finite, so that a tile in which a row sees nothing makes no NaN


@triton.jit
def _places(
    start, first, end, block_size: tl.constexpr, window: tl.constexpr, tile_tokens: tl.constexpr, masked: tl.constexpr
):
    """How far behind the beginning of `start`'s block the tile's tokens lie: known to the compiler, where it can be.

    masked: in place of tokens that nobody sees, the nearest that somebody sees: a mask would cost more than to read it.
    """
    places = tl.arange(0, tile_tokens)
    if masked:
        places = tl.minimum(places, tl.maximum(end - start, 1) - 1)
        if window > 0:
            places = tl.maximum(places, first - start)
    if tile_tokens % block_size != 0:  # else a tile begins where a block does
        places += start % block_size
    return places


@triton.jit
def tile_blocks(
    table,  # pointer to the sequence's row of the block table
    start,  # the tile's first token, a multiple of tile_tokens
    first,  # tokens before it are not read; 0 without a window
    end,  # nor tokens from it on; of a tile that begins there or behind nothing is read, not even the table
    block_size: tl.constexpr,
    window: tl.constexpr,  # 0: none
    tile_tokens: tl.constexpr,
):
    """The block ids of a tile: one for each of its tokens, or one number if that is the block of all."""
    table += start // block_size
    if block_size % tile_tokens == 0:
        blocks = tl.load(table, mask=start < end, other=0)
    else:
        places = _places(start, first, end, block_size, window, tile_tokens, True)
        blocks = tl.load(table + places // block_size, mask=start < end, other=0)
    return blocks


@triton.jit
def attend_tile(
    query,  # [rows, width]
    best,  # [rows] float32: the largest score so far, times scale_log2
    total,  # [rows] float32: the sum of the weights so far
    attended,  # [rows, width] float32: the weighted sum of the values so far
    blocks,  # what `tile_blocks` says
    pages,  # pointer to the KV head's keys in block 0
    start,  # as `tile_blocks` has it, and so the next two
    first,
    end,
    positions,  # of the rows: [rows, 1], or one number for all
    scale_log2,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,  # 0: none
    tile_tokens: tl.constexpr,
    masked: tl.constexpr,  # whether some row does not see some token of the tile
):
    """The running softmax of `rows` queries with one more tile of keys and values -> (best, total, attended).

    The block ids are an argument, so that a loop can load those of the next tile meanwhile: a load behind another load
    of the same iteration gets half the buffers from the compiler.
    What nobody sees is not read: in its slots may be anything, NaN among it, and a weight of zero would not hide that.
    """
    half_page: tl.constexpr = num_kv_heads * block_size * head_size
    dim = tl.arange(0, width)[None, :]
    offsets = _places(start, first, end, block_size, window, tile_tokens, masked) % block_size
    source = pages + (offsets * head_size)[:, None] + dim
    page = blocks.to(tl.int64) * (2 * half_page)  # from block 0 on: blocks may be far apart
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
        # Scaled before they are hidden: HIDDEN scaled in one fused product, less the same rounded, is not 0.
        scores = tl.where(visible, scores * scale_log2, HIDDEN)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
    else:
        new_best = tl.maximum(best, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_best[:, None])
    fade = tl.exp2(best - new_best)
    total = total * fade + tl.sum(weights, 1)
    attended = tl.dot(weights.to(values.dtype), values, attended * fade[:, None], input_precision="ieee")
    return new_best, total, attended
