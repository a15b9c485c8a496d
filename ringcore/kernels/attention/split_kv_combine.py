"""Combines the split-KV partials of a work item (a (sequence, KV head) pair of the decode kernel) with log-sum-exp
weights.

A partial is what a program attended to; each element carries the log-sum-exp of its scores. Partials lie in a
workspace. The program with the last tile of the work item polls it until all its partials are written: an unwritten
element holds a sentinel, a bit pattern that `pack_partial` never returns (as in NCCL's low-latency protocol). So there
is no counter and no fence, each of which is a round trip to memory. The program waits only for programs with lower ids,
which started before it and do not wait for it; then it resets the workspace to the sentinel for the next launch.

The combine runs once per launch, and few instructions were faster in whole passes: hence element and log-sum-exp in one
64-bit word. All partials of a round are words before one of them is inspected, and no element leaves its thread, so
that a round waits for memory once and for nothing else. (As one tensor they would be spread over the warps and reduced
through shared memory.)
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ringcore.kernels.attention.attention_spans import merge_partials
from ringcore.kernels.attention.attention_tile import MASK_VALUE, sink_share

__all__ = [
    "MAX_READS",
    "UNWRITTEN",
    "UNWRITTEN_NUMBER",
    "ZERO_PARTIAL",
    "combine_partials",
    "pack_partial",
    "partial_lse",
    "partial_number",
]

UNWRITTEN = tl.constexpr(-1)  # sentinel of an unwritten element: 64 bits that `pack_partial` never returns
UNWRITTEN_NUMBER = tl.constexpr(0xFFFFFFFF)  # its lower half, which `pack_partial` never returns either
# `pack_partial(0, MASK_VALUE)`, a partial of weight 0.
ZERO_PARTIAL = tl.constexpr(struct.unpack("i", struct.pack("f", MASK_VALUE.value))[0] << 32)

# About a second. A program that has not written by then never will: the result is NaN, and the device does not hang.
MAX_READS = tl.constexpr(1 << 21)


@triton.jit
def pack_partial(number, log_sum_exp):
    """An element of a partial and the partial's log-sum-exp, both float32, in one 64-bit word: a reader sees both or
    neither."""
    number_bits = number.to(tl.int32, bitcast=True)
    # A NaN with the bits of the sentinel becomes the canonical NaN.
    number_bits = tl.where(number_bits == UNWRITTEN, 0x7FC00000, number_bits)
    return (log_sum_exp.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (number_bits.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def partial_lse(word):
    """The log-sum-exp of a `pack_partial`."""
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def partial_number(word):
    """The number of a `pack_partial`."""
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def combine_partials(
    partials,
    first_program,
    num_partials,
    sinks,
    group: tl.constexpr,
    rows: tl.constexpr,
    v_head_size: tl.constexpr,
    width: tl.constexpr,
    per_round: tl.constexpr,
    first_row=0,
    in_order: tl.constexpr = False,
):
    """Combines the partials of one work item, those of the programs from `first_program` on -> [rows, width] float32.

    The first program left its partial in its slot 1, because the work item is the last one of its tile range; the
    others in slot 0. in_order: they are in neighbouring slots, of which `first_program` is the first, and are merged
    one by one (`merge_partials`). rows: group or more, and enough that every thread has an element
    (`DecodeTileScheduler.combine_rows`): if several threads read the same element, one may see it written and another
    not yet. per_round: partials words together. sinks: of the work item's query heads, or None; they enter here, once.
    first_row: of the `rows` that are combined; the group may have more.
    """
    row = first_row + tl.arange(0, rows)[:, None]
    dim = tl.arange(0, width)[None, :]
    in_bounds_row = (row < group) & (dim < v_head_size)
    slot: tl.constexpr = group * v_head_size
    stride: tl.constexpr = slot if in_order else 2 * slot
    elements = partials + first_program * stride + row * v_head_size + dim
    lse_max = tl.full([rows, width], MASK_VALUE, tl.float32)
    weight_sum = tl.zeros([rows, width], tl.float32)
    acc = tl.zeros([rows, width], tl.float32)
    for begin in range(0, num_partials, per_round):
        left = num_partials - begin
        first = elements if in_order else elements + tl.where(begin == 0, slot, 0)
        words = []  # defined before the loop, which carries it
        for _ in tl.static_range(per_round):
            words += [tl.zeros([rows, width], tl.int64)]
        reads = 0
        while reads < MAX_READS:
            words = []
            for k in tl.static_range(per_round):
                element = first if k == 0 else elements + k * stride
                in_bounds = in_bounds_row if k == 0 else in_bounds_row & (k < left)
                # Volatile: each read bypasses the L1 cache of the SM.
                words += [tl.load(element, mask=in_bounds, other=ZERO_PARTIAL, volatile=True)]
            largest = tl.zeros([rows, width], tl.uint32)
            for k in tl.static_range(per_round):
                largest = tl.maximum(largest, words[k].to(tl.uint32))
            reads = tl.where(tl.max(largest, axis=None) == UNWRITTEN_NUMBER, reads + 1, MAX_READS)
        new_max = lse_max
        for k in tl.static_range(per_round):
            element = first if k == 0 else elements + k * stride
            in_bounds = in_bounds_row if k == 0 else in_bounds_row & (k < left)
            tl.store(element, tl.full([rows, width], UNWRITTEN, tl.int64), mask=in_bounds)
            new_max = tl.maximum(new_max, partial_lse(words[k]))
        if in_order:
            for k in tl.static_range(per_round):
                acc, lse_max = merge_partials(acc, lse_max, partial_number(words[k]), partial_lse(words[k]))
        else:
            rescale = tl.exp2(lse_max - new_max)
            weight_sum *= rescale
            acc *= rescale
            for k in tl.static_range(per_round):
                share = tl.exp2(partial_lse(words[k]) - new_max)
                weight_sum += share
                acc += partial_number(words[k]) * share
            lse_max = new_max
        elements += per_round * stride
    if not in_order:
        acc = acc / weight_sum
        lse_max += tl.log2(weight_sum)
    if sinks is not None:
        acc *= sink_share(sinks + row, row < group, lse_max)
    return acc
