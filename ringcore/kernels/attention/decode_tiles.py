"""The tiles of a decode kernel's range: which is the next one, and the prefetch of the first."""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.launch.prefetch import prefetch_l2

__all__ = ["next_tile", "prefetch_first_tile"]


@triton.jit
def prefetch_first_tile(
    table,
    pages,
    begin,
    first,
    end,
    page_size: tl.constexpr,
    head_size: tl.constexpr,
    v_head_size: tl.constexpr,
    block_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    tile_tokens: tl.constexpr,
    contiguous_tokens: tl.constexpr,
    threads: tl.constexpr,
):
    """Prefetches keys and values of the first tile to L2, a piece per thread: the keys of `contiguous_tokens` tokens,
    or their values; half of both where they lie together. L2 is coherent, so a concurrent write stays visible."""
    piece: tl.constexpr = contiguous_tokens * (head_size + v_head_size) // 2
    piece_bytes: tl.constexpr = piece * (pages.dtype.element_ty.primitive_bitwidth // 8)
    second: tl.constexpr = value_offset if head_size == v_head_size else piece
    thread = tl.arange(0, threads)
    token = begin + thread // 2 * contiguous_tokens
    in_bounds = (token < begin + tile_tokens) & (token + contiguous_tokens > first) & (token < end)
    block = tl.load(table + token // block_size, mask=in_bounds, other=0)
    offsets = block.to(tl.int64) * page_size + thread % 2 * second + token % block_size * token_stride
    prefetch_l2(pages + offsets, in_bounds, piece_bytes)


@triton.jit
def next_tile(sequence, kv_head, tile, num_tiles, num_kv_heads: tl.constexpr):
    """(sequence, KV head, tile) of the tile after this one in the schedule; num_tiles: of this tile's work item."""
    is_last = tile + 1 >= num_tiles
    is_last_head = is_last & (kv_head == num_kv_heads - 1)
    next_head = tl.where(is_last_head, 0, kv_head + is_last.to(tl.int32))
    return sequence + is_last_head.to(tl.int32), next_head, tl.where(is_last, 0, tile + 1)
