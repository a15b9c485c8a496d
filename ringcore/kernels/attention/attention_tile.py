"""One tile of paged attention: its block ids, its K/V loads, its scores, and the online softmax update.

The softmax is computed online in base 2 (Milakov and Gimelshein, 2018; FlashAttention-2).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ringcore.kernels.attention.fp8_kv import expand_codes, load_exponents, multiplies_codes, weighted_codes
from ringcore.kernels.attention.row_dot import are_few, dot_of_rows, load_factor
from ringcore.kernels.packed_math import power_of_2

__all__ = ["MASK_VALUE", "attend_tile", "capped", "score_factors", "sink_share", "tile_blocks", "token_offsets"]

MASK_VALUE = tl.constexpr(-1e30)  # of a masked score: finite, so that a tile whose scores are all masked gives no NaN


@triton.jit
def token_offsets(
    start, first, end, block_size: tl.constexpr, is_local: tl.constexpr, tile_tokens: tl.constexpr, masked: tl.constexpr
):
    """Offsets of the tile's tokens from the start of `start`'s block: known to the compiler where possible.

    masked: out-of-bounds tokens are clamped to the nearest visible token: a load mask would cost more than the
    redundant read.
    """
    offsets = tl.arange(0, tile_tokens)
    if masked:
        offsets = tl.minimum(offsets, tl.maximum(end - start, 1) - 1)
        if is_local:
            offsets = tl.maximum(offsets, first - start)
    if tile_tokens % block_size != 0:  # else tiles begin at block boundaries
        offsets += start % block_size
    return offsets


@triton.jit
def tile_blocks(
    table,  # pointer to the sequence's row of the block table
    start,  # the tile's first token, a multiple of tile_tokens
    first,  # tokens before it are not read; 0 where is_local is not set
    end,  # nor tokens from it on; of a tile that begins at or after it nothing is read, not even the table
    block_size: tl.constexpr,
    is_local: tl.constexpr,  # whether there is a window, or chunks
    tile_tokens: tl.constexpr,
):
    """The block ids of a tile: one per token, or a scalar if one block holds the whole tile."""
    table += start // block_size
    if block_size % tile_tokens == 0:
        blocks = tl.load(table, mask=start < end, other=0)
    else:
        offsets = token_offsets(start, first, end, block_size, is_local, tile_tokens, True)
        blocks = tl.load(table + offsets // block_size, mask=start < end, other=0)
    return blocks


@triton.jit
def attend_tile(
    query,  # [rows, width]
    row_max,  # [rows] float32: the largest score so far, times scale_log2
    row_sum,  # [rows] float32: the sum of the weights so far; or [rows, columns], all alike: see below
    acc,  # [rows, v_width] float32: the weighted sum of the values so far; columns: `dims_of_columns`
    blocks,  # from `tile_blocks`
    pages,  # pointer to the KV head's keys in block 0
    exponents,  # in FP8 likewise to its keys' exponents
    start,  # this and the next two as for `tile_blocks`
    first,
    end,
    positions,  # of the query rows: [rows, 1], or a scalar
    scale_log2,  # this and the next from `score_factors`
    softcap_log2,
    page_size: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,  # head_size, padded; likewise the next two
    v_head_size: tl.constexpr,
    v_width: tl.constexpr,
    block_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    exponent_offset: tl.constexpr,  # above 0: FP8
    window: tl.constexpr,  # 0: none
    chunk: tl.constexpr,  # of chunked attention; 0: none
    tile_tokens: tl.constexpr,
    masked: tl.constexpr,  # whether causality, the window, the chunk or bounds mask a score of the tile
):
    """The online softmax of `rows` queries, updated with one more tile of keys and values -> (row_max, row_sum, acc).

    The block ids are an argument, so that a loop can load those of the next tile meanwhile: a load whose address
    depends on another load of the same iteration gets half the pipeline stages from the compiler.
    Tokens that no row sees are not read: their slots may hold anything, NaN included, and a weight of zero would not
    mask that.
    A row_sum of columns is added up by tensor cores, of weights rounded as for the values: in an order that does not
    depend on how rows and tokens are laid out over threads, which differs between tiles of few and of many rows.
    """
    is_local: tl.constexpr = window + chunk > 0
    dim = tl.arange(0, width)[None, :]
    offsets = token_offsets(start, first, end, block_size, is_local, tile_tokens, masked) % block_size
    source = pages + (offsets * token_stride)[:, None] + dim
    page = blocks.to(tl.int64) * page_size  # int64: the cache may be larger than 2^31 elements
    source += page if block_size % tile_tokens == 0 else page[:, None]
    if v_head_size == head_size:
        v_dim = dim
        v_source = source
    else:
        v_dim = tl.arange(0, v_width)[None, :]
        v_source = pages + (offsets * token_stride)[:, None] + v_dim
        v_source += page if block_size % tile_tokens == 0 else page[:, None]
    by_codes: tl.constexpr = exponent_offset > 0 and multiplies_codes(query.shape[0], query.dtype)
    if width == head_size:
        keys = tl.load(source)
    else:
        keys = tl.load(source, mask=dim < head_size, other=0)
    num_rows: tl.constexpr = query.shape[0]
    if not by_codes:
        values = load_factor(v_source + value_offset, None if v_width == v_head_size else v_dim < v_head_size, num_rows)
    if exponent_offset > 0:
        key_exponents, value_exponents = load_exponents(exponents + page + offsets, block_size)
    no_scores = tl.zeros([num_rows, tile_tokens], tl.float32)
    if by_codes:
        keys = expand_codes(keys, tl.float16)
        scores = dot_of_rows(query.to(tl.float16), keys if are_few(num_rows) else tl.trans(keys), no_scores)
        scores *= (power_of_2(key_exponents) * scale_log2)[None, :]
        scale_log2 = 1.0
    else:
        if exponent_offset > 0:
            keys = (expand_codes(keys, tl.float32) * power_of_2(key_exponents)[:, None]).to(query.dtype)
            factors = power_of_2(value_exponents)
            factors = factors[None, :] if are_few(num_rows) else factors[:, None]
            values = (expand_codes(values, tl.float32) * factors).to(query.dtype)
        scores = dot_of_rows(query, keys if are_few(num_rows) else tl.trans(keys), no_scores)
    if softcap_log2 is not None:
        scores = capped(scores, scale_log2, softcap_log2)
    if masked:
        tokens = start + tl.arange(0, tile_tokens)
        visible = tokens[None, :] <= positions
        if window > 0:
            visible &= tokens[None, :] > positions - window
        if chunk > 0:
            visible &= tokens[None, :] >= positions // chunk * chunk
        # Scaled before masking: MASK_VALUE scaled in a fused multiply-add, minus the same value rounded, is not 0.
        scores = tl.where(visible, scores * scale_log2 if softcap_log2 is None else scores, MASK_VALUE)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
    elif softcap_log2 is not None:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    if len(row_sum.shape) == 2:
        ones = tl.full([tile_tokens, row_sum.shape[1]], 1.0, values.dtype)
        row_sum = tl.dot(weights.to(values.dtype), ones, row_sum * rescale[:, None], input_precision="ieee")
    else:
        row_sum = row_sum * rescale + tl.sum(weights, 1)
    if by_codes:
        largest = tl.max(value_exponents, 0)
        relative = power_of_2(tl.maximum(127 + value_exponents - largest, 0))  # from 1 down
        weights = (weights * relative[None, :]).to(tl.float16)
        tokens = pages + value_offset + page + offsets * token_stride
        acc = acc * rescale[:, None] + weighted_codes(weights, tokens, v_head_size, v_width) * power_of_2(largest)
    else:
        acc = dot_of_rows(weights.to(values.dtype), values, acc * rescale[:, None])
    return new_max, row_sum, acc


@triton.jit
def capped(scores, scale_log2, softcap_log2):
    """cap * tanh(score / cap), in base 2: tanh(x) = 1 - 2 / (1 + exp(2 x)), which overflows to 1."""
    return softcap_log2 - 2.0 * softcap_log2 / (1.0 + tl.exp2(scores * scale_log2))


@triton.jit
def sink_share(sinks, in_bounds, log_sum_exp):
    """What a sink, a logit without a value, leaves to the values: the sum of the other weights, over it and its own.

    sinks: pointers, of the shape of log_sum_exp or one that broadcasts to it. log_sum_exp: of the scores, base 2.
    """
    sink = tl.load(sinks, mask=in_bounds, other=0.0).to(tl.float32)
    return 1.0 / (1.0 + tl.exp2(sink * 1.4426950408889634 - log_sum_exp))


def score_factors(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """(scale_log2, softcap_log2) of `attend_tile`: a score in base 2 is dot * scale_log2, or with a softcap
    softcap_log2 * (1 - 2 / (1 + 2^(dot * scale_log2)))."""
    assert scale > 0
    if softcap is None:
        return scale * math.log2(math.e), None
    assert softcap > 0
    return 2 * scale / softcap * math.log2(math.e), softcap * math.log2(math.e)
