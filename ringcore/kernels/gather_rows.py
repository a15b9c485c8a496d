"""Rows of a table by index: the embedding of a step's tokens, and the angles of its positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["gather_rows", "gather_rows_reference"]

_MAX_BLOCK = 1024
_ELEMENTS_PER_WARP = 256  # 8 per thread: one 16-byte load of 16-bit elements


@triton.jit(do_not_specialize=["first", "num_rows"])
def _gather_rows_kernel(
    table: tl.tensor,  # [num_rows, size]
    index: tl.tensor,  # [n] int64
    out: tl.tensor,  # [n, size]
    first: int,
    num_rows: int,
    scale: float,
    size: tl.constexpr,
    block: tl.constexpr,
    is_scaled: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < size
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(index + i) - first
    is_here = (row >= 0) & (row < num_rows)
    x = tl.load(table + row * size + columns, mask=mask & is_here, other=0.0)
    if is_scaled:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(out + i * size + columns, x.to(out.dtype.element_ty), mask=mask)


def gather_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    first: int = 0,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    is_dependent: bool = False,
) -> torch.Tensor:
    """Row index[i] - first of `table`, times `scale`, as row i of a new tensor [n, size] of `dtype` (None: the
    table's); zeros where the table has no such row, which is another rank's.

    table: [num_rows, size], contiguous, of any float dtype; index: [n] int64. Scaled in float32, and rounded to the
    table's dtype. is_dependent: the kernel may be launched while the one before it runs; else it is an ordinary launch,
    which begins when everything before it has ended (`dependent_launch`).
    """
    num_rows, size = table.shape
    assert table.is_contiguous(), "rows must be contiguous"
    assert index.dtype == torch.int64, index.dtype
    assert index.ndim == 1, index.shape
    out = table.new_empty(len(index), size, dtype=dtype)
    if not out.numel():
        return out
    block = min(triton.next_power_of_2(size), _MAX_BLOCK)
    pdl = supports_pdl(table.device)
    _gather_rows_kernel[(len(index), triton.cdiv(size, block))](
        *(table, index, out, first, num_rows, 1.0 if scale is None else scale),
        size=size,
        block=block,
        is_scaled=scale is not None,
        pdl=pdl,
        num_warps=max(1, block // _ELEMENTS_PER_WARP),
        **launch_options(pdl and is_dependent),
    )
    return out


def gather_rows_reference(
    table: torch.Tensor,
    index: torch.Tensor,
    *,
    first: int = 0,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    is_dependent: bool = False,
) -> torch.Tensor:
    """`gather_rows` in plain torch."""
    rows = index - first
    elsewhere = (rows < 0) | (rows >= len(table))
    found = table[rows.masked_fill(elsewhere, 0)].masked_fill(elsewhere[:, None], 0)
    if scale is not None:
        found = (found.float() * scale).to(table.dtype)
    return found.to(dtype)
