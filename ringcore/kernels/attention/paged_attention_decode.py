"""Split-KV decode attention (one query token per sequence) over paged keys and values, load-balanced over the device.

A program has a tile range (`decode_scheduler`). If its range covers a whole work item, a (sequence, KV head) pair, it
writes the result. Programs that share a work item write split-KV partials to a workspace, and the program that has the
last tile of the work item combines them after its own range (`split_kv_combine`). (FlashAttention's split-KV decoding.)

A prefix that sequences share is read for all of them first (`cascade_attention`); the ranges are of what follows it.

Two kernels do this: `paged_decode_kernel` for all caches, and `warp_split_decode` for those that most models have, on
Hopper (`DecodeTiling.choose_by_warps`).
"""

from __future__ import annotations

import math

import torch

from ringcore.kernels.attention.attention_spans import FIXED_ROUNDINGS
from ringcore.kernels.attention.attention_tile import score_factors
from ringcore.kernels.attention.cascade_attention import PrefixTensors
from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.attention.head_rotation import HeadRotation
from ringcore.kernels.attention.kv_write import check_rows
from ringcore.kernels.attention.page_layout import PageLayout, padded_head_size
from ringcore.kernels.attention.paged_decode_kernel import paged_decode_kernel
from ringcore.kernels.attention.qk_norm_rope import LARGEST
from ringcore.kernels.attention.shared_prefixes import SharedPrefixes
from ringcore.kernels.attention.warp_split_decode import warp_split_decode
from ringcore.kernels.launch.dependent_launch import launch_options, supports_pdl
from ringcore.kernels.launch.shared_memory import prefer_carveout

__all__ = ["paged_attention_decode"]

_QUERY_BYTES = 16 << 10  # the largest query tile of which two fit in shared memory with two tiles of keys and values
_MAX_REGISTERS, _REGISTERS_OF_THREE = 255, 168  # of a thread; where three programs of four warps run at once
_MAX_WORDS = 64  # of a thread of `warp_split_decode`, in the partials that are read together: registers


