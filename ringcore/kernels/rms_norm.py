"""RMS normalisation of rows, fused with a deferred add before it: of partials, or of their norm (post-norm)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.add_partials import partial_arguments, sum_partials
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.partials import Partials, RowNorm

__all__ = ["MAX_SIZE", "add_normed", "rms_norm", "rms_norm_reference"]

MAX_SIZE = 16384  # a row is held in the registers of one program
_ELEMENTS = 1024  # of one program; short rows share one
_ELEMENTS_PER_WARP = 256  # 8 per thread: one 16-byte load of 16-bit elements


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x: tl.tensor,  # [num_rows, size]
    weight: tl.tensor,  # [size], read where normalises
    out: tl.tensor,  # [num_rows, size], written where has_out
    num_rows: int,
    eps: float,
    partials: tl.tensor,  # these four: see `partial_arguments`
    partial_weights: tl.tensor,
    split_stride: int,
    row_stride: int,
    added_gain: tl.tensor,  # [size], as the next of the norm of the partials' sum, where adds_norm
    added_eps: float,
    size: tl.constexpr,
    block: tl.constexpr,  # a power of two, size or more
    rows_per_program: tl.constexpr,
    num_partials: tl.constexpr,
    is_weighted: tl.constexpr,
    adds_norm: tl.constexpr,
    normalises: tl.constexpr,
    has_out: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * rows_per_program + tl.arange(0, rows_per_program)
    columns = tl.arange(0, block)
    mask = (rows < num_rows)[:, None] & (columns < size)[None, :]
    offsets = rows[:, None] * size + columns[None, :]
    if pdl:
        gdc_launch_dependents()
    if normalises:
        gain = tl.load(weight + columns, mask=columns < size, other=0.0)
    if adds_norm:
        of_added = tl.load(added_gain + columns, mask=columns < size, other=0.0)
    if pdl:
        gdc_wait()
    y = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if num_partials > 0:
        total = sum_partials(
            *(partials, partial_weights, split_stride, row_stride, rows[:, None], columns[None, :]),
            *((rows < num_rows)[:, None], mask, num_partials, is_weighted),
        )
        if adds_norm:
            total = _normed(total, of_added, added_eps, size)
        y += total
        tl.store(x + offsets, y.to(x.dtype.element_ty), mask=mask)
    if normalises:
        y = _normed(y, gain, eps, size)
    if has_out:
        tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _normed(y, gain, eps, size: tl.constexpr):
    scale = tl.rsqrt(tl.sum(y * y, axis=1) / size + eps)
    return y * scale[:, None] * gain.to(tl.float32)[None, :]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    partials: Partials | None = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of every row x -> out.

    x and out: [n, size], contiguous, size up to `MAX_SIZE`; weight: [size]; each of any float dtype. Computed in
    float32 and rounded once. `out` may be x itself, by default a new tensor of `dtype` (None: x's).
    partials: of a float32 x; x += their sum, or its norm, first, in place (a deferred add).
    Method: Zhang, Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """
    assert partials is None or x.dtype == torch.float32, x.dtype
    if out is None:
        out = torch.empty_like(x, dtype=dtype)
    _launch(x, partials, out, RowNorm(weight, eps))
    return out


def add_normed(x: torch.Tensor, partials: Partials, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [n, size], contiguous, of any float dtype, += the norm of the partials' sum, computed in float32 and rounded
    once, in place. Returns x, or of another `dtype` a new tensor of the same numbers."""
    assert partials.norm is not None, "no norm: see add_partials"
    out = None if dtype in (None, x.dtype) else torch.empty_like(x, dtype=dtype)
    _launch(x, partials, out, None)
    return x if out is None else out


def _launch(x: torch.Tensor, partials: Partials | None, out: torch.Tensor | None, norm: RowNorm | None) -> None:
    """First x += partials; then out = norm(x), or x where there is none."""
    num_rows, size = x.shape
    assert 0 < size <= MAX_SIZE, size
    of_added = None if partials is None else partials.norm
    for gain in (one.gain for one in (norm, of_added) if one is not None):
        assert gain.shape == (size,), (gain.shape, size)
        assert gain.is_contiguous()
    for rows in (x, x if out is None else out):
        assert rows.is_contiguous(), "rows must be contiguous"
        assert rows.shape == x.shape, (rows.shape, x.shape)
    if not num_rows:
        return
    block = triton.next_power_of_2(size)
    rows_per_program = max(1, _ELEMENTS // block)
    pdl = supports_pdl(x.device)
    weight, eps = (x, 0.0) if norm is None else norm
    added_gain, added_eps = (x, 0.0) if of_added is None else of_added
    _rms_norm_kernel[(triton.cdiv(num_rows, rows_per_program),)](
        x,
        weight,
        x if out is None else out,
        num_rows,
        eps,
        **partial_arguments(x, partials),
        added_gain=added_gain,
        added_eps=added_eps,
        size=size,
        block=block,
        rows_per_program=rows_per_program,
        adds_norm=of_added is not None,
        normalises=norm is not None,
        has_out=out is not None,
        pdl=pdl,
        num_warps=min(16, max(1, block * rows_per_program // _ELEMENTS_PER_WARP)),
        **launch_options(pdl),
    )


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    partials: Partials | None = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`rms_norm` in plain torch."""
    if partials is not None:
        x += partials.total()
    rows = x.float()
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (torch.empty_like(x, dtype=dtype) if out is None else out).copy_(normed)
