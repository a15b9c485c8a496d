"""What `warp_split_decode` merges: the softmaxes of its warps, of shared prefixes, and the split-KV partials.

Each is a weighted sum of values and the log-sum-exp of its scores, in base 2; results are [rows, head_size] float32, a
row a query head, in the layout `row_layout`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringcore.kernels.attention.attention_tile import MASK_VALUE, sink_share
from ringcore.kernels.attention.split_kv_combine import (
    MAX_READS,
    UNWRITTEN,
    UNWRITTEN_NUMBER,
    ZERO_PARTIAL,
    partial_lse,
    partial_number,
)

__all__ = ["add", "combine_partials", "first_rows", "largest", "merge_prefixes", "merge_warps", "row_layout"]


@gluon.constexpr_function
def row_layout(rows, num_warps):
    """Of [rows, head_size]: 32 threads read 512 bytes of partials, and no element belongs to two threads."""
    row_warps = min(rows, num_warps)
    return gl.BlockedLayout([1, 2], [1, 32], [row_warps, num_warps // row_warps], [1, 0])


@gluon.constexpr_function
def _stacked_layout(rows, num_warps):
    """Of [num_warps, rows, head_size]: a thread has the same numbers of all warps."""
    row_warps = min(rows, num_warps)
    return gl.BlockedLayout([num_warps, 1, 2], [1, 1, 32], [1, row_warps, num_warps // row_warps], [2, 1, 0])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def largest(a, b):
    return gl.maximum(a, b)


@gluon.jit
def merge_warps(
    accs,  # shared memory [num_warps, rows, head_size] float32: each warp's sum of weighted values
    maxima,  # shared memory [num_warps, rows] float32: its largest score
    sums,  # shared memory [num_warps, rows] float32: its sum of weights
    score,  # [rows] of one more token, MASK_VALUE: of none
    value,  # [1, head_size] float32 of that token
    num_warps: gl.constexpr,
    rows: gl.constexpr,
):
    """-> the sum of weighted values, the largest score and the sum of weights, of all warps and the token."""
    result: gl.constexpr = row_layout(rows, num_warps)
    stacked: gl.constexpr = _stacked_layout(rows, num_warps)
    of_rows: gl.constexpr = gl.SliceLayout(1, result)
    warp_max = maxima.load(gl.SliceLayout(2, stacked))
    row_max = gl.maximum(gl.convert_layout(gl.reduce(warp_max, 0, largest), of_rows, assert_trivial=True), score)
    of_warps = gl.convert_layout(row_max, gl.SliceLayout(0, gl.SliceLayout(2, stacked)), assert_trivial=True)
    share = gl.exp2(warp_max - gl.expand_dims(of_warps, 0))
    weight = gl.exp2(score - row_max)
    row_sum = gl.reduce(sums.load(gl.SliceLayout(2, stacked)) * share, 0, add)
    row_sum = gl.convert_layout(row_sum, of_rows, assert_trivial=True) + weight
    share = gl.expand_dims(share, 2)
    acc = gl.where(share > 0.0, accs.load(stacked) * share, 0.0)  # 0: none visible, and what it read may be NaN
    acc = gl.convert_layout(gl.reduce(acc, 0, add), result, assert_trivial=True)
    return acc + gl.expand_dims(weight, 1) * value, row_max, row_sum


@gluon.jit
def merge_prefixes(acc, row_max, row_sum, prefixes, prefix_lse, num_spans, at, span_rows, group: gl.constexpr):
    """The softmax of a work item, updated with the spans of its shared prefix: `cascade_attention.merge_prefix`."""
    head_size: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    dim = gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, layout)), 0)
    for _ in range(num_spans):
        lse = gl.load(prefix_lse + at + row, mask=row < group, other=MASK_VALUE, cache_modifier=".cg")
        source = prefixes + gl.expand_dims((at + row) * head_size, 1) + dim
        prefix = gl.load(source, mask=gl.expand_dims(row < group, 1) & (dim >= 0), other=0.0, cache_modifier=".cg")
        new_max = gl.maximum(row_max, lse)
        share, rescale = gl.exp2(lse - new_max), gl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + share
        acc = acc * gl.expand_dims(rescale, 1) + prefix * gl.expand_dims(share, 1)
        row_max = new_max
        at += span_rows
    return acc, row_max, row_sum


@gluon.jit
def first_rows(numbers, rows: gl.constexpr, num_warps: gl.constexpr):
    """The first `rows` rows, half of them or all."""
    all_rows: gl.constexpr = numbers.shape[0]
    if rows < all_rows:
        halves = gl.permute(gl.reshape(numbers, [2, rows, numbers.shape[1]]), (1, 2, 0))
        numbers, _ = gl.split(halves)
    return gl.convert_layout(numbers, row_layout(rows, num_warps), assert_trivial=True)


@gluon.jit
def combine_partials(
    partials, first_program, num_partials, result, lse, sinks, group: gl.constexpr, per_round: gl.constexpr
):
    """The result of a work item: this program's own, with the partials of the programs from first_program on.

    As `split_kv_combine.combine_partials`, but for this program's own, which is not read back. result and lse: [rows,
    head_size], lse the same in a row. sinks: of the work item's query heads, or None.
    """
    rows: gl.constexpr = result.shape[0]
    head_size: gl.constexpr = result.shape[1]
    layout: gl.constexpr = result.type.layout
    row = gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(1, layout)), 1)
    dim = gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, layout)), 0)
    in_bounds = (row < group) & (dim >= 0)
    slot: gl.constexpr = group * head_size
    elements = partials + first_program * (2 * slot) + row * head_size + dim
    weight_sum = gl.full([rows, head_size], 1.0, gl.float32, layout)
    none = gl.full([rows, head_size], ZERO_PARTIAL, gl.int64, layout)
    unwritten = gl.full([rows, head_size], UNWRITTEN, gl.int64, layout)
    for begin in range(0, num_partials, per_round):
        left = num_partials - begin
        first = elements + gl.where(begin == 0, slot, 0)
        words = []  # defined before the loop, which carries it
        for _ in gl.static_range(per_round):
            words += [none]
        reads = 0
        while reads < MAX_READS:
            words = []
            for k in gl.static_range(per_round):
                element = first if k == 0 else elements + k * (2 * slot)
                words += [gl.load(element, mask=in_bounds & (k < left), other=none, volatile=True)]
            worst = gl.zeros([rows, head_size], gl.uint32, layout)
            for k in gl.static_range(per_round):
                worst = gl.maximum(worst, words[k].to(gl.uint32))
            worst = gl.reduce(gl.reduce(worst, 1, largest), 0, largest)
            reads = gl.where(worst == UNWRITTEN_NUMBER, reads + 1, MAX_READS)
        new_max = lse
        for k in gl.static_range(per_round):
            element = first if k == 0 else elements + k * (2 * slot)
            gl.store(element, unwritten, mask=in_bounds & (k < left))
            new_max = gl.maximum(new_max, partial_lse(words[k]))
        rescale = gl.exp2(lse - new_max)
        weight_sum *= rescale
        result *= rescale
        for k in gl.static_range(per_round):
            share = gl.exp2(partial_lse(words[k]) - new_max)
            weight_sum += share
            result += partial_number(words[k]) * share
        lse = new_max
        elements += per_round * 2 * slot
    result /= weight_sum
    if sinks is not None:
        result *= sink_share(sinks + row, row < group, lse + gl.log2(weight_sum))
    return result
