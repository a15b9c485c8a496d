"""Root-mean-square normalisation of rows, after an addition to the residual stream where one is due."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["MAX_SIZE", "rms_norm", "rms_norm_reference"]

MAX_SIZE = 16384  # a row is held in the registers of one program
_ELEMENTS = 1024  # of one program, where rows are short enough to take several
_ELEMENTS_A_WARP = 256  # 8 a thread: one load of 16 bytes in 16 bits


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    hidden: tl.tensor,  # [num_rows, size]
    addend: tl.tensor,  # [num_rows, size], read where has_addend
    weight: tl.tensor,  # [size]
    out: tl.tensor,  # [num_rows, size]
    num_rows: int,
    eps: float,
    size: tl.constexpr,
    block: tl.constexpr,  # a power of two, size or more
    rows_a_program: tl.constexpr,
    has_addend: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * rows_a_program + tl.arange(0, rows_a_program)
    columns = tl.arange(0, block)
    mask = (rows < num_rows)[:, None] & (columns < size)[None, :]
    offsets = rows[:, None] * size + columns[None, :]
    x = tl.load(hidden + offsets, mask=mask, other=0.0)
    gain = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    if has_addend:
        more = tl.load(addend + offsets, mask=mask, other=0.0)
        # Rounded as it is stored: the norm is of what the next layer finds in the stream.
        x = (x.to(tl.float32) + more.to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(hidden + offsets, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    normed = x * scale[:, None] * gain[None, :]
    tl.store(out + offsets, normed.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    addend: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of every row x of hidden; where `addend` is given, hidden += addend first.

    hidden, addend and out: [n, size] of one dtype, contiguous, size up to `MAX_SIZE`; weight: [size], any float dtype.
    Computed in float32 and rounded once; the sum with `addend` is rounded as it is stored in `hidden`. `out` may be
    `hidden` itself where there is no addend, and may be `addend`. Returns `out`, a new tensor where none is given.
    Method: Zhang, Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """
    num_rows, size = hidden.shape
    if out is None:
        out = torch.empty_like(hidden)
    assert 0 < size <= MAX_SIZE, size
    assert weight.shape == (size,), (weight.shape, size)
    assert weight.is_contiguous()
    for rows in (hidden, out) if addend is None else (hidden, out, addend):
        assert rows.is_contiguous(), "rows must lie side by side"
        assert (rows.shape, rows.dtype) == (hidden.shape, hidden.dtype), (rows.shape, rows.dtype, hidden.shape)
    if addend is not None:
        assert out is not hidden, "the stream and the norm of it cannot be one tensor"
    if not num_rows:
        return out
    block = triton.next_power_of_2(size)
    rows_a_program = max(1, _ELEMENTS // block)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows_a_program),)](
        hidden,
        hidden if addend is None else addend,
        weight,
        out,
        num_rows,
        eps,
        size=size,
        block=block,
        rows_a_program=rows_a_program,
        has_addend=addend is not None,
        num_warps=min(16, max(1, block * rows_a_program // _ELEMENTS_A_WARP)),
    )
    return out


def rms_norm_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    addend: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rms_norm` in plain torch."""
    if addend is not None:
        hidden += addend
    x = hidden.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (torch.empty_like(hidden) if out is None else out).copy_(normed)
