"""Tiles of `warp_split_decode`: which token each warp reads, and the asynchronous copies of keys and values.

A tile has 16 tokens for each warp, which is what a block has, or a part of it: one page offset serves them all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ringcore.kernels.attention.decode_tiles import next_tile
from ringcore.kernels.attention.tile_ranges import context_tiles

__all__ = [
    "WARP_TOKENS",
    "allocate_ring",
    "copy_stage",
    "copy_tile",
    "last_key",
    "load_query",
    "next_of_range",
    "warp_pages",
]

WARP_TOKENS = gl.constexpr(16)


@gluon.constexpr_function
def copy_layout(width, num_warps, bits=16):
    """Of a tile [num_warps, WARP_TOKENS, width] of so many bits a number: a warp copies its own tokens, 16 bytes a
    thread."""
    size = 128 // bits
    lanes = width // size
    return gl.BlockedLayout([1, 1, size], [1, 32 // lanes, lanes], [num_warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def ring_layout(width, bits):
    """Of the tiles in shared memory, [num_warps, WARP_TOKENS, width]: eight rows of 16 bytes are in all banks."""
    size = 128 // bits
    phases = min(8, width // size)
    return gl.SwizzledSharedLayout(size, 8 // phases, phases, [2, 1, 0])


@gluon.jit
def allocate_ring(
    dtype: gl.constexpr, stages: gl.constexpr, num_warps: gl.constexpr, head_size: gl.constexpr, is_fp8: gl.constexpr
):
    """Shared memory for keys and values, [stages, num_warps, WARP_TOKENS, head_size]; in FP8 see `copy_codes`."""
    tile: gl.constexpr = [stages, num_warps, WARP_TOKENS, head_size]
    if is_fp8:
        half: gl.constexpr = [stages, num_warps, WARP_TOKENS, head_size // 2]
        few: gl.constexpr = [stages, num_warps, WARP_TOKENS]
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        codes = gl.allocate_shared_memory(gl.uint8, tile, ring_layout(head_size, 8))
        pairs = gl.allocate_shared_memory(gl.int16, half, ring_layout(head_size // 2, 16))
        key_exponents = gl.allocate_shared_memory(gl.uint8, few, plain)
        return codes, pairs, key_exponents, gl.allocate_shared_memory(gl.uint8, few, plain)
    else:  # noqa: RET505  of the two the compiler sees one
        layout: gl.constexpr = ring_layout(head_size, 16)
        return gl.allocate_shared_memory(dtype, tile, layout), gl.allocate_shared_memory(dtype, tile, layout)


@gluon.jit
def _warp_tokens(begin, first, end, num_warps: gl.constexpr, layout: gl.constexpr):
    """[num_warps]: the first token that each warp reads: of its own, or of the nearest with a token in bounds."""
    warp = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    token = gl.minimum(begin + warp * WARP_TOKENS, gl.maximum(end - 1, 0) // WARP_TOKENS * WARP_TOKENS)
    return gl.maximum(token, first // WARP_TOKENS * WARP_TOKENS)


@gluon.jit
def warp_pages(
    table, begin, first, end, page_size: gl.constexpr, block_size: gl.constexpr, head_size: gl.constexpr,
    num_warps: gl.constexpr, bits: gl.constexpr = 16,
):  # fmt: skip
    """[num_warps] int64: the offset, in elements, of the first key that each warp copies of the tile from `begin` on.

    table: the sequence's row of the block table. first and end: tokens before and from there on are not read.
    """
    token = _warp_tokens(begin, first, end, num_warps, copy_layout(head_size, num_warps, bits))
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
def copy_codes(
    keys, values, key_exponents, value_exponents, pages, exponents, offsets, begin, first, end,
    value_offset: gl.constexpr, block_size: gl.constexpr,
):  # fmt: skip
    """`copy_tile` in FP8: keys [num_warps, WARP_TOKENS, head_size] uint8, values [num_warps, WARP_TOKENS, head_size /
    2] int16, exponents [num_warps, WARP_TOKENS] uint8. Exponents are the tokens' own, in bounds or not. exponents:
    from the KV head's first key in a page to its keys' exponents."""
    num_warps: gl.constexpr = keys.shape[0]
    head_size: gl.constexpr = keys.shape[2]
    layout: gl.constexpr = copy_layout(head_size, num_warps, 8)
    pairs: gl.constexpr = copy_layout(head_size // 2, num_warps, 16)
    by_warp: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [num_warps, 1], [1, 0])
    token = _warp_tokens(begin, first, end, num_warps, layout)
    row = gl.expand_dims(gl.arange(0, WARP_TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0)
    of_token = gl.expand_dims(token, 1)
    row = gl.maximum(gl.minimum(row, gl.maximum(end, 1) - 1 - of_token), first - of_token)
    source = pages + offsets
    dim = gl.expand_dims(gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, gl.SliceLayout(0, layout))), 0), 0)
    codes = gl.expand_dims(gl.expand_dims(source, 1), 2) + dim
    async_copy.async_copy_global_to_shared(keys, codes + gl.expand_dims(row * head_size, 2))
    words = (source + value_offset).to(gl.pointer_type(gl.int16), bitcast=True)
    words = gl.convert_layout(words, gl.SliceLayout(1, gl.SliceLayout(2, pairs)), assert_trivial=True)
    row = gl.convert_layout(row, gl.SliceLayout(2, pairs), assert_trivial=True)
    dim = gl.expand_dims(gl.arange(0, head_size // 2, gl.SliceLayout(0, gl.SliceLayout(0, pairs))), 0)
    words = gl.expand_dims(gl.expand_dims(words, 1), 2) + gl.expand_dims(dim, 0)
    async_copy.async_copy_global_to_shared(values, words + gl.expand_dims(row * (head_size // 2), 2))
    if block_size > WARP_TOKENS:
        source -= token % block_size * (head_size - 1)
    source = gl.convert_layout(source + exponents, gl.SliceLayout(1, by_warp))
    source = gl.expand_dims(source, 1) + gl.expand_dims(gl.arange(0, WARP_TOKENS, gl.SliceLayout(0, by_warp)), 0)
    async_copy.async_copy_global_to_shared(key_exponents, source)
    async_copy.async_copy_global_to_shared(value_exponents, source + block_size)


@gluon.jit
def copy_stage(
    ring, slot, kv_cache, kv_head, offsets, begin, first, end, value_offset: gl.constexpr, head_stride: gl.constexpr,
    exponent_offset: gl.constexpr, block_size: gl.constexpr,
):  # fmt: skip
    """ring: from `allocate_ring`. Others: see `copy_tile`."""
    pages = kv_cache + kv_head * head_stride
    if exponent_offset > 0:
        exponents = exponent_offset - kv_head * (head_stride - 2 * block_size)
        copy_codes(
            ring[0].index(slot), ring[1].index(slot), ring[2].index(slot), ring[3].index(slot), pages, exponents,
            offsets, begin, first, end, value_offset, block_size,
        )  # fmt: skip
    else:
        copy_tile(ring[0].index(slot), ring[1].index(slot), pages, offsets, begin, first, end, value_offset)


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
