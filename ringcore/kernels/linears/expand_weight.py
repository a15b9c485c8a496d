"""A quantized weight expanded to 16 bits, for products of so many rows that cuBLAS with its bytes is faster."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.linears.packed_weight import NIBBLES_E2M1, PackedWeight
from ringcore.kernels.linears.weight_groups import has_quads
from ringcore.kernels.linears.weight_loads import load_packed, load_quad
from ringcore.kernels.linears.weight_tiles import rescaled, tile_arguments

__all__ = ["expand_weight"]

_BLOCK_OUTPUTS, _BLOCK_INPUTS = 32, 256


@triton.jit
def _expand_kernel(
    weight,  # codes
    packed,  # see `tile_arguments`
    out,  # [num_outputs, num_inputs]
    num_outputs,  # int
    num_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
    block_inputs: tl.constexpr,
    pdl: tl.constexpr,
    layout: tl.constexpr,
) -> None:
    outputs = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    rows = tl.minimum(outputs, num_outputs - 1)
    at = tl.program_id(0) * block_inputs
    is_whole: tl.constexpr = num_inputs % block_inputs == 0
    dtype: tl.constexpr = out.dtype.element_ty
    targets = out + rows.to(tl.int64)[:, None] * num_inputs
    if pdl:
        gdc_launch_dependents()
        gdc_wait()  # products before this one may still read what is overwritten
    if has_quads(layout):
        a, b, c, d, _ = load_quad(weight, packed, rows, at, num_inputs, block_inputs, is_whole, dtype, True, layout)
        numbers = rescaled(_in_order(a, b, c, d, layout), dtype, layout)
    else:
        numbers = load_packed(weight, packed, rows, at, num_inputs, block_inputs, is_whole, True, layout)
    inputs = at + tl.arange(0, block_inputs)[None, :]
    tl.store(targets + inputs, numbers.to(dtype), mask=(outputs < num_outputs)[:, None] & (inputs < num_inputs))


@triton.jit
def _in_order(a, b, c, d, layout: tl.constexpr):
    """Of tiles [n, m] as of `load_quad`: [n, 4 * m], the numbers of consecutive inputs, so that they are stored as such
    and no sector of memory is written in parts."""
    run: tl.constexpr = layout[7]
    n: tl.constexpr = a.shape[0]
    m: tl.constexpr = a.shape[1]
    quads = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [n, m // run, run, 4])
    return tl.reshape(tl.permute(quads, (0, 1, 3, 2)), [n, 4 * m])


def expand_weight(weight: PackedWeight) -> torch.Tensor:
    """[num_outputs, num_inputs] of the weight's dtype, each number rounded to it."""
    (num_outputs, num_inputs), device = weight.shape, weight.device
    out = torch.empty(num_outputs, num_inputs, dtype=weight.dtype, device=device)
    least = 128 if weight.form == NIBBLES_E2M1 else 16
    block_inputs = min(_BLOCK_INPUTS, max(least, triton.next_power_of_2(num_inputs)))
    pdl = supports_pdl(device)
    _expand_kernel[(triton.cdiv(num_inputs, block_inputs), triton.cdiv(num_outputs, _BLOCK_OUTPUTS))](
        out=out,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        block_outputs=_BLOCK_OUTPUTS,
        block_inputs=block_inputs,
        pdl=pdl,
        num_warps=4,
        **tile_arguments(weight),
        **launch_options(pdl),
    )
    return out
