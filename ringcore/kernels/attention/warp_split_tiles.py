"""Tiles of `warp_split_decode`: which token each warp reads, and the asynchronous copies of keys and values.

A tile has 16 tokens for each warp, which is what a block has, or a part of it: one page offset serves them all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ringcore.kernels.attention.decode_tiles import next_tile
from ringcore.kernels.attention.tile_ranges import context_tiles

__all__ = ["WARP_TOKENS", "copy_layout", "copy_tile", "last_key", "load_query", "next_of_range", "warp_pages"]

WARP_TOKENS = gl.constexpr(16)


@gluon.constexpr_function
def copy_layout(head_size, num_warps):
    """Of a tile [num_warps, WARP_TOKENS, head_size]: a warp copies its own tokens, 16 bytes a thread."""
    lanes = head_size // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [num_warps, 1, 1], [2, 1, 0])


@gluon.jit
def _warp_tokens(begin, first, end, num_warps: gl.constexpr, layout: gl.constexpr):
    """[num_warps]: the first token that each warp reads: of its own, or of the nearest with a token in bounds."""
    warp = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    token = gl.minimum(begin + warp * WARP_TOKENS, gl.maximum(end - 1, 0) // WARP_TOKENS * WARP_TOKENS)
    return gl.maximum(token, first // WARP_TOKENS * WARP_TOKENS)


@gluon.jit
def warp_pages(
    table, begin, first, end, page_size: gl.constexpr, block_size: gl.constexpr, head_size: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """[num_warps] int64: the offset, in elements, of the first key that each warp copies of the tile from `begin` on.

    table: the sequence's row of the block table. first and end: tokens before and from there on are not read.
    """
    token = _warp_tokens(begin, first, end, num_warps, copy_layout(head_size, num_warps))
    offset = gl.load(table + token // block_size).to(gl.int64) * page_size
    if block_size > WARP_TOKENS:
        offset += token % block_size * head_size
    return offset


@gluon.jit
def _copy_rows(keys, values, pages, offsets, row, value_offset: gl.constexpr):
    """row: [1 or num_warps, WARP_TOKENS]: of a warp's tokens, counted from its first."""
    head_size: gl.constexpr = keys.shape[2]
    layout: gl.constexpr = copy_layout(head_size, keys.shape[0])
    dim = gl.expand_dims(gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, gl.SliceLayout(0, layout))), 0), 0)
    source = gl.expand_dims(gl.expand_dims(pages + offsets, 1), 2) + dim
    source = source + gl.expand_dims(row * head_size, 2)
    async_copy.async_copy_global_to_shared(keys, source)
    async_copy.async_copy_global_to_shared(values, source + value_offset)


@gluon.jit
def copy_tile(keys, values, pages, offsets, begin, first, end, value_offset: gl.constexpr):
    """Copies the tile from token `begin` on to keys and values, [num_warps, WARP_TOKENS, head_size] in shared memory.

    pages: pointer to the KV head's keys in block 0. offsets: from `warp_pages`, like first and end. A token out of
    bounds is the nearest one in bounds: it is masked, and its slot may hold anything, NaN included.
    """
    num_warps: gl.constexpr = keys.shape[0]
    layout: gl.constexpr = copy_layout(keys.shape[2], num_warps)
    row = gl.expand_dims(gl.arange(0, WARP_TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0)
    if (begin >= first) & (begin + WARP_TOKENS * num_warps <= end):  # at distances that the compiler knows
        _copy_rows(keys, values, pages, offsets, row, value_offset)
    else:
        token = gl.expand_dims(_warp_tokens(begin, first, end, num_warps, layout), 1)
        nearest = gl.maximum(gl.minimum(row, gl.maximum(end, 1) - 1 - token), first - token)
        _copy_rows(keys, values, pages, offsets, nearest, value_offset)


@gluon.jit
def last_key(table, end, page_size: gl.constexpr, block_size: gl.constexpr, head_size: gl.constexpr):
    """The offset, in elements, of the key of the last token before `end`."""
    last = gl.maximum(end, 1) - 1
    return gl.load(table + last // block_size).to(gl.int64) * page_size + last % block_size * head_size


@gluon.jit
def next_of_range(
    sequence, kv_head, tile, seq_len, shared, seq_lens, shared_words, has_next, window: gl.constexpr,
    chunk: gl.constexpr, tile_tokens: gl.constexpr, num_kv_heads: gl.constexpr,
):  # fmt: skip
    """The tile after this one: its sequence, KV head, and place in its work item, and the sequence's length and shared
    word, which are read where it is another sequence. Without has_next the same tile again: no table has another."""
    _, _, num_tiles = context_tiles(seq_len, window, chunk, tile_tokens, shared)
    following, following_head, following_tile = next_tile(sequence, kv_head, tile, num_tiles, num_kv_heads)
    following = gl.where(has_next, following, sequence)
    is_other = following != sequence
    seq_len = gl.where(is_other, gl.load(seq_lens + following, mask=is_other, other=0), seq_len)
    if shared_words is not None:
        shared = gl.where(is_other, gl.load(shared_words + following, mask=is_other, other=0), shared)
    kv_head = gl.where(has_next, following_head, kv_head)
    return following, kv_head, gl.where(has_next, following_tile, tile), seq_len, shared


@gluon.jit
def load_query(query, group: gl.constexpr, rows: gl.constexpr, head_size: gl.constexpr, layout: gl.constexpr):
    """The query heads of a work item from `query` on, [1, head_size, rows], as a factor; zeros beyond the group."""
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)
    dim = gl.expand_dims(gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    return gl.load(query + row * head_size + dim, mask=(row < group) & (dim >= 0), other=0.0)
