"""Split-KV decode attention over paged latents: a row of the cache is the key of every query head and, but for its
rotated part, the value.

A work item is a sequence with a block of query heads, as many as share an SM's registers: a row is read once for all of
them. Tile ranges, split-KV partials and their combination are those of `paged_attention_decode`, with blocks of heads
in the place of KV heads. (Absorbed queries: DeepSeek-V2, arXiv 2405.04434, section 2.1.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.attention_tile import MASK_VALUE, score_factors, tile_blocks, token_offsets
from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.attention.decode_tiling import DecodeTiling
from ringcore.kernels.attention.page_layout import padded_head_size
from ringcore.kernels.attention.split_kv_combine import combine_partials, pack_partial
from ringcore.kernels.attention.tile_ranges import load_range
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["latent_attention_decode", "latent_attention_decode_reference", "latent_tile_scheduler"]

_TILE_BYTES = 48 << 10  # of rows: two tiles and the queries of 64 heads fit in an SM's shared memory
_MAX_HEADS = {2: 64, 4: 16}  # of a work item, by bytes of a number: sums of 512 numbers a head are in registers
_COMBINED_ROWS = 8  # of a partial at a time: registers


@triton.jit(do_not_specialize=["query_stride", "rotated_stride", "table_stride"])
def _latent_attention_decode(
    query,
    rotated,
    kv_cache,
    block_table,
    seq_lens,
    tile_ranges,
    out,
    partials,
    scale_log2,
    query_stride,
    rotated_stride,
    table_stride,
    rotated_head_stride: tl.constexpr,
    num_head_blocks: tl.constexpr,
    group: tl.constexpr,  # heads of a work item
    rows: tl.constexpr,  # group, rounded up to a tl.dot tile
    rank: tl.constexpr,
    width: tl.constexpr,  # rank, padded; likewise the next two
    rope: tl.constexpr,
    rope_width: tl.constexpr,
    block_size: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
    combined_rows: tl.constexpr,
    partials_per_round: tl.constexpr,
    pdl: tl.constexpr,
):
    """A loop over the work items of the range, and in it one over the tiles of the item that are in the range."""
    if pdl:
        gdc_launch_dependents()
    program = tl.program_id(0)
    # Written before the first kernel after `DecodeTileScheduler.plan` could start: see `paged_attention_decode`.
    sequence, head_block, tile, left, seq_len, first_program, _, _ = load_range(tile_ranges, program)
    row_size: tl.constexpr = rank + rope
    row = tl.arange(0, rows)[:, None]
    dim = tl.arange(0, width)[None, :]
    rope_dim = tl.arange(0, rope_width)[None, :]
    in_bounds = (row < group) & (dim < rank)
    # The work item that other programs began and that ends here; at most the first one of a range.
    inherited_tiles = tl.where(tile > 0, tl.cdiv(seq_len, tile_tokens) - tile, 0)
    combines = (inherited_tiles > 0) & (left >= inherited_tiles)
    combined_item = sequence.to(tl.int64) * num_head_blocks + head_block
    if pdl:
        gdc_wait()
    while left > 0:
        num_tiles = tl.maximum(tl.cdiv(seq_len, tile_tokens), 1)
        end_tile = tl.minimum(tile + left, num_tiles)
        item = sequence.to(tl.int64) * num_head_blocks + head_block
        table = block_table + sequence.to(tl.int64) * table_stride
        of_item = query + sequence.to(tl.int64) * query_stride + head_block * group * rank
        queries = tl.load(of_item + row * rank + dim, mask=in_bounds, other=0.0)
        of_item = rotated + sequence.to(tl.int64) * rotated_stride + head_block * group * rotated_head_stride
        turned = tl.load(
            of_item + row * rotated_head_stride + rope_dim, mask=(row < group) & (rope_dim < rope), other=0.0
        )
        row_max = tl.full([rows], MASK_VALUE, tl.float32)
        row_sum = tl.zeros([rows], tl.float32)
        acc = tl.zeros([rows, width], tl.float32)
        for i in tl.range(tile, end_tile, num_stages=stages):
            begin = i * tile_tokens
            blocks = tile_blocks(table, begin, 0, seq_len, block_size, False, tile_tokens)
            offsets = token_offsets(begin, 0, seq_len, block_size, False, tile_tokens, True) % block_size
            source = kv_cache + (blocks.to(tl.int64) * block_size + offsets)[:, None] * row_size
            latents = tl.load(source + dim, mask=dim < rank, other=0.0)
            shared = tl.load(source + rank + rope_dim, mask=rope_dim < rope, other=0.0)
            scores = tl.dot(queries, tl.trans(latents), input_precision="ieee")
            scores = tl.dot(turned, tl.trans(shared), scores, input_precision="ieee")
            visible = begin + tl.arange(0, tile_tokens) < seq_len
            scores = tl.where(visible[None, :], scores * scale_log2, MASK_VALUE)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            acc = tl.dot(weights.to(latents.dtype), latents, acc * rescale[:, None], input_precision="ieee")
            row_max = new_max
        result = tl.where(seq_len > 0, acc / row_sum[:, None], 0.0)
        if (tile == 0) & (end_tile == num_tiles):
            target = out + item * group * rank + row * rank + dim
            tl.store(target, result.to(out.dtype.element_ty), mask=in_bounds)
        else:
            slot = 2 * program + (tile == 0).to(tl.int32)
            partial = pack_partial(result, (row_max + tl.log2(row_sum))[:, None])
            tl.store(partials + slot * group * rank + row * rank + dim, partial, mask=in_bounds)
        left -= end_tile - tile
        is_last_block = head_block == num_head_blocks - 1
        sequence += is_last_block.to(tl.int32)
        head_block = tl.where(is_last_block, 0, head_block + 1)
        tile = 0
        seq_len = tl.load(seq_lens + sequence, mask=left > 0, other=0)
    if combines:
        num_partials = program - first_program + 1
        for first_row in range(0, group, combined_rows):
            combined = combine_partials(
                partials, first_program, num_partials, None, group, combined_rows, rank, width, partials_per_round,
                first_row,
            )  # fmt: skip
            combined_row = first_row + tl.arange(0, combined_rows)[:, None]
            tl.store(
                out + combined_item * group * rank + combined_row * rank + dim,
                combined.to(out.dtype.element_ty),
                mask=(combined_row < group) & (dim < rank),
            )


def latent_tile_scheduler(
    num_heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    device: torch.device,
    num_programs: int | None = None,
) -> DecodeTileScheduler:
    """num_programs: None: as many programs as `device` runs at once. The tiles are sized by what fits on an SM, not
    measured."""
    row_bytes, most = (rank + rope) * dtype.itemsize, _MAX_HEADS[dtype.itemsize]
    group = max(n for n in range(1, min(num_heads, most) + 1) if num_heads % n == 0)
    tile_tokens = max(16, min(64, 1 << (_TILE_BYTES // row_bytes).bit_length() - 1))
    tiling = DecodeTiling(tile_tokens, num_warps=8, stages=2, programs_per_sm=1, min_tiles=4, partials_per_round=2)
    return DecodeTileScheduler.allocate(
        *(num_heads, num_heads // group, rank + rope, tiling, device), v_head_size=rank, num_programs=num_programs
    )


def latent_attention_decode(
    query: torch.Tensor,
    rotated: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_scheduler: DecodeTileScheduler,
    scale: float,
) -> torch.Tensor:
    """Attends with one token of each sequence to all of it -> the weighted sums of latents: [num_seqs, num_heads,
    rank].

    query: [num_seqs, num_heads, rank], absorbed, contiguous. rotated: [num_seqs, num_heads, rope], of any strides but
    the last, which is 1. kv_cache: [num_blocks, block_size, rank + rope], contiguous, with these tokens' rows already
    written. block_table, seq_lens, scale: as for `paged_attention_decode`. tile_scheduler: of `latent_tile_scheduler`,
    planned with these lengths; the output of an empty sequence is zeros, or not written where the schedule has no tile
    for it.
    """
    (num_seqs, num_heads, rank), rope = query.shape, rotated.shape[2]
    assert rotated.shape == (num_seqs, num_heads, rope)
    assert kv_cache.shape[2] == rank + rope
    assert query.dtype == rotated.dtype == kv_cache.dtype
    assert query.is_contiguous()
    assert kv_cache.is_contiguous()
    assert rotated.stride(2) == block_table.stride(1) == 1
    assert (tile_scheduler.head_size, tile_scheduler.v_head_size) == (rank + rope, rank)
    assert seq_lens.shape == (num_seqs,)
    assert block_table.shape[0] >= num_seqs
    assert {block_table.dtype, seq_lens.dtype} == {torch.int32}
    tiling, width = tile_scheduler.tiling, padded_head_size(rank)
    out, pdl = query.new_empty(num_seqs, num_heads, rank), supports_pdl(query.device)
    _latent_attention_decode[(tile_scheduler.num_programs,)](
        *(query, rotated, kv_cache, block_table, seq_lens),
        *(tile_scheduler.tile_ranges, out, tile_scheduler.partials),
        score_factors(scale, None)[0],
        *(query.stride(0), rotated.stride(0), block_table.stride(0)),
        rotated_head_stride=rotated.stride(1),
        num_head_blocks=tile_scheduler.num_kv_heads,
        group=tile_scheduler.group,
        rows=max(16, triton.next_power_of_2(tile_scheduler.group)),
        rank=rank,
        width=width,
        rope=rope,
        rope_width=padded_head_size(rope),
        block_size=kv_cache.shape[1],
        tile_tokens=tiling.tile_tokens,
        stages=tiling.stages,
        # Every thread has an element: see `combine_partials`.
        combined_rows=max(_COMBINED_ROWS, 32 * tiling.num_warps // width),
        partials_per_round=tiling.partials_per_round,
        pdl=pdl,
        num_warps=tiling.num_warps,
        **launch_options(pdl),
    )
    return out


def latent_attention_decode_reference(
    query: torch.Tensor,
    rotated: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_scheduler: DecodeTileScheduler,
    scale: float,
) -> torch.Tensor:
    """As `latent_attention_decode`, sequence by sequence, in float32; of `tile_scheduler` nothing is used."""
    out, block_size = torch.zeros_like(query), kv_cache.shape[1]
    for i, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            rows = kv_cache[block_table[i, : -(-seq_len // block_size)].long()].flatten(0, 1)[:seq_len].float()
            scores = torch.cat((query[i], rotated[i]), 1).float() @ rows.T * scale
            out[i] = (scores.softmax(-1) @ rows[:, : query.shape[2]]).to(out.dtype)
    return out
