"""Cascade attention: the prefix that decoding sequences share is attended to for all of them at once.

The rows of a unit (`shared_prefixes`) are the query heads that share a KV head, of as many sequences of a group as fit
in a tile for tensor cores: a key or value of the prefix is read once for all of them. A unit's softmax is that over its
span of the prefix; what is stored is the weighted sum of the values and the log-sum-exp of the scores. The decode
kernel, of which this is the beginning, merges both where a sequence's own tokens end (Juravsky et al., Hydragen, 2024).

The units are divided over all programs of the grid, and a barrier follows them: a launch of their own would cost its
start in every layer of every step, shared prefix or not. Without units there is no barrier.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.attention_tile import MASK_VALUE, attend_tile, tile_blocks
from ringcore.kernels.attention.grid_barrier import grid_barrier
from ringcore.kernels.attention.prefix_tiling import UNIT_ROWS
from ringcore.kernels.attention.shared_prefixes import (
    END_MEMBER,
    END_TILE,
    FIRST_MEMBER,
    FIRST_TILE,
    KV_HEAD,
    LEADER,
    SPAN,
    UNIT,
    SharedPrefixes,
)
from ringcore.kernels.launch.dependent_launch import gdc_wait

__all__ = ["PREFIXES", "PrefixTensors", "attend_shared_prefixes", "load_unit", "merge_prefix"]

# What one launch does: the shared prefixes, a barrier, and what follows them; or one of both.
BOTH = tl.constexpr(0)
PREFIXES = tl.constexpr(1)
OWN_TOKENS = tl.constexpr(2)

# Of half a tile each: three are in flight while one is multiplied. They and the query rows take little more shared
# memory than the loop over own tokens: the kernel has the carve-out that it has without shared prefixes.
_STAGES = tl.constexpr(4)


@triton.jit
def load_unit(units, unit, num_units):
    """The fields of a unit's record, in their order; zeros of one that there is not. (.cg: as for `load_range`.)"""
    record = units + (1 + unit) * UNIT
    mask = unit < num_units
    kv_head = tl.load(record + KV_HEAD, mask=mask, other=0, cache_modifier=".cg")
    first_member = tl.load(record + FIRST_MEMBER, mask=mask, other=0, cache_modifier=".cg")
    end_member = tl.load(record + END_MEMBER, mask=mask, other=0, cache_modifier=".cg")
    leader = tl.load(record + LEADER, mask=mask, other=0, cache_modifier=".cg")
    first_tile = tl.load(record + FIRST_TILE, mask=mask, other=0, cache_modifier=".cg")
    end_tile = tl.load(record + END_TILE, mask=mask, other=0, cache_modifier=".cg")
    span = tl.load(record + SPAN, mask=mask, other=0, cache_modifier=".cg")
    return kv_head, first_member, end_member, leader, first_tile, end_tile, span


