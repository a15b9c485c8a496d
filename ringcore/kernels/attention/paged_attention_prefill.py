"""Causal attention of a varlen (packed) batch over paged keys and values: prompts, chunked prefills and single tokens
mixed.

The rows of a query tile are the query heads that share a KV head, of as many neighbouring tokens as fit: row r is query
head r % group of token r // group. So a key or value is read once for all the heads that need it.

The grid has a tile for every `tokens_per_tile` tokens plus one for every sequence, whatever their lengths: tile number
start // tokens_per_tile + i is the first one of sequence i, which never collides with the tiles of the sequence before,
and each program searches for its sequence (as the unified attention kernel of vLLM does). Programs without tokens exit
early. The softmax is computed online in base 2 (Milakov and Gimelshein, 2018; FlashAttention-2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.attention_spans import (
    FIXED_ROUNDINGS,
    SUMS,
    local_shift,
    merge_partials,
    span_end,
    span_partial,
    span_tile_tokens,
    span_warps,
)
from ringcore.kernels.attention.attention_tile import MASK_VALUE, attend_tile, score_factors, sink_share, tile_blocks
from ringcore.kernels.attention.kv_write import check_rows
from ringcore.kernels.attention.page_layout import PageLayout, padded_head_size
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["paged_attention_prefill"]

_SEARCH = tl.constexpr(128)  # sequences compared per iteration


@triton.jit
def _sequence_of_tile(query_start_loc, tile, num_seqs, tokens_per_tile: tl.constexpr):
    """The sequence of tile number `tile` of the step: the last one whose first tile is not after it."""
    sequence = -1
    for chunk in range(0, num_seqs, _SEARCH):
        index = chunk + tl.arange(0, _SEARCH)
        begin = tl.load(query_start_loc + index, mask=index < num_seqs, other=0)
        sequence += tl.sum(((index < num_seqs) & (begin // tokens_per_tile + index <= tile)).to(tl.int32), 0)
    return sequence


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "table_stride"])
def _paged_attention_prefill(
    query,
    kv_cache,
    block_table,
    seq_lens,
    query_start_loc,
    out,
    sinks,  # or None
    scale_log2,
    softcap_log2,  # or None
    query_stride,
    table_stride,
    num_seqs,
    num_tiles,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    v_head_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_stride: tl.constexpr,
    page_size: tl.constexpr,
    exponent_offset: tl.constexpr,
    width: tl.constexpr,
    v_width: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
    has_spans: tl.constexpr,
    local_shift: tl.constexpr,  # of spans
    pdl: tl.constexpr,
):
    """One program per KV head and query tile, the last tiles first: of a prompt they have the most to read."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    tokens_per_tile: tl.constexpr = tile_rows // group
    is_local: tl.constexpr = window + chunk > 0
    kv_head = tl.program_id(0) % num_kv_heads
    tile = num_tiles - 1 - tl.program_id(0) // num_kv_heads
    sequence = tl.maximum(_sequence_of_tile(query_start_loc, tile, num_seqs, tokens_per_tile), 0)
    begin = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - begin
    first_query = (tile - (begin // tokens_per_tile + sequence)) * tokens_per_tile
    if (first_query < 0) | (first_query >= query_len):  # below 0: tokens before the first sequence
        return
    num_queries = min(tokens_per_tile, query_len - first_query)
    low = tl.load(seq_lens + sequence) - query_len + first_query  # the position of the tile's first token
    end = low + num_queries

    row = tl.arange(0, tile_rows)
    dim = tl.arange(0, width)[None, :]
    row_token = (begin + first_query + row // group).to(tl.int64)[:, None]
    row_head = (kv_head * group + row % group)[:, None]
    in_bounds = (row < num_queries * group)[:, None] & (dim < head_size)
    queries = tl.load(query + row_token * query_stride + row_head * head_size + dim, mask=in_bounds, other=0.0)
    positions = (low + row // group)[:, None]
    table = block_table + sequence.to(tl.int64) * table_stride
    pages = kv_cache + kv_head * head_stride
    exponents = kv_cache + exponent_offset + kv_head * (2 * block_size)

    row_max = tl.full([tile_rows], MASK_VALUE, tl.float32)
    row_sum = tl.zeros([tile_rows, SUMS] if has_spans else [tile_rows], tl.float32)
    acc = tl.zeros([tile_rows, v_width], tl.float32)
    # Three loops over the context, in order: tiles that window or chunk mask in part, unmasked tiles, and tiles that
    # the causal mask cuts. With spans it is one loop: a score has the same roundings whatever the rows beside it see.
    first = 0
    start = 0
    unmasked_end = (low + 1) // tile_tokens * tile_tokens
    if window > 0:
        first = tl.maximum(low - window + 1, 0)
    if chunk > 0:
        first = low // chunk * chunk
    if is_local:
        start = first // tile_tokens * tile_tokens
    blocks = tile_blocks(table, start, first, end, block_size, is_local, tile_tokens)
    if is_local and not has_spans:
        if window > 0:
            last_first = tl.maximum(end - window, 0)  # the first token that the last row sees
        else:
            last_first = (end - 1) // chunk * chunk
        window_end = min(tl.cdiv(last_first, tile_tokens) * tile_tokens, tl.cdiv(end, tile_tokens) * tile_tokens)
        for at in tl.range(start, window_end, tile_tokens, num_stages=stages):
            next_blocks = tile_blocks(table, at + tile_tokens, first, end, block_size, is_local, tile_tokens)
            row_max, row_sum, acc = attend_tile(
                queries, row_max, row_sum, acc, blocks, pages, exponents, at, first, end, positions, scale_log2,
                softcap_log2, page_size, head_size, width, v_head_size, v_width, block_size, token_stride,
                value_offset, exponent_offset, window, chunk, tile_tokens, True,
            )  # fmt: skip
            blocks = next_blocks
        start = window_end
        unmasked_end = tl.maximum(unmasked_end, window_end)
    if has_spans:
        unmasked_end = start
        mean = tl.zeros([tile_rows, v_width], tl.float32)
        lse = tl.full([tile_rows, 1], MASK_VALUE, tl.float32)
    for at in tl.range(start, unmasked_end, tile_tokens, num_stages=stages):
        next_blocks = tile_blocks(table, at + tile_tokens, first, end, block_size, is_local, tile_tokens)
        row_max, row_sum, acc = attend_tile(
            queries, row_max, row_sum, acc, blocks, pages, exponents, at, first, end, positions, scale_log2,
            softcap_log2, page_size, head_size, width, v_head_size, v_width, block_size, token_stride,
            value_offset, exponent_offset, window, chunk, tile_tokens, False,
        )  # fmt: skip
        blocks = next_blocks
    for at in tl.range(unmasked_end, end, tile_tokens, num_stages=stages):
        next_blocks = tile_blocks(table, at + tile_tokens, first, end, block_size, is_local, tile_tokens)
        row_max, row_sum, acc = attend_tile(
            queries, row_max, row_sum, acc, blocks, pages, exponents, at, first, end, positions, scale_log2,
            softcap_log2, page_size, head_size, width, v_head_size, v_width, block_size, token_stride,
            value_offset, exponent_offset, window, chunk, tile_tokens, True,
        )  # fmt: skip
        blocks = next_blocks
        if has_spans:
            tile_end = at // tile_tokens + 1
            if (span_end(tile_end - 1, local_shift) == tile_end) | (at + tile_tokens >= end):
                span_mean, span_lse = span_partial(row_max, row_sum, acc)
                mean, lse = merge_partials(mean, lse, span_mean, span_lse)
                row_max = tl.full([tile_rows], MASK_VALUE, tl.float32)
                row_sum = tl.zeros([tile_rows, SUMS], tl.float32)
                acc = tl.zeros([tile_rows, v_width], tl.float32)
    v_dim, in_bounds_out = dim, in_bounds
    if v_head_size != head_size:
        v_dim = tl.arange(0, v_width)[None, :]
        in_bounds_out = (row < num_queries * group)[:, None] & (v_dim < v_head_size)
    target = out + ((row_token * (num_kv_heads * group) + row_head) * v_head_size + v_dim)
    if not has_spans:
        mean = acc / row_sum[:, None]
        lse = (row_max + tl.log2(row_sum))[:, None]
    if sinks is not None:
        sink = sinks + kv_head * group + row % group
        mean *= sink_share(sink[:, None], (row < num_queries * group)[:, None], lse)
    tl.store(target, mean.to(out.dtype.element_ty), mask=in_bounds_out)


class _Tiles(NamedTuple):
    rows: int
    tokens: int
    num_warps: int
    stages: int

    @classmethod
    def choose(cls, max_rows: int, group: int, width: int, itemsize: int) -> _Tiles:
        """For at most `max_rows` rows per sequence.

        Float32 is multiplied without tensor cores, whose TF32 keeps too few bits, and needs registers for that.
        """
        if itemsize == 4:
            return cls(max(32, triton.next_power_of_2(group)), 32 if width <= 64 else 16, 4, 3)
        rows = max(128 if max_rows > 64 else 64, triton.next_power_of_2(group))
        return cls(rows, 64, 4 if rows == 64 else 8, 3 if width <= 128 else 2)

    @classmethod
    def of_spans(cls, group: int, width: int, itemsize: int) -> _Tiles:
        """Of one size, and with as many tokens as a decode's."""
        tiles = cls.choose(0, group, width, itemsize)
        num_warps = max(tiles.num_warps, span_warps(width))
        return tiles._replace(tokens=span_tile_tokens(width, itemsize), num_warps=num_warps)


def paged_attention_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    max_query_len: int | None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends with the last tokens of each sequence to all of it, or each token to the last `window` tokens up to
    itself, or to those up to itself whose position divided by `chunk` is the same.

    query: [num_tokens, num_heads, head_size], packed; the token stride is free, the heads of a token are contiguous.
    kv_cache: as in `page_layout`, with the keys and values of these tokens already written.
    block_table: [num_seqs, max_blocks] int32. seq_lens: [num_seqs] int32, including this step's tokens.
    query_start_loc: [num_seqs + 1] int32: sequence i has the tokens query_start_loc[i] to query_start_loc[i + 1], of
    which there may be none; the first sequence may begin after token 0. max_query_len: an upper bound; it chooses the
    tile size and nothing else; None: a token has the same bits beside any others, and as decoded with a
    `SpanTileScheduler`. scale: of the scores, above 0.
    softcap, sinks: as for `paged_attention_decode`. out: [num_tokens, num_heads, v_head_size], contiguous. Returns
    `out`, in which rows of tokens outside all sequences are not written. The launch depends on shapes and on the
    arguments that are not tensors, and on no number in a tensor.
    """
    num_tokens, num_heads, head_size = check_rows(query)
    page = PageLayout.of(kv_cache, head_size)
    num_kv_heads = page.num_kv_heads
    num_seqs = seq_lens.shape[0]
    assert kv_cache.dtype == (torch.uint8 if page.exponent_offset else query.dtype)
    assert query_start_loc.shape == (num_seqs + 1,)
    assert block_table.shape[0] == num_seqs
    assert block_table.stride(1) == 1
    assert {block_table.dtype, seq_lens.dtype, query_start_loc.dtype} == {torch.int32}
    assert window is None or chunk is None
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    out_shape = (num_tokens, num_heads, page.v_head_size)
    out = query.new_empty(out_shape) if out is None else out
    assert out.shape == out_shape
    assert out.is_contiguous()
    if num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    width, v_width = padded_head_size(head_size), padded_head_size(page.v_head_size)
    shape, has_spans = (group, max(width, v_width), query.element_size()), max_query_len is None
    tiles = _Tiles.of_spans(*shape) if max_query_len is None else _Tiles.choose(max_query_len * group, *shape)
    scale_log2, softcap_log2 = score_factors(scale, softcap)
    num_tiles = num_tokens // (tiles.rows // group) + num_seqs
    pdl = supports_pdl(query.device)
    _paged_attention_prefill[(num_tiles * num_kv_heads,)](
        query,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        sinks,
        scale_log2,
        softcap_log2,
        query.stride(0),
        *(block_table.stride(0), num_seqs, num_tiles),
        **page._asdict(),
        group=group,
        width=width,
        v_width=v_width,
        window=window or 0,
        chunk=chunk or 0,
        tile_rows=tiles.rows,
        tile_tokens=tiles.tokens,
        stages=tiles.stages,
        has_spans=has_spans,
        local_shift=local_shift(window or chunk, tiles.tokens) if has_spans else 0,
        pdl=pdl,
        num_warps=tiles.num_warps,
        **(FIXED_ROUNDINGS if has_spans else {}),
        **launch_options(pdl),
    )
    return out
