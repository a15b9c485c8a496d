"""Tiles of quantized weights, expanded as they are loaded: the loader that the kernels of linears and of experts share.

A tile is [outputs, inputs] float32 = (code - zero) * scale. Codes are read as bytes, wherever the format has them:

BYTES     a byte a number: FP8, INT8, or unsigned
NIBBLES   two numbers a byte, the lower nibble first: unsigned, or e2m1
COLUMNS   two outputs a byte, of rows of inputs (AWQ)

Bytes along the inputs may be in words of 4 that are `word_bytes` apart, as GPTQ has them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ringcore.kernels.packed_weight import BYTES_FP8, BYTES_INT8, COLUMNS, DENSE, NIBBLES, NIBBLES_E2M1, PackedWeight

__all__ = ["load_packed", "tile_arguments"]

_FP8, _INT8 = tl.constexpr(BYTES_FP8), tl.constexpr(BYTES_INT8)
_NIBBLES, _COLUMNS, _E2M1 = tl.constexpr(NIBBLES), tl.constexpr(COLUMNS), tl.constexpr(NIBBLES_E2M1)


def tile_arguments(weight: torch.Tensor | PackedWeight, are_numbers: bool = False) -> dict[str, Any]:
    """What both kernels take of a weight, by name; a dense one has no scales. are_numbers: its codes are FP8 numbers,
    which are multiplied as they are."""
    if isinstance(weight, torch.Tensor):
        return {"weight": weight, "packed": (), "layout": (DENSE,)}
    zeros = weight.scales if weight.zeros is None else weight.zeros
    packed = (
        weight.scales,
        zeros,
        weight.scales if weight.columns is None else weight.columns,
        weight.scales if weight.index is None else weight.index,
        weight.row_bytes,
        weight.word_bytes,
        *weight.scales.stride(),
        *zeros.stride(),
    )
    layout = (
        weight.form,
        weight.scales.shape[1],
        weight.group_size,
        weight.group_offset,
        weight.zero,
        weight.zeros is not None,
        weight.index is not None,
        weight.word_bytes == 4,
    )
    codes = weight.codes.view(torch.float8_e4m3fn) if are_numbers else weight.codes
    return {"weight": codes, "packed": packed, "layout": layout}


@triton.jit
def load_packed(
    codes,
    packed,  # see `tile_arguments`
    rows,  # [n] int, the outputs
    at,  # int, the first input; even
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    layout: tl.constexpr,  # see `tile_arguments`
):
    """-> [n, block_inputs] float32; inputs out of bounds are finite numbers, to be multiplied by 0."""
    form: tl.constexpr = layout[0]
    zero: tl.constexpr = layout[4]
    has_zeros: tl.constexpr = layout[5]
    is_contiguous: tl.constexpr = layout[7]
    rows = rows.to(tl.int64)
    inputs = at + tl.arange(0, block_inputs)
    if form == _NIBBLES:
        numbers = _load_nibbles(codes, packed, rows, at, num_inputs, block_inputs, is_contiguous).to(tl.float32)
    elif form == _E2M1:
        # The bits of a float16 with a smaller exponent.
        wide = _load_nibbles(codes, packed, rows, at, num_inputs, block_inputs, is_contiguous).to(tl.int16)
        half = ((wide & 8) << 12) | ((wide & 7) << 9)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif form == _COLUMNS:
        columns = tl.load(packed[2] + rows)
        pointers = codes + inputs.to(tl.int64)[None, :] * packed[4] + (columns // 2)[:, None]
        pairs = tl.load(pointers, mask=inputs[None, :] < num_inputs, other=0).to(tl.int32)
        numbers = ((pairs >> (columns % 2 * 4)[:, None]) & 15).to(tl.float32)
    else:
        offsets = inputs if is_contiguous else inputs // 4 * packed[5] + inputs % 4
        pointers = codes + rows[:, None] * packed[4] + offsets[None, :]
        bits = tl.load(pointers, mask=inputs[None, :] < num_inputs, other=0)
        if form == _FP8:
            # The bits of a float16 with a smaller exponent.
            wide = bits.to(tl.int16)
            half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
            numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        elif form == _INT8:
            numbers = bits.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            numbers = bits.to(tl.float32)
    if has_zeros:
        zeros = _of_groups(packed[1], packed[8], packed[9], packed[3], rows, at, num_inputs, block_inputs, layout)
        numbers -= zeros.to(tl.float32)
    elif zero != 0:
        numbers -= zero
    return numbers * _of_groups(packed[0], packed[6], packed[7], packed[3], rows, at, num_inputs, block_inputs, layout)


@triton.jit
def _load_nibbles(
    codes,
    packed,
    rows,
    at,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    is_contiguous: tl.constexpr,
):
    """-> [n, block_inputs] uint8."""
    places = at // 2 + tl.arange(0, block_inputs // 2)
    offsets = places if is_contiguous else places // 4 * packed[5] + places % 4
    pointers = codes + rows[:, None] * packed[4] + offsets[None, :]
    pairs = tl.load(pointers, mask=places[None, :] * 2 < num_inputs, other=0)
    return tl.interleave(pairs & 15, pairs >> 4)


@triton.jit
def _number(found):
    """An exponent of a power of 2 as float32; any other number as it is."""
    if found.dtype == tl.uint8:
        exponent = found.to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
        number = bits.to(tl.float32, bitcast=True)
    else:
        number = found
    return number


@triton.jit
def _of_groups(
    values,
    row_stride,
    group_stride,
    index,
    rows,
    at,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    layout: tl.constexpr,
):
    """Each input's number of [num_outputs, groups]: [n, block_inputs], or [n, 1] where a tile has one group. Loaded
    once a group where tiles are of whole groups, or groups of whole tiles."""
    num_groups: tl.constexpr = layout[1]
    size: tl.constexpr = layout[2]
    offset: tl.constexpr = layout[3]
    has_index: tl.constexpr = layout[6]
    first = values + rows[:, None] * row_stride
    if num_groups == 1:
        found = _number(tl.load(first))
    elif not has_index and offset % block_inputs == 0 and size % block_inputs == 0:
        found = _number(tl.load(first + (at + offset) // size * group_stride))
    elif not has_index and offset == 0 and block_inputs % size == 0:
        count: tl.constexpr = block_inputs // size
        groups = at // size + tl.arange(0, count)
        of_groups = tl.load(first + groups[None, :] * group_stride, mask=groups[None, :] < num_groups, other=0)
        spread = tl.broadcast_to(_number(of_groups)[:, :, None], [rows.shape[0], count, size])
        found = tl.reshape(spread, [rows.shape[0], block_inputs])
    else:
        inputs = at + tl.arange(0, block_inputs)
        if has_index:
            groups = tl.load(index + inputs, mask=inputs < num_inputs, other=0)
        else:
            groups = (inputs + offset) // size
        found = _number(tl.load(first + groups[None, :] * group_stride, mask=inputs[None, :] < num_inputs, other=0))
    return found
