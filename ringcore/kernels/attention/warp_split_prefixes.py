"""Cascade attention of `warp_split_decode`: what `cascade_attention` does at the beginning of the Triton kernel."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ringcore.kernels.attention.attention_tile import MASK_VALUE, capped
from ringcore.kernels.attention.cascade_attention import load_unit
from ringcore.kernels.attention.grid_barrier import grid_barrier
from ringcore.kernels.attention.prefix_tiling import UNIT_ROWS
from ringcore.kernels.attention.warp_split_combine import add, largest
from ringcore.kernels.attention.warp_split_item import rotated
from ringcore.kernels.attention.warp_split_tiles import WARP_TOKENS, copy_tile, warp_pages
from ringcore.kernels.launch.dependent_launch import gdc_wait

__all__ = ["attend_prefixes"]

_TOKENS_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # as the ring's, of all warps
_STEP_TOKENS = gl.constexpr(16)  # that are multiplied together: as many as the registers of a thread allow


@gluon.jit
def _half(stage, half: gl.constexpr):
    """[_STEP_TOKENS, head_size] of a stage [num_warps, WARP_TOKENS, head_size]."""
    tokens: gl.constexpr = stage.shape[0] * WARP_TOKENS
    rows = stage._reinterpret(stage.dtype, [tokens, stage.shape[2]], _TOKENS_LAYOUT)
    return rows.slice(half * _STEP_TOKENS, _STEP_TOKENS, 0)


@gluon.jit
def _attend_unit(
    query, kv_cache, block_table, keys, values, unit, members, prefixes, prefix_lse, cos_sin, norm_weight, eps,
    span_rows, scale_log2, softcap_log2, query_stride, table_stride, num_kv_heads: gl.constexpr, group: gl.constexpr,
    block_size: gl.constexpr, value_offset: gl.constexpr, head_stride: gl.constexpr, page_size: gl.constexpr,
):  # fmt: skip
    """unit: as of `load_unit`. A warp has 16 of the rows, and all tokens."""
    stages: gl.constexpr = keys.shape[0]
    num_warps: gl.constexpr = keys.shape[1]
    head_size: gl.constexpr = keys.shape[3]
    tile_tokens: gl.constexpr = WARP_TOKENS * num_warps
    dtype: gl.constexpr = query.dtype.element_ty
    summed: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    of_rows: gl.constexpr = gl.SliceLayout(1, summed)
    first_factor: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    second_factor: gl.constexpr = gl.DotOperandLayout(1, summed, 2)
    kv_head, first_member, end_member, leader, first_tile, end_tile, span = unit
    row = gl.arange(0, UNIT_ROWS, gl.SliceLayout(1, first_factor))
    member = first_member + row // group
    is_row = (row < UNIT_ROWS // group * group) & (member < end_member)
    sequence = gl.load(members + member, mask=is_row, other=0, cache_modifier=".cg")
    head = kv_head * group + row % group
    source = query + gl.expand_dims(sequence.to(gl.int64) * query_stride + head * head_size, 1)
    dim = gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, first_factor)), 0)
    queries = gl.load(source + dim, mask=gl.expand_dims(is_row, 1) & (dim >= 0), other=0.0)
    if cos_sin is not None:
        gain = None
        if norm_weight is not None:
            gain = gl.load(norm_weight + dim)
        angles = gl.load(cos_sin + gl.expand_dims(sequence.to(gl.int64) * head_size, 1) + dim)
        queries = rotated(queries, gain, angles, eps).to(dtype)
    table = block_table + leader.to(gl.int64) * table_stride
    pages = kv_cache + kv_head * head_stride
    end = end_tile * tile_tokens
    for k in range(stages):
        begin = (first_tile + k) * tile_tokens
        if begin < end:
            offsets = warp_pages(table, begin, 0, end, page_size, block_size, head_size, num_warps)
            copy_tile(keys.index(k), values.index(k), pages, offsets, begin, 0, end, value_offset)
        async_copy.commit_group()
    row_max = gl.full([UNIT_ROWS], MASK_VALUE, gl.float32, of_rows)
    row_sum = gl.zeros([UNIT_ROWS], gl.float32, of_rows)
    acc = gl.zeros([UNIT_ROWS, head_size], gl.float32, summed)
    for tile in range(first_tile, end_tile):
        slot = (tile - first_tile) % stages
        async_copy.wait_group(stages - 1)
        for half in gl.static_range(tile_tokens // _STEP_TOKENS):
            key = _half(keys.index(slot), half).permute((1, 0)).load(second_factor)
            scores = mma_v2(queries, key, gl.zeros([UNIT_ROWS, _STEP_TOKENS], gl.float32, summed))
            scores = scores * scale_log2 if softcap_log2 is None else capped(scores, scale_log2, softcap_log2)
            new_max = gl.maximum(row_max, gl.reduce(scores, 1, largest))
            weights = gl.exp2(scores - gl.expand_dims(new_max, 1))
            rescale = gl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + gl.reduce(weights, 1, add)
            row_max = new_max
            value = _half(values.index(slot), half).load(second_factor)
            weights = gl.convert_layout(weights.to(dtype), first_factor)
            acc = mma_v2(weights, value, acc * gl.expand_dims(rescale, 1))
        begin = (tile + stages) * tile_tokens
        if begin < end:
            offsets = warp_pages(table, begin, 0, end, page_size, block_size, head_size, num_warps)
            copy_tile(keys.index(slot), values.index(slot), pages, offsets, begin, 0, end, value_offset)
        async_copy.commit_group()
    target = span.to(gl.int64) * span_rows + sequence * (num_kv_heads * group) + head
    target, is_row = gl.convert_layout(target, of_rows), gl.convert_layout(is_row, of_rows)
    gl.store(prefix_lse + target, row_max + gl.log2(row_sum), mask=is_row)
    dim = gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, summed)), 0)
    target = prefixes + gl.expand_dims(target * head_size, 1) + dim
    gl.store(target, acc / gl.expand_dims(row_sum, 1), mask=gl.expand_dims(is_row, 1) & (dim >= 0))


@gluon.jit
def attend_prefixes(
    query, kv_cache, block_table, keys, values, units, num_units, members, prefixes, prefix_lse, barrier, cos_sin,
    norm_weight, eps, span_rows, scale_log2, softcap_log2, unwritten, query_stride, table_stride,
    num_resident, num_kv_heads: gl.constexpr, group: gl.constexpr, block_size: gl.constexpr,
    value_offset: gl.constexpr, head_stride: gl.constexpr, page_size: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """Where there are units: waits for the kernel before, computes this program's share of them, and waits for all
    others -> scale_log2, NaN if they do not end, and 0: every token is written, but for those that this kernel itself
    writes. Else scale_log2 and unwritten.

    keys and values: the ring in shared memory, which is free. The others: as of
    `cascade_attention.attend_shared_prefixes`.
    """
    if num_units > 0:
        if pdl:
            gdc_wait()
        for at in range(gl.program_id(0), num_units, num_resident):
            _attend_unit(
                query, kv_cache, block_table, keys, values, load_unit(units, at, num_units), members, prefixes,
                prefix_lse, cos_sin, norm_weight, eps, span_rows, scale_log2, softcap_log2, query_stride, table_stride,
                num_kv_heads, group, block_size, value_offset, head_stride, page_size,
            )  # fmt: skip
        scale_log2 = gl.where(grid_barrier(barrier, num_resident), scale_log2, float("nan"))
        if cos_sin is None:
            unwritten = 0
    return scale_log2, unwritten
