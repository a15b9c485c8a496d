"""The scales and zeros of a tile of quantized weights: each column's, loaded once a group where that is possible.

Arguments of all: `packed` and `layout` as of `weight_tiles.tile_arguments`; rows [n] int, the outputs; at, the first
input; inputs: [columns] of the tile, where it is of words those of the lowest nibbles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.linears.packed_weight import DENSE, NIBBLES, NIBBLES_E2M1

__all__ = [
    "MOVED",
    "are_alike",
    "are_compact",
    "chunk_scales",
    "chunk_zeros",
    "entries_of_row",
    "has_one_group",
    "has_quads",
    "load_scales",
    "moved_scales",
    "scale_rows",
    "scales_of",
    "zeros_in",
    "zeros_of",
]

# Sums of e2m1 in bfloat16 are of weights times 2^-63, so that neither these nor their scales leave its range.
MOVED = tl.constexpr(63)
_DENSE = tl.constexpr(DENSE)


@triton.constexpr_function
def has_quads(layout):
    """Whether a tile of codes is four of numbers."""
    return layout[0] in (NIBBLES, NIBBLES_E2M1)


@triton.constexpr_function
def has_one_group(layout, block_inputs):
    _, num_groups, size, offset, _, _, has_index = layout[:7]
    return num_groups == 1 or (not has_index and offset % block_inputs == 0 and size % block_inputs == 0)


@triton.constexpr_function
def are_alike(layout):
    """Whether the four numbers of a word are of one group."""
    _, num_groups, size, offset, _, _, has_index, run = layout[:8]
    return num_groups == 1 or (not has_index and size % (4 * run) == 0 and offset % (4 * run) == 0)


@triton.constexpr_function
def are_compact(layout, block_inputs):
    """Whether a tile is of whole groups, or its groups of whole tiles: their numbers are loaded once a group."""
    _, _, size, offset, _, _, has_index = layout[:7]
    is_whole = not has_index and offset == 0 and block_inputs % size == 0
    return has_one_group(layout, block_inputs) or (is_whole and (not has_quads(layout) or are_alike(layout)))


@triton.jit
def scale_rows(rows, layout: tl.constexpr):
    """The row of the scales of each output, int64."""
    run: tl.constexpr = layout[9]
    if run > 1:
        rows = rows // run
    return rows.to(tl.int64)


@triton.jit
def load_scales(packed, rows, at, block_inputs: tl.constexpr, layout: tl.constexpr):
    """Ahead of the tile from input `at` on, see `_load_groups`: what its `scales_of` or `moved_scales` begin with."""
    return _load_groups(packed[0], packed[4], packed[5], rows, at, block_inputs, layout)


@triton.jit
def entries_of_row(packed, num_inputs: tl.constexpr, layout: tl.constexpr):
    """From output to output of the weight; of a dense one its inputs."""
    if layout[0] == _DENSE:
        found = num_inputs
    else:
        found = packed[3]
    return found


@triton.jit
def zeros_of(packed, rows, at, inputs, num_inputs: tl.constexpr, block_inputs: tl.constexpr, layout: tl.constexpr):
    """Of bytes: as `_of_groups`, int16."""
    return _of_groups(packed[1], packed[6], packed[7], packed[2], rows, at, inputs, num_inputs, block_inputs, layout)


@triton.jit
def zeros_in(scales, layout: tl.constexpr):
    """Of nibbles: int16, from the lowest bits of their float32 scales; None where all are `layout[4]`."""
    if layout[5]:
        zeros = (scales.to(tl.int32, bitcast=True) & 31).to(tl.int16)
    else:
        zeros = None
    return zeros


@triton.jit
def scales_of(
    packed, rows, at, inputs, num_inputs: tl.constexpr, block_inputs: tl.constexpr, layout: tl.constexpr, loaded=None
):
    """As `_of_groups`, float32. loaded: what `load_scales` found."""
    values = packed[0], packed[4], packed[5], packed[2]
    found = _of_groups(*values, rows, at, inputs, num_inputs, block_inputs, layout, loaded)
    if found.dtype == tl.uint8:  # the exponent of a power of 2
        exponents = found.to(tl.int32)
        found = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
    return found


@triton.jit
def moved_scales(
    packed, rows, at, inputs, num_inputs: tl.constexpr, block_inputs: tl.constexpr, layout: tl.constexpr, loaded=None
):
    """As `scales_of`, of powers of 2 up to `MAX_E2M1_EXPONENT`: bfloat16, times 2^(126 - MOVED)."""
    values = packed[0], packed[4], packed[5], packed[2]
    found = _of_groups(*values, rows, at, inputs, num_inputs, block_inputs, layout, loaded)
    return ((found.to(tl.int16) + (126 - MOVED)) << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def chunk_scales(packed, rows, first, count: tl.constexpr, chunk: tl.constexpr, layout: tl.constexpr):
    """[n, count] float32: of the chunks of inputs from input `first` on, each of one group; past the last group 0."""
    return _of_chunks(packed[0], packed[4], packed[5], rows, first, count, chunk, layout)


@triton.jit
def chunk_zeros(packed, scales, rows, first, count: tl.constexpr, chunk: tl.constexpr, layout: tl.constexpr):
    """As `chunk_scales`, of which it takes those of nibbles; int32."""
    if has_quads(layout):
        zeros = scales.to(tl.int32, bitcast=True) & 31
    else:
        zeros = _of_chunks(packed[1], packed[6], packed[7], rows, first, count, chunk, layout).to(tl.int32)
    return zeros


@triton.jit
def _of_chunks(
    values, row_stride, group_stride, rows, first, count: tl.constexpr, chunk: tl.constexpr, layout: tl.constexpr
):
    num_groups: tl.constexpr = layout[1]
    size: tl.constexpr = layout[2]
    offset: tl.constexpr = layout[3]
    chunks = tl.arange(0, count)[:, None]
    of_rows = values + (rows // layout[9])[None, :] * row_stride
    if num_groups == 1:
        found = tl.load(of_rows + chunks * 0)
    else:
        groups = (first + chunks * chunk + offset) // size
        found = tl.load(of_rows + groups * group_stride, mask=groups < num_groups, other=0)
    return tl.trans(found)


@triton.jit
def _of_groups(
    values,
    row_stride,
    group_stride,
    index,
    rows,
    at,
    inputs,  # [columns] of the tile: those of the lowest nibbles, where it is a tile of words
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    layout: tl.constexpr,
    loaded=None,
):
    """Each column's number of [num_outputs, groups]: [n, columns], or [n, 1] where a tile has one group. loaded: what
    `_load_groups` found."""
    if are_compact(layout, block_inputs):
        if loaded is None:
            compact = _load_groups(values, row_stride, group_stride, rows, at, block_inputs, layout)
        else:
            compact = loaded
        count: tl.constexpr = compact.shape[1]
        if count == 1:
            found = compact
        else:
            each: tl.constexpr = inputs.shape[0] // count
            spread = tl.broadcast_to(compact[:, :, None], [rows.shape[0], count, each])
            found = tl.reshape(spread, [rows.shape[0], inputs.shape[0]])
    else:
        first = values + scale_rows(rows, layout)[:, None] * row_stride
        if layout[6]:
            groups = tl.load(index + inputs, mask=inputs < num_inputs, other=0)
        else:
            groups = (inputs + layout[3]) // layout[2]
        found = tl.load(first + groups[None, :] * group_stride, mask=inputs[None, :] < num_inputs, other=0)
    return found


@triton.jit
def _load_groups(values, row_stride, group_stride, rows, at, block_inputs: tl.constexpr, layout: tl.constexpr):
    """Of a tile whose groups `are_compact`: [n, groups]; those past the last one are like it."""
    num_groups: tl.constexpr = layout[1]
    size: tl.constexpr = layout[2]
    of_rows = values + scale_rows(rows, layout)[:, None] * row_stride
    count: tl.constexpr = 1 if has_one_group(layout, block_inputs) else block_inputs // size
    groups = tl.minimum((at + layout[3]) // size + tl.arange(0, count), num_groups - 1)
    return tl.load(of_rows + groups[None, :] * group_stride)
