"""Rows rounded to FP8 with a scale for each group of inputs, or for each row; fused with the norm before it, and with a
deferred add before that."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ringcore.kernels.add_partials import partial_arguments, sum_partials
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.partials import Partials, RowNorm

__all__ = ["MAX_ROUNDED_INPUTS", "RoundedRows", "round_rows", "round_rows_reference"]

MAX_ROUNDED_INPUTS = 32768  # a row is held in the registers of one program
LARGEST = 448.0  # of e4m3
LEAST_SCALE = 1e-12  # of rows of zeros
_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)
_CHUNK = 1024  # inputs of one program, where groups are smaller than a row
_ELEMENTS_PER_WARP = 512


class RoundedRows(NamedTuple):
    """codes * scale: the scale of an input's group."""

    codes: torch.Tensor  # [n, num_inputs] float8_e4m3fn
    scales: torch.Tensor  # [n, groups] float32
    group: int  # inputs of a group, num_inputs where a row has one scale
    dtype: torch.dtype  # of the rows that were rounded: of the product


@triton.jit
def _round_rows_kernel(
    x,  # [num_rows, size]
    gain,  # [size], read where has_norm
    codes,  # [num_rows, size]
    scales,  # [num_rows, groups]
    scale_row_stride,
    scale_group_stride,
    eps,  # float
    partials,  # these six: see `partial_arguments`; with has_norm
    partial_weights,
    split_stride,
    row_stride,
    num_partials: tl.constexpr,
    is_weighted: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,  # inputs of this program: a power of two; the whole row where has_norm
    group: tl.constexpr,
    has_norm: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program (i, j) rounds chunk j of row i. A group is a row, or a power of two that divides the chunk."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * chunk + tl.arange(0, chunk)
    in_bounds = columns < size
    if pdl:
        gdc_launch_dependents()
    if has_norm:
        factor = tl.load(gain + columns, mask=in_bounds, other=0.0).to(tl.float32)
    if pdl:
        gdc_wait()
    y = tl.load(x + row * size + columns, mask=in_bounds, other=0.0).to(tl.float32)
    if num_partials > 0:
        y += sum_partials(
            *(partials, partial_weights, split_stride, row_stride, row, columns, row >= 0, in_bounds),
            num_partials, is_weighted,
        )  # fmt: skip
        tl.store(x + row * size + columns, y, mask=in_bounds)
    if has_norm:
        y = y * tl.rsqrt(tl.sum(y * y, 0) / size + eps) * factor
    if group == size:
        scale = tl.maximum(tl.max(tl.abs(y), 0) / _LARGEST, _LEAST_SCALE)
        tl.store(scales + row * scale_row_stride, scale)
        rounded = y / scale
    else:
        count: tl.constexpr = chunk // group
        grouped = tl.reshape(y, [count, group])
        each = tl.maximum(tl.max(tl.abs(grouped), 1) / _LARGEST, _LEAST_SCALE)
        index = tl.program_id(1) * count + tl.arange(0, count)
        tl.store(scales + row * scale_row_stride + index * scale_group_stride, each, mask=index < size // group)
        rounded = tl.reshape(grouped / each[:, None], [chunk])
    rounded = tl.minimum(tl.maximum(rounded, -_LARGEST), _LARGEST)
    tl.store(codes + row * size + columns, rounded.to(codes.dtype.element_ty), mask=in_bounds)


def round_rows(
    x: torch.Tensor,
    group: int | None = None,
    norm: RowNorm | None = None,
    dtype: torch.dtype | None = None,
    *,
    partials: Partials | None = None,
    by_group: bool = False,
) -> RoundedRows:
    """x [n, num_inputs], contiguous, of any float dtype: codes = x / scale, rounded to the nearest, ties to even.

    A scale is the largest absolute value of its group over 448, the largest number of e4m3. group: inputs of a group, a
    power of two up to 1,024 that divides num_inputs; None: all inputs, up to `MAX_ROUNDED_INPUTS`. norm: prologue, in
    float32, of up to `MAX_ROUNDED_INPUTS`. dtype: of the product (None: x's).
    partials: before the norm of a float32 x; x += their sum first, in place (a deferred add), not its norm.
    by_group: the scales of a group are contiguous, instead of those of a row.
    """
    num_rows, size = x.shape
    group = size if group is None else group
    is_row = group == size
    assert x.is_contiguous()
    assert is_row or (size % group == 0 and _CHUNK % group == 0), (size, group)
    assert size <= MAX_ROUNDED_INPUTS or not (is_row or norm), size
    if partials is not None:
        assert norm is not None
        assert partials.norm is None
        assert x.dtype == torch.float32, x.dtype
    shape = (size // group, num_rows) if by_group else (num_rows, size // group)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    rounded = RoundedRows(
        torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device),
        scales.t() if by_group else scales,
        group,
        x.dtype if dtype is None else dtype,
    )
    if not num_rows:
        return rounded
    block = triton.next_power_of_2(size)
    chunk = block if is_row or norm is not None else min(block, _CHUNK)
    gain, eps = (x, 0.0) if norm is None else norm
    pdl = supports_pdl(x.device)
    _round_rows_kernel[(num_rows, triton.cdiv(size, chunk))](
        x,
        gain,
        rounded.codes,
        rounded.scales,
        *rounded.scales.stride(),
        eps,
        **partial_arguments(x, partials),
        size=size,
        chunk=chunk,
        group=group,
        has_norm=norm is not None,
        pdl=pdl,
        num_warps=min(16, max(1, chunk // _ELEMENTS_PER_WARP)),
        **launch_options(pdl),
    )
    return rounded


def round_rows_reference(
    x: torch.Tensor, group: int | None = None, norm: RowNorm | None = None, dtype: torch.dtype | None = None
) -> RoundedRows:
    """`round_rows` in plain torch."""
    rows = x.float()
    if norm is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps) * norm.gain.float()
    group = x.shape[1] if group is None else group
    grouped = rows.view(len(x), -1, group)
    scales = (grouped.abs().amax(-1) / LARGEST).clamp_(min=LEAST_SCALE)
    codes = (grouped / scales.unsqueeze(-1)).clamp_(-LARGEST, LARGEST).flatten(1).to(torch.float8_e4m3fn)
    return RoundedRows(codes, scales, group, x.dtype if dtype is None else dtype)
