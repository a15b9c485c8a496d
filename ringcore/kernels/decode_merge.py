"""How the programs that share a (sequence, KV head) pair of the decode kernel put their parts together.

A part is what a program attended to and, beside each of its numbers, the logarithm of the sum of its weights. Parts lie
in a scratch, which the program that has the pair's end reads until all that it needs has been written: an unwritten
place has bits that none of `packed` has, as in the low-latency protocol of NCCL. So there is no counter and no fence,
each of which is a trip to memory and back. It waits for programs before it alone, which have started before it and end
without it; then it unwrites the scratch for the next launch.

It runs once a launch, and few instructions were faster in whole passes: hence one number for two. The parts that are
read together are all asked for before one of them is looked at, and no number leaves its thread, so that memory is
waited for once and nothing else is. (As one tensor they would be spread over the warps, and added up through shared
memory.)
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ringcore.kernels.attention_tile import HIDDEN

__all__ = ["UNWRITTEN", "merge_parts", "packed"]

UNWRITTEN = tl.constexpr(-1)  # a place in the scratch that nobody has written: 64 bits that `packed` does not give
_UNWRITTEN_NUMBER = tl.constexpr(0xFFFFFFFF)  # the number's half of them, which `packed` does not give either
# `packed(0, HIDDEN)`, a part that adds nothing.
_NOTHING = tl.constexpr(struct.unpack("i", struct.pack("f", HIDDEN.value))[0] << 32)

# About a second: whoever has not written by then never will, and the result is NaN in place of a device that hangs.
_MAX_READS = tl.constexpr(1 << 21)


@triton.jit
def packed(number, weight):
    """A number of a part and the part's weight, both float32, in 64 bits: whoever sees one of them sees both."""
    number_bits = number.to(tl.int32, bitcast=True)
    number_bits = tl.where(number_bits == UNWRITTEN, 0x7FC00000, number_bits)  # of two NaNs the usual one
    return (weight.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (number_bits.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _weight(part):
    return (part >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def merge_parts(
    partials,
    first_program,
    num_parts,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    at_once: tl.constexpr,
):
    """What the programs from `first_program` on have of one pair, added up -> [rows, width] float32.

    The first program left its part in its slot 1, since the pair is the last one of its run; the others in slot 0.
    rows: group or more, and so many that every thread has a place (`DecodeWork.merged_rows`): of one that several read,
    one may see what is written and another may not yet. at_once: parts that are read together.
    """
    row = tl.arange(0, rows)[:, None]
    dim = tl.arange(0, width)[None, :]
    exists = (row < group) & (dim < head_size)
    slot: tl.constexpr = group * head_size
    places = partials + first_program * (2 * slot) + row * head_size + dim
    best = tl.full([rows, width], HIDDEN, tl.float32)
    total = tl.zeros([rows, width], tl.float32)
    attended = tl.zeros([rows, width], tl.float32)
    for begin in range(0, num_parts, at_once):
        left = num_parts - begin
        first = places + tl.where(begin == 0, slot, 0)
        parts = []  # a loop carries only what stood before it
        for _ in tl.static_range(at_once):
            parts += [tl.zeros([rows, width], tl.int64)]
        reads = 0
        while reads < _MAX_READS:
            parts = []
            for k in tl.static_range(at_once):
                place = first if k == 0 else places + k * (2 * slot)
                is_there = exists if k == 0 else exists & (k < left)
                # Volatile: from where all see the same, past the cache of the SM, each time.
                parts += [tl.load(place, mask=is_there, other=_NOTHING, volatile=True)]
            largest = tl.zeros([rows, width], tl.uint32)
            for k in tl.static_range(at_once):
                largest = tl.maximum(largest, parts[k].to(tl.uint32))
            reads = tl.where(tl.max(largest, axis=None) == _UNWRITTEN_NUMBER, reads + 1, _MAX_READS)
        new_best = best
        for k in tl.static_range(at_once):
            place = first if k == 0 else places + k * (2 * slot)
            is_there = exists if k == 0 else exists & (k < left)
            tl.store(place, tl.full([rows, width], UNWRITTEN, tl.int64), mask=is_there)
            new_best = tl.maximum(new_best, _weight(parts[k]))
        fade = tl.exp2(best - new_best)
        total *= fade
        attended *= fade
        for k in tl.static_range(at_once):
            share = tl.exp2(_weight(parts[k]) - new_best)
            total += share
            attended += parts[k].to(tl.int32).to(tl.float32, bitcast=True) * share
        best = new_best
        places += at_once * 2 * slot
    return attended / total
