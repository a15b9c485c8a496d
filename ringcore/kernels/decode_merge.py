"""How the programs that share a (sequence, KV head) pair of the decode kernel put their parts together.

A part is what a program attended to and, beside each of its numbers, the logarithm of the sum of its weights. Parts lie
in a scratch, which the program that has the pair's end reads until all that it needs has been written: an unwritten
place has bits that none of `packed` has, as in the low-latency protocol of NCCL. So there is no counter and no fence,
each of which is a trip to memory and back. It waits for programs before it alone, which have started before it and end
without it; then it unwrites the scratch for the next launch.

It runs once a launch, and less code was faster in whole passes: hence one number for two, and few parts at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.attention_tile import HIDDEN

__all__ = ["UNWRITTEN", "merge_parts", "packed"]

UNWRITTEN = tl.constexpr(-1)  # a place in the scratch that nobody has written: 64 bits that `packed` does not give

# About a second: whoever has not written by then never will, and the result is NaN in place of a device that hangs.
_MAX_READS = tl.constexpr(1 << 21)


@triton.jit
def packed(number, weight):
    """A number of a part and the part's weight, both float32, in 64 bits: whoever sees one of them sees both."""
    number_bits = number.to(tl.int32, bitcast=True)
    number_bits = tl.where(number_bits == UNWRITTEN, 0x7FC00000, number_bits)  # of two NaNs the usual one
    return (weight.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (number_bits.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _read_once(places, exists):
    """What lies there, and whether some of it is unwritten."""
    # Volatile: from where all see the same, past the cache of the SM, each time.
    found = tl.load(places, mask=exists, other=0, volatile=True)
    return found, tl.max((found == UNWRITTEN).to(tl.int32), axis=None)


@triton.jit
def _take(places, exists):
    """What lies there, once all of it has been written; it is unwritten then."""
    found, missing = _read_once(places, exists)
    reads = 0
    while (missing > 0) & (reads < _MAX_READS):
        found, missing = _read_once(places, exists)
        reads += 1
    tl.store(places, tl.full(found.shape, UNWRITTEN, tl.int64), mask=exists)
    return found


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
    at_once: parts that are read together, of which no thread shares a place with another (`DecodeWork.merged_at_once`).
    """
    row = tl.arange(0, rows)
    dim = tl.arange(0, width)
    best = tl.full([rows, width], HIDDEN, tl.float32)
    total = tl.zeros([rows, width], tl.float32)
    attended = tl.zeros([rows, width], tl.float32)
    for begin in range(0, num_parts, at_once):
        part = begin + tl.arange(0, at_once)
        slot = 2 * (first_program + part) + (part == 0).to(tl.int32)
        is_row = (part < num_parts)[:, None] & (row < group)[None, :]
        exists = is_row[:, :, None] & (dim < head_size)[None, None, :]
        at = slot[:, None] * group + row[None, :]
        found = _take(partials + at[:, :, None] * head_size + dim[None, None, :], exists)
        numbers = found.to(tl.int32).to(tl.float32, bitcast=True)
        weights = tl.where(exists, (found >> 32).to(tl.int32).to(tl.float32, bitcast=True), HIDDEN)
        new_best = tl.maximum(best, tl.max(weights, 0))
        fade = tl.exp2(best - new_best)
        shares = tl.exp2(weights - new_best[None, :, :])
        total = total * fade + tl.sum(shares, 0)
        attended = attended * fade + tl.sum(numbers * shares, 0)
        best = new_best
    return attended / total