def paged_attention_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_scheduler: DecodeTileScheduler,
    scale: float,
    *,
    shared: SharedPrefixes | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    reads_early: bool = False,
    rotation: HeadRotation | None = None,
) -> torch.Tensor:
    """Attends with the last token of each sequence to all of it, to the last `tile_scheduler.window` tokens, or to its
    chunk of `tile_scheduler.chunk` positions.

    query: [num_seqs, num_heads, head_size]; the token stride is free, the heads of a token are contiguous.
    kv_cache: as in `page_layout`, with the keys and values of these tokens already written.
    block_table: [num_seqs or more, max_blocks] int32. seq_lens: [num_seqs] int32, as passed to `tile_scheduler.plan`;
    the output of an empty sequence is zeros, or not written where the schedule has no tile for it. scale: of the
    scores, above 0. shared: what was found for these tables and passed to `tile_scheduler.plan`, or None. softcap: each
    score becomes softcap * tanh(score / softcap). sinks: [num_heads], in any float dtype: each query head's logit
    without a value. out: [num_seqs, num_heads, v_head_size], contiguous. reads_early: whether the step writes only the
    last token of each sequence: the others may be read before the kernels before have ended.
    rotation: query is the first heads of the output of a QKV projection, whose keys and values follow in each row: they
    are normalised and rotated here, and keys and values written to the last token's slot. With reads_early, and by
    warps alone. Returns `out`. `tile_scheduler.plan` read the same numbers in the same step: writes to the tables after
    it may not be visible.
    """
    num_seqs, num_heads, head_size = check_rows(query)
    page = PageLayout.of(kv_cache, head_size)
    assert kv_cache.dtype == (torch.uint8 if page.exponent_offset else query.dtype)
    assert (tile_scheduler.num_kv_heads, tile_scheduler.group) == (page.num_kv_heads, num_heads // page.num_kv_heads)
    assert (tile_scheduler.head_size, tile_scheduler.v_head_size) == (head_size, page.v_head_size)
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    assert block_table.shape[0] >= num_seqs == len(seq_lens)
    assert block_table.stride(1) == 1
    assert {block_table.dtype, seq_lens.dtype} == {torch.int32}
    assert shared is None or shared.prefixes.shape[1:] == (num_seqs, num_heads, page.v_head_size)
    out_shape = (num_seqs, num_heads, page.v_head_size)
    out = query.new_empty(out_shape) if out is None else out
    assert out.shape == out_shape
    assert out.is_contiguous()
    assert rotation is None or (tile_scheduler.tiling.by_warps and reads_early)
    prefixes = PrefixTensors.of(shared, tile_scheduler.barrier)
    step = query, kv_cache, block_table, seq_lens, tile_scheduler, score_factors(scale, softcap), sinks, prefixes, out
    if tile_scheduler.tiling.by_warps:
        _launch_by_warps(*step, rotation, reads_early)
    else:
        _launch_by_tiles(*step)
    return out


def _launch_by_tiles(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_scheduler: DecodeTileScheduler,
    factors: tuple[float, float | None],
    sinks: torch.Tensor | None,
    prefixes: PrefixTensors,
    out: torch.Tensor,
) -> None:
    """factors: from `score_factors`."""
    num_seqs, num_heads, head_size = query.shape
    assert prefixes.units is None or tile_scheduler.num_ranges == tile_scheduler.num_programs
    page = PageLayout.of(kv_cache, head_size)
    width, rows = padded_head_size(head_size), tile_scheduler.tile_rows
    pdl, tiling = supports_pdl(query.device), tile_scheduler.tiling
    for passes in prefixes.passes():
        kernel = paged_decode_kernel[(tile_scheduler.num_ranges,)](
            query,
            kv_cache,
            block_table,
            seq_lens,
            tile_scheduler.tile_ranges,
            out,
            tile_scheduler.partials,
            sinks,
            *prefixes,
            *factors,
            query.stride(0),
            block_table.stride(0),
            num_seqs * num_heads,
            **page._asdict(),
            group=tile_scheduler.group,
            rows=rows,
            combine_rows=tile_scheduler.combine_rows(),
            partials_per_round=tile_scheduler.partials_per_round(),
            width=width,
            v_width=padded_head_size(page.v_head_size),
            window=tile_scheduler.window or 0,
            chunk=tile_scheduler.chunk or 0,
            tile_tokens=tiling.tile_tokens,
            stages=tiling.stages if rows * width * query.element_size() <= _QUERY_BYTES else 1,
            contiguous_tokens=math.gcd(page.block_size, tiling.tile_tokens),
            threads=32 * tiling.num_warps,
            span_slots=tile_scheduler.span_slots,
            local_shift=tile_scheduler.local_shift,
            passes=passes,
            pdl=pdl,
            num_warps=tiling.num_warps,
            **(FIXED_ROUNDINGS if tile_scheduler.span_slots else {}),
            **launch_options(pdl),
        )
    if pdl:
        prefer_carveout(kernel, tiling.programs_per_sm, query.device)


def _launch_by_warps(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_scheduler: DecodeTileScheduler,
    factors: tuple[float, float | None],
    sinks: torch.Tensor | None,
    prefixes: PrefixTensors,
    out: torch.Tensor,
    rotation: HeadRotation | None,
    reads_early: bool,
) -> None:
    tiling, group = tile_scheduler.tiling, tile_scheduler.group
    num_seqs, num_heads, head_size = query.shape
    page = PageLayout.of(kv_cache, head_size)
    combine_rows = tiling.rows if group > tiling.rows // 2 else tiling.rows // 2
    words = combine_rows * head_size // (32 * tiling.num_warps)  # of a thread, in one partial
    kernel = warp_split_decode[(tile_scheduler.num_ranges,)](
        query,
        kv_cache,
        block_table,
        seq_lens,
        tile_scheduler.tile_ranges,
        out,
        tile_scheduler.partials,
        sinks,
        *prefixes,
        *(None, None) if rotation is None else rotation[:2],
        *factors,
        0.0 if rotation is None else rotation.eps,
        query.stride(0),
        block_table.stride(0),
        num_seqs * num_heads,
        int(reads_early),
        tile_scheduler.num_programs,
        num_kv_heads=page.num_kv_heads,
        group=group,
        rows=tiling.rows,
        combine_rows=combine_rows,
        partials_per_round=min(tiling.partials_per_round, _MAX_WORDS // words),
        block_size=page.block_size,
        head_size=head_size,
        value_offset=page.value_offset,
        head_stride=page.head_stride,
        page_size=page.page_size,
        exponent_offset=page.exponent_offset,
        window=tile_scheduler.window or 0,
        chunk=tile_scheduler.chunk or 0,
        clamp=LARGEST.get(query.dtype, 0.0),
        stages=tiling.stages,
        num_warps=tiling.num_warps,
        pdl=True,
        launch_pdl=True,
        maxnreg=_registers(tiling.programs_per_sm, page.exponent_offset > 0),
    )
    prefer_carveout(kernel, tiling.programs_per_sm, query.device)


def _registers(programs_per_sm: int, is_fp8: bool) -> int | None:
    """Of a thread of `warp_split_decode`, at most; None: the assembler's choice, with which two programs run at once.
    In FP8 that is 168, and spills."""
    if programs_per_sm > 2:
        return _REGISTERS_OF_THREE
    return _MAX_REGISTERS if is_fp8 else None
