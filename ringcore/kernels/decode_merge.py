"""How the programs that share a (sequence, KV head) pair of the decode kernel put their parts together.

A part is what a program attended to, and the logarithm of the sum of its weights. Parts lie in a scratch, which the
program that has the pair's end reads until every number that it needs has been written: an unwritten one has bits that
no number has, as in the low-latency protocol of NCCL. So there is no counter and no fence, each of which is a trip to
memory and back. It waits for programs before it alone, which have started before it and end without it; then it
unwrites the scratch for the next launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.attention_tile import HIDDEN

__all__ = ["UNWRITTEN", "merge_parts", "written"]

# The bits of a place in the scratch that nobody has written: a NaN that no arithmetic makes.
UNWRITTEN = tl.constexpr(-1)

# About a second: whoever has not written by then never will, and the result is NaN in place of a device that hangs.
_MAX_READS = tl.constexpr(1 << 21)


@triton.jit
def written(numbers):
    """numbers, but for one that would pass for an unwritten place."""
    is_unwritten = numbers.to(tl.int32, bitcast=True) == UNWRITTEN
    return tl.where(is_unwritten, float("nan"), numbers)


@triton.jit
def _read_once(sums, weights, exists):
    """What lies at `sums` and at `weights`, and whether some of it is unwritten; all [parts, rows, width].

    A thread reads the weights beside its own numbers, though they are equal along a row. Of a smaller tensor several
    threads would have copies, read at different times, and one copy's being written says nothing of another's.
    """
    # Volatile: from where all see the same, past the cache of the SM, each time.
    sum_part = tl.load(sums, mask=exists, other=0.0, volatile=True)
    weight = tl.load(weights, mask=exists, other=HIDDEN, volatile=True)
    gaps = sum_part.to(tl.int32, bitcast=True) == UNWRITTEN
    gaps |= weight.to(tl.int32, bitcast=True) == UNWRITTEN
    return sum_part, weight, tl.max(gaps.to(tl.int32), axis=None)


@triton.jit
def _read_parts(sums, weights, exists):
    """As `_read_once`, but the last, when all has been written."""
    sum_part, weight, missing = _read_once(sums, weights, exists)
    reads = 0
    while (missing > 0) & (reads < _MAX_READS):
        sum_part, weight, missing = _read_once(sums, weights, exists)
        reads += 1
    return sum_part, weight


@triton.jit
def merge_parts(
    partial_out,
    partial_weight,
    first_program,
    num_parts,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_size: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
):
    """What the programs from `first_program` on have of one pair, added up -> [rows, width] float32.

    The first program left its part in its slot 1, since the pair is the last one of its run; the others in slot 0.
    """
    row = tl.arange(0, rows)
    dim = tl.arange(0, width)
    best = tl.full([rows, width], HIDDEN, tl.float32)
    total = tl.zeros([rows, width], tl.float32)
    attended = tl.zeros([rows, width], tl.float32)
    for begin in range(0, num_parts, parts):
        part = begin + tl.arange(0, parts)
        slot = 2 * (first_program + part) + (part == 0).to(tl.int32)
        is_row = (part < num_parts)[:, None] & (row < group)[None, :]
        exists = is_row[:, :, None] & (dim < head_size)[None, None, :]
        at = slot[:, None] * group + row[None, :]
        sums = partial_out + at[:, :, None] * head_size + dim[None, None, :]
        weights = tl.broadcast_to((partial_weight + at)[:, :, None], [parts, rows, width])
        sum_part, weight = _read_parts(sums, weights, exists)
        nothing = tl.full([parts, rows, width], UNWRITTEN, tl.int32).to(tl.float32, bitcast=True)
        tl.store(weights, nothing, mask=exists)
        tl.store(sums, nothing, mask=exists)
        new_best = tl.maximum(best, tl.max(weight, 0))
        fade = tl.exp2(best - new_best)
        share = tl.exp2(weight - new_best[None, :, :])
        total = total * fade + tl.sum(share, 0)
        attended = attended * fade + tl.sum(sum_part * share, 0)
        best = new_best
    return attended / total