@triton.jit
def _attend_unit(
    query,
    kv_cache,
    block_table,
    unit,
    members,
    prefixes,
    prefix_lse,
    span_rows,
    scale_log2,
    softcap_log2,
    query_stride,
    table_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    unit_rows: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    v_head_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_stride: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    v_width: tl.constexpr,
    tile_tokens: tl.constexpr,
):
    """unit: as of `load_unit`."""
    kv_head, first_member, end_member, leader, first_tile, end_tile, span = unit
    row = tl.arange(0, unit_rows)
    dim = tl.arange(0, width)[None, :]
    v_dim = tl.arange(0, v_width)[None, :]
    member = first_member + row // group
    is_row = (row < unit_rows // group * group) & (member < end_member)
    sequence = tl.load(members + member, mask=is_row, other=0, cache_modifier=".cg")
    head = kv_head * group + row % group
    source = query + (sequence.to(tl.int64) * query_stride + head * head_size)[:, None] + dim
    queries = tl.load(source, mask=is_row[:, None] & (dim < head_size), other=0.0)
    table = block_table + leader.to(tl.int64) * table_stride
    pages = kv_cache + kv_head * head_stride
    start, end = first_tile * tile_tokens, end_tile * tile_tokens
    row_max = tl.full([unit_rows], MASK_VALUE, tl.float32)
    row_sum = tl.zeros([unit_rows], tl.float32)
    acc = tl.zeros([unit_rows, v_width], tl.float32)
    step_tokens: tl.constexpr = tile_tokens // 2
    blocks = tile_blocks(table, start, 0, end, block_size, False, step_tokens)
    for at in tl.range(start, end, step_tokens, num_stages=_STAGES):
        next_blocks = tile_blocks(table, at + step_tokens, 0, end, block_size, False, step_tokens)
        row_max, row_sum, acc = attend_tile(
            queries, row_max, row_sum, acc, blocks, pages, pages, at, 0, end, 0, scale_log2, softcap_log2, page_size,
            head_size, width, v_head_size, v_width, block_size, token_stride, value_offset, 0, 0, 0, step_tokens,
            False,
        )  # fmt: skip
        blocks = next_blocks
    target = span.to(tl.int64) * span_rows + sequence * (num_kv_heads * group) + head
    tl.store(prefix_lse + target, row_max + tl.log2(row_sum), mask=is_row)
    target = target[:, None] * v_head_size + v_dim
    tl.store(prefixes + target, acc / row_sum[:, None], mask=is_row[:, None] & (v_dim < v_head_size))


@triton.jit
def attend_shared_prefixes(
    query,
    kv_cache,
    block_table,
    units,
    members,
    prefixes,
    prefix_lse,
    barrier,
    span_rows,
    scale_log2,
    softcap_log2,
    query_stride,
    table_stride,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    v_head_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_stride: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    v_width: tl.constexpr,
    tile_tokens: tl.constexpr,
    passes: tl.constexpr,
    pdl: tl.constexpr,
):
    """Waits for the kernel before, computes this program's share of the units, and waits for all others -> scale_log2;
    NaN, and so every number of the step, if they do not end.

    prefixes: [max_spans, num_seqs, num_heads, v_head_size] float32 and prefix_lse: [max_spans, num_seqs, num_heads]
    float32, base 2: written for the spans of sequences in groups. span_rows: num_seqs * num_heads.
    """
    # Per step, like the schedule: read before the wait, so that a step without units waits for nothing more.
    num_units = tl.load(units, cache_modifier=".cg")
    unit = load_unit(units, tl.program_id(0), num_units)
    if pdl:
        gdc_wait()
    if passes != OWN_TOKENS:
        for at in range(tl.program_id(0), num_units, tl.num_programs(0)):
            _attend_unit(
                query, kv_cache, block_table, unit, members, prefixes, prefix_lse, span_rows, scale_log2, softcap_log2,
                query_stride, table_stride, num_kv_heads, group, UNIT_ROWS, block_size, head_size, v_head_size,
                token_stride, value_offset, head_stride, page_size, width, v_width, tile_tokens,
            )  # fmt: skip
            unit = load_unit(units, at + tl.num_programs(0), num_units)
    if passes == BOTH:
        is_over = num_units <= 0
        if num_units > 0:
            is_over = grid_barrier(barrier, tl.num_programs(0))
        scale_log2 = tl.where(is_over, scale_log2, float("nan"))
    return scale_log2


@triton.jit
def merge_prefix(
    row_max,
    row_sum,
    acc,
    prefixes,
    prefix_lse,
    num_spans,
    at,
    span_rows,
    rows: tl.constexpr,
    group: tl.constexpr,
    v_head_size: tl.constexpr,
    v_width: tl.constexpr,
):
    """The online softmax of a work item, updated with the spans of its prefix -> (row_max, row_sum, acc).

    num_spans: 0: it has none. at: its first row of the span_rows rows of a span, as in `attend_shared_prefixes`.
    """
    row = tl.arange(0, rows)
    dim = tl.arange(0, v_width)[None, :]
    in_bounds = (row < group)[:, None] & (dim < v_head_size)
    for _ in range(num_spans):
        source = at + row
        lse = tl.load(prefix_lse + source, mask=row < group, other=MASK_VALUE, cache_modifier=".cg")
        source = source[:, None] * v_head_size + dim
        prefix = tl.load(prefixes + source, mask=in_bounds, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, lse)
        share, rescale = tl.exp2(lse - new_max), tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + share
        acc = acc * rescale[:, None] + prefix * share[:, None]
        row_max = new_max
        at += span_rows
    return row_max, row_sum, acc


class PrefixTensors(NamedTuple):
    """The decode kernel's arguments for shared prefixes; all None: without."""

    shared_words: torch.Tensor | None = None
    units: torch.Tensor | None = None
    members: torch.Tensor | None = None
    prefixes: torch.Tensor | None = None  # this and the next: see `attend_shared_prefixes`
    prefix_lse: torch.Tensor | None = None
    barrier: torch.Tensor | None = None

    @classmethod
    def of(cls, shared: SharedPrefixes | None, barrier: torch.Tensor) -> PrefixTensors:
        """barrier: [2] int32, of `grid_barrier`."""
        if shared is None:
            return cls()
        return cls(shared.words, shared.units, shared.members, shared.prefixes, shared.prefix_lse, barrier)

    def passes(self) -> tuple[int, ...]:
        """What each launch does. The interpreter, in which a program ends before the next one begins, has two."""
        is_interpreted = self.barrier is not None and self.barrier.device.type == "cpu"
        return (PREFIXES.value, OWN_TOKENS.value) if is_interpreted else (BOTH.value,)
