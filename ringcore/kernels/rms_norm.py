"""RMS normalisation of rows, fused with a residual add: of its result to `add_to`, or of deferred partials to x."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.add_partials import partial_arguments, sum_partials
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.partials import Partials

__all__ = ["MAX_SIZE", "rms_norm", "rms_norm_reference"]

MAX_SIZE = 16384  # a row is held in the registers of one program
_ELEMENTS = 1024  # of one program; short rows share one
_ELEMENTS_PER_WARP = 256  # 8 per thread: one 16-byte load of 16-bit elements


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x: tl.tensor,  # [num_rows, size]
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [num_rows, size]
    num_rows: int,
    eps: float,
    partials: tl.tensor,  # these four: see `partial_arguments`
    partial_weights: tl.tensor,
    split_stride: int,
    row_stride: int,
    size: tl.constexpr,
    block: tl.constexpr,  # a power of two, size or more
    rows_per_program: tl.constexpr,
    num_partials: tl.constexpr,
    is_weighted: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * rows_per_program + tl.arange(0, rows_per_program)
    columns = tl.arange(0, block)
    mask = (rows < num_rows)[:, None] & (columns < size)[None, :]
    offsets = rows[:, None] * size + columns[None, :]
    if pdl:
        gdc_launch_dependents()
    gain = tl.load(weight + columns, mask=columns < size, other=0.0)
    if pdl:
        gdc_wait()
    y = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if num_partials > 0:
        y += sum_partials(
            *(partials, partial_weights, split_stride, row_stride, rows[:, None], columns[None, :]),
            *((rows < num_rows)[:, None], mask, num_partials, is_weighted),
        )
        tl.store(x + offsets, y, mask=mask)
    if adds:
        before = tl.load(out + offsets, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(y * y, axis=1) / size + eps)
    y = y * scale[:, None] * gain.to(tl.float32)[None, :]
    if adds:
        y += before.to(tl.float32)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    partials: Partials | None = None,
    add_to: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of every row x, stored in `out` or added to `add_to`.

    x, add_to and out: [n, size], contiguous, size up to `MAX_SIZE`; weight: [size]; each of any float dtype. Computed
    in float32 and rounded once, also where it is added. `out` may be x itself. Returns add_to, or out, by default a new
    tensor of `dtype` (None: x's).
    partials: of a float32 x; x += their sum first, in place (a deferred add).
    Method: Zhang, Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """
    num_rows, size = x.shape
    if add_to is not None:
        assert out is None, "give add_to or out, not both"
        out = add_to
    if out is None:
        out = torch.empty_like(x, dtype=dtype)
    assert 0 < size <= MAX_SIZE, size
    assert partials is None or x.dtype == torch.float32, x.dtype
    assert weight.shape == (size,), (weight.shape, size)
    assert weight.is_contiguous()
    for rows in (x, out):
        assert rows.is_contiguous(), "rows must be contiguous"
        assert rows.shape == x.shape, (rows.shape, x.shape)
    if not num_rows:
        return out
    block = triton.next_power_of_2(size)
    rows_per_program = max(1, _ELEMENTS // block)
    pdl = supports_pdl(x.device)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows_per_program),)](
        x,
        weight,
        out,
        num_rows,
        eps,
        **partial_arguments(x, partials),
        size=size,
        block=block,
        rows_per_program=rows_per_program,
        adds=add_to is not None,
        pdl=pdl,
        num_warps=min(16, max(1, block * rows_per_program // _ELEMENTS_PER_WARP)),
        **launch_options(pdl),
    )
    return out


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    partials: Partials | None = None,
    add_to: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`rms_norm` in plain torch."""
    if partials is not None:
        x += partials.total()
    rows = x.float()
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float()
    if add_to is not None:
        return add_to.copy_(add_to.float() + normed)
    return (torch.empty_like(x, dtype=dtype) if out is None else out).copy_(normed)
