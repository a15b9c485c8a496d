"""The prologue of the decode kernel: of each work item, a (sequence, KV head) pair, q/k head norms, rotary embedding
(RoPE) and the KV cache write, by the arithmetic of `qk_norm_rope`. It saves that kernel's launch.

A program rotates the queries of every work item of which it has tiles, so those of an item that several programs share
are rotated by each of them, to the same bits at the same place. The new key and value of an item are in its last tile:
the program that has this tile writes them, and no other reads them. So no program waits for another; a barrier of the
program is enough between the prologue and the loads of its main loop. Shared prefixes (`cascade_attention`) have no new
keys; a unit rotates its queries as it reads them.

That holds where no sequence reads what another one writes in the same step: not for the drafts of one row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ringcore.kernels.decode_scheduler import DecodeTileScheduler
from ringcore.kernels.page_layout import padded_head_size
from ringcore.kernels.qk_norm_rope import FLOAT16_LARGEST, finite, normed_and_rotated
from ringcore.kernels.tile_ranges import RECORD, WORK_ITEMS
from ringcore.kernels.unrotated_heads import UnrotatedHeads

__all__ = [
    "DecodePrologue",
    "begin_prologue",
    "has_prologue",
    "prologue_arguments",
    "rotate_work_items",
    "rotated_queries",
]

_ELEMENTS = 2048  # of the work items of a round, which waits for memory once
_MAX_ELEMENTS = 4096  # of one work item: registers


class DecodePrologue(NamedTuple):
    """What the decode kernel rotates and writes itself: the heads of sequence i, and the slot of its key and value."""

    heads: UnrotatedHeads
    slot_mapping: torch.Tensor  # [num_seqs] int64, as `qk_norm_rope` takes it


def prologue_arguments(
    prologue: DecodePrologue | None, query: torch.Tensor, tile_scheduler: DecodeTileScheduler
) -> tuple[torch.Tensor | float | None, ...]:
    """Of the decode kernel: `qkv` and those after it, all None without a prologue. query: [num_seqs, num_heads,
    head_size], contiguous, where the rotated queries go."""
    if prologue is None:
        return (None,) * 5
    (qkv, cos_sin, gain, eps), slots = prologue
    n, num_heads, head_size = query.shape
    num_all = num_heads + 2 * tile_scheduler.num_kv_heads
    assert has_prologue(tile_scheduler), (tile_scheduler.group, head_size)
    assert (qkv.shape, qkv.dtype) == ((n, num_all * head_size), query.dtype), qkv.shape
    assert (cos_sin.shape, cos_sin.dtype) == ((n, head_size), torch.float32), cos_sin.shape
    assert gain is None or gain.shape == (2, head_size), gain.shape
    assert (slots.shape, slots.dtype) == ((n,), torch.int64), slots.shape
    assert all(tensor is None or tensor.is_contiguous() for tensor in (query, qkv, cos_sin, gain, slots))
    return qkv, cos_sin, gain, slots, eps


def has_prologue(tile_scheduler: DecodeTileScheduler) -> bool:
    """Whether the decode kernel has one for layers of the scheduler's shape: for small enough work items. With spans it
    has none: `qk_norm_rope` rounds their prompts, and is compiled with other options."""
    num_elements: int = _heads_of_item(tile_scheduler.group) * padded_head_size(tile_scheduler.head_size)
    is_served = tile_scheduler.head_size == tile_scheduler.v_head_size and not tile_scheduler.span_slots
    return is_served and num_elements <= _MAX_ELEMENTS


@triton.constexpr_function
def _heads_of_item(group):
    """Queries, key and value, rounded up to what `tl.arange` takes."""
    return triton.next_power_of_2(group + 2)


@triton.constexpr_function
def _items_per_round(group, width):
    return max(1, _ELEMENTS // (_heads_of_item(group) * width))


@triton.jit
def _heads(group: tl.constexpr, width: tl.constexpr):
    """Of the rows of a round: their work items, and their heads in these, queries first, then key and value."""
    heads: tl.constexpr = _heads_of_item(group)
    row = tl.arange(0, _items_per_round(group, width) * heads)
    return row // heads, row % heads


@triton.jit
def begin_prologue(tile_ranges, program, norm_gain, group: tl.constexpr, head_size: tl.constexpr, width: tl.constexpr):
    """What may be loaded before other kernels of the step have ended -> (work items of the range, those that end in it,
    the gain of every row of a round, or without a norm zeros)."""
    both = tl.load(tile_ranges + program * RECORD + WORK_ITEMS, cache_modifier=".cg")
    _, head = _heads(group, width)
    dim = tl.arange(0, width)[None, :]
    gain = tl.zeros([head.shape[0], width], tl.float32)
    if norm_gain is not None:
        rows = norm_gain + (head == group).to(tl.int32)[:, None] * head_size + dim
        gain = tl.load(rows, mask=dim < head_size, other=0.0)
    return (both + 1) // 2, both // 2, gain


@triton.jit
def rotate_work_items(
    qkv,
    cos_sin,
    norm_gain,
    slot_mapping,
    eps,
    query,  # [num_seqs, num_kv_heads, group, head_size], written
    kv_cache,
    first_item,  # of the range
    num_items,  # of the range; of these the first `num_ended` end in it
    num_ended,
    gain,  # from `begin_prologue`
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_stride: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
):
    """Of a range's work items the queries, and of those that end in it key and value. Later loads of the program, by
    any thread, see what was written."""
    num_all: tl.constexpr = num_kv_heads * (group + 2)  # heads of a token
    largest: tl.constexpr = FLOAT16_LARGEST if kv_cache.dtype.element_ty == tl.float16 else 0.0
    ordinal, head = _heads(group, width)
    is_query, is_value = head < group, head == group + 1
    of_norm = None if norm_gain is None else gain
    dim = tl.arange(0, width)[None, :]
    # Not pipelined: mostly it is one round, and shared memory is the main loop's.
    for begin in tl.range(0, num_items, _items_per_round(group, width), num_stages=1):
        item = first_item.to(tl.int32) + begin + ordinal
        token, kv_head = (item // num_kv_heads).to(tl.int64), item % num_kv_heads
        is_there = (head < group + 2) & (begin + ordinal < tl.where(is_query, num_items, num_ended))
        mask = is_there[:, None] & (dim < head_size)
        of_token = tl.where(is_query, kv_head * group + head, head * num_kv_heads + kv_head)
        x = tl.load(qkv + (token * num_all + of_token)[:, None] * head_size + dim, mask=mask, other=0.0)
        angles = tl.load(cos_sin + token[:, None] * head_size + dim, mask=mask, other=0.0)
        slot = tl.load(slot_mapping + token, mask=is_there & (head >= group), other=0)
        angles = tl.reshape(angles, [head.shape[0], width // 2, 2])
        y = tl.where(is_value[:, None], x.to(tl.float32), normed_and_rotated(x, of_norm, angles, eps, head_size))
        target = query + (token * num_kv_heads * group + of_token)[:, None] * head_size + dim
        tl.store(target, y.to(query.dtype.element_ty), mask=mask & is_query[:, None])
        place = slot // block_size * page_size + kv_head * head_stride + slot % block_size * token_stride
        place += is_value.to(tl.int64) * value_offset
        numbers = finite(y, largest).to(kv_cache.dtype.element_ty)
        tl.store(kv_cache + place[:, None] + dim, numbers, mask=mask & (head >= group)[:, None])
    tl.debug_barrier()  # what a thread has written is seen by all


@triton.jit
def rotated_queries(
    qkv,
    cos_sin,
    norm_gain,
    eps,
    token,  # [rows]
    head,  # [rows]
    in_bounds,  # [rows]
    num_all: tl.constexpr,  # heads of a token
    head_size: tl.constexpr,
    width: tl.constexpr,
):
    """Some query heads of some tokens, as `rotate_work_items` stores them: [rows, width] in the model's dtype."""
    dim = tl.arange(0, width)[None, :]
    token, mask = token.to(tl.int64), in_bounds[:, None] & (dim < head_size)
    heads = tl.load(qkv + (token * num_all + head)[:, None] * head_size + dim, mask=mask, other=0.0)
    angles = tl.load(cos_sin + token[:, None] * head_size + dim, mask=mask, other=0.0)
    angles = tl.reshape(angles, [head.shape[0], width // 2, 2])
    gain = None
    if norm_gain is not None:
        gain = tl.load(norm_gain + dim, mask=dim < head_size, other=0.0)
    return normed_and_rotated(heads, gain, angles, eps, head_size).to(qkv.dtype.element_ty)
