"""A deferred add: of split-K partials, or of the weighted rows of experts. A prologue of the kernels that normalise the
rows to which it adds, or a launch of its own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.partials import Partials

__all__ = ["add_partials", "partial_arguments", "sum_partials"]

_MAX_BLOCK = 1024


@triton.jit
def sum_partials(
    partials,  # [num_partials, num_rows, size], these six: see `partial_arguments`
    partial_weights,
    split_stride,
    row_stride,
    row,  # int64, of a shape that broadcasts with columns
    columns,
    is_row,  # whether there is such a row, of its shape
    in_bounds,  # of row and column
    num_partials: tl.constexpr,  # 1 or more
    is_weighted: tl.constexpr,
):
    """Of the partials of some columns of some rows, in their order: float32."""
    offsets = row * row_stride + columns
    total = tl.load(partials + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    if is_weighted:
        total *= tl.load(partial_weights + row * num_partials, mask=is_row, other=0.0).to(tl.float32)
    for split in tl.static_range(1, num_partials):
        at = partials + tl.cast(split_stride, tl.int64) * split + offsets
        part = tl.load(at, mask=in_bounds, other=0.0).to(tl.float32)
        if is_weighted:
            part *= tl.load(partial_weights + row * num_partials + split, mask=is_row, other=0.0).to(tl.float32)
        total += part
    return total


@triton.jit
def _add_kernel(
    x,  # [num_rows, size]
    partials,
    partial_weights,
    split_stride,
    row_stride,
    num_partials: tl.constexpr,
    is_weighted: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program (i, j) adds block j of row i."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    in_bounds = columns < size
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    total = sum_partials(
        *(partials, partial_weights, split_stride, row_stride, row, columns, row >= 0, in_bounds),
        num_partials, is_weighted,
    )  # fmt: skip
    total += tl.load(x + row * size + columns, mask=in_bounds, other=0.0).to(tl.float32)
    tl.store(x + row * size + columns, total.to(x.dtype.element_ty), mask=in_bounds)


def partial_arguments(x: torch.Tensor, partials: Partials | None) -> dict[str, Any]:
    """Those of a kernel that adds them to x [n, size] first; of None there are num_partials=0. Of a token's experts
    row_stride is that of all its experts, split_stride that of one."""
    if partials is None:
        options = {"split_stride": 0, "row_stride": 0, "num_partials": 0, "is_weighted": False}
        return {"partials": x, "partial_weights": x, **options}
    rows, weights, _ = partials
    assert partials.fit(x), (rows.shape, rows.stride(), x.shape)
    strides = {"split_stride": rows.stride(0), "row_stride": rows.stride(1)}
    options = {"num_partials": len(rows), "is_weighted": weights is not None}
    return {"partials": rows, "partial_weights": rows if weights is None else weights, **strides, **options}


def add_partials(x: torch.Tensor, partials: Partials) -> None:
    """x [n, size], contiguous, of any float dtype, += their sum, accumulated in float32 and rounded once. For their
    norm see `rms_norm.add_normed`."""
    assert partials.norm is None
    assert x.is_contiguous()
    num_rows, size = x.shape
    block, pdl = min(_MAX_BLOCK, triton.next_power_of_2(size)), supports_pdl(x.device)
    if num_rows:
        _add_kernel[(num_rows, triton.cdiv(size, block))](
            x, **partial_arguments(x, partials), size=size, block=block, pdl=pdl, num_warps=4, **launch_options(pdl)
        )
