"""The kernel of `skinny_linear` for one or two rows and quantized weights: FMA sums of codes, scaled chunk by chunk.

Tensor cores would multiply a tile that is mostly empty, and wait for a norm or a rounding by another kernel. Here codes
are expanded to float16 and multiplied two in an instruction (`half_products`, `fma_row`): eight nibbles take 13, with
their zeros and products, and eight bytes of FP8 take 8. The products of half a chunk, which is 16 bytes of codes that a
thread holds, are added in float16, all else in float32. Scales are applied to the sums of chunks. Programs are
persistent: what they do to x (the norm, the rounding to FP8) is done once for several tiles of outputs. The next tile
is loaded into registers before one is multiplied; a branch keeps ptxas from issuing those loads after the products,
which would save registers. Asynchronous copies into shared memory, two to four tiles ahead, were measured and are no
faster.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ringcore.kernels.activation import activated
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, supports_pdl
from ringcore.kernels.linears.fma_row import load_gains, load_row
from ringcore.kernels.linears.packed_gemv import chunk_products, load_outputs, sums_of_both
from ringcore.kernels.linears.packed_weight import BYTES_FP8, PackedWeight
from ringcore.kernels.linears.skinny_tiles import PackedFmaConfig
from ringcore.kernels.linears.weight_tiles import tile_arguments
from ringcore.kernels.partials import RowNorm

__all__ = ["launch_packed_fma", "packed_fma_kernel"]


@triton.jit
def _load_tile(
    weight,
    packed,
    tile,
    num_outputs,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
    has_one_scale: tl.constexpr,
    is_gated: tl.constexpr,
    layout: tl.constexpr,
):
    """As `load_outputs`; of a gated weight those of the gate, then those of up."""
    rows = _rows_of(tile, num_outputs, block_outputs, block_outputs)
    of_scales = _rows_of(tile, num_outputs, block_outputs, 1 if has_one_scale else block_outputs)
    loaded = load_outputs(weight, packed, rows, of_scales, num_inputs, block_inputs, layout)
    if is_gated:
        rows, of_scales = rows + num_outputs, of_scales + num_outputs
        loaded = loaded + load_outputs(weight, packed, rows, of_scales, num_inputs, block_inputs, layout)
    return loaded


@triton.jit
def _rows_of(tile, num_outputs, block_outputs: tl.constexpr, count: tl.constexpr):
    return tl.minimum(tile * block_outputs + tl.arange(0, count), num_outputs - 1)


@triton.jit
def _product(
    loaded,
    row,
    factor,  # of the norm
    packed,
    bias,
    rows,
    num_outputs,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    is_exact: tl.constexpr,
    layout: tl.constexpr,
):
    """[block_outputs] float32, of a tile and a row."""
    products = chunk_products(loaded, 0, row, packed, rows, num_inputs, block_inputs, is_exact, layout)
    if is_gated:
        of_up = chunk_products(
            loaded, len(loaded) // 2, row, packed, rows + num_outputs, num_inputs, block_inputs, is_exact, layout
        )
        y, z = sums_of_both(products, of_up)
    else:
        y = tl.sum(products, 1)
    if has_norm:
        y *= factor
    if has_bias:
        y += tl.load(bias + rows).to(tl.float32)
    if is_gated:
        if has_norm:
            z *= factor
        if has_bias:
            z += tl.load(bias + num_outputs + rows).to(tl.float32)
        y = activated(y, is_gelu) * z
    return y


@triton.jit(do_not_specialize=["num_outputs"])
def packed_fma_kernel(
    x,  # [num_rows, num_inputs]
    weight,  # codes of [num_outputs, num_inputs], or gated
    packed,  # see `tile_arguments`; every chunk is in one group
    gain,  # [num_inputs], read where has_norm
    bias,  # [num_outputs], or gated; read where has_bias
    out,  # [num_rows, num_outputs]
    num_outputs,  # int
    eps,  # float
    num_rows: tl.constexpr,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    is_gelu: tl.constexpr,
    adds: tl.constexpr,
    row_group: tl.constexpr,  # inputs that share a scale of x, which is rounded to FP8; 0: it is not
    has_one_scale: tl.constexpr,  # for each chunk of all outputs of a tile
    is_exact: tl.constexpr,  # products of the weight are float32
    pdl: tl.constexpr,
    layout: tl.constexpr,
) -> None:
    """Program i computes tiles i, i + num_programs and so on. Out-of-bounds outputs are clamped to the last one; their
    results are not stored."""
    step = tl.num_programs(0)
    num_tiles = tl.cdiv(num_outputs, block_outputs)
    index = tl.arange(0, block_outputs)
    if pdl:
        gdc_launch_dependents()
    loaded = _load_tile(
        *(weight, packed, tl.program_id(0), num_outputs, num_inputs, block_inputs, block_outputs),
        has_one_scale, is_gated, layout,
    )  # fmt: skip
    gains = ()
    if has_norm:
        gains = load_gains(gain, num_inputs, block_inputs, is_exact, layout)
    if pdl:
        gdc_wait()
    loaded_rows = ()
    factors = ()
    for row in tl.static_range(num_rows):
        of_row, squares = load_row(x + row * num_inputs, gains, num_inputs, block_inputs, row_group, is_exact, layout)
        loaded_rows += (of_row,)
        factors += (tl.rsqrt(squares / num_inputs + eps),)
    for tile in tl.range(tl.program_id(0), num_tiles, step):
        rows = _rows_of(tile, num_outputs, block_outputs, block_outputs)
        following = _load_tile(
            *(weight, packed, tile + step, num_outputs, num_inputs, block_inputs, block_outputs),
            has_one_scale, is_gated, layout,
        )  # fmt: skip
        if tile < num_outputs:  # always: ptxas moves the products above none of the loads, where a branch is between
            stored = tile * block_outputs + index < num_outputs
            for row in tl.static_range(num_rows):
                targets = out + row * num_outputs + rows
                if adds:
                    added = tl.load(targets, mask=stored, other=0.0).to(tl.float32)
                y = _product(
                    *(loaded, loaded_rows[row], factors[row], packed, bias, rows, num_outputs, num_inputs),
                    block_inputs, has_norm, has_bias, is_gated, is_gelu, is_exact, layout,
                )  # fmt: skip
                if adds:
                    y += added
                tl.store(targets, y.to(out.dtype.element_ty), mask=stored)
        loaded = following


def launch_packed_fma(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor,
    out: torch.Tensor,
    norm: RowNorm | None,
    row_group: int,
    config: PackedFmaConfig,
    options: dict[str, Any],
) -> None:
    num_rows, num_inputs = x.shape
    assert num_rows in (1, 2), num_rows
    assert isinstance(weight, PackedWeight), "dense weights are for other configurations"
    assert weight.has_chunks, weight
    assert row_group in (0, num_inputs) or config.block_inputs % row_group == 0, (row_group, config)
    assert not row_group or weight.form == BYTES_FP8, weight.form
    assert weight.has_whole_runs(config.block_inputs), (weight.run, config)
    gain, eps = (x, 0.0) if norm is None else norm
    tiles = triton.cdiv(out.shape[1], config.block_outputs)
    packed_fma_kernel[(min(tiles, config.num_programs),)](
        x=x,
        gain=gain,
        bias=bias,
        out=out,
        num_outputs=out.shape[1],
        eps=eps,
        num_rows=num_rows,
        num_inputs=num_inputs,
        block_inputs=config.block_inputs,
        block_outputs=config.block_outputs,
        has_norm=norm is not None,
        row_group=row_group,
        has_one_scale=weight.scale_run % config.block_outputs == 0 and out.shape[1] % config.block_outputs == 0,
        is_exact=weight.dtype == torch.float32,
        pdl=supports_pdl(x.device),
        **tile_arguments(weight.as_words()),
        **options,
    )
