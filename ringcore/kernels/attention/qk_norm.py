"""QK norm over all heads: RMS normalisation of all of q, and of all of k, in place, before the rotary embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["qk_norm", "qk_norm_reference"]

_ELEMENTS_PER_WARP = 256  # 8 per thread: one 16-byte load of 16-bit elements


@triton.jit
def _qk_norm_kernel(
    qkv: tl.tensor,  # [n, row_size], written
    gain: tl.tensor,  # [q_size + k_size]
    row_size: int,
    eps: float,
    q_size: tl.constexpr,
    k_size: tl.constexpr,
    block: tl.constexpr,  # a power of two, q_size and k_size or more
    pdl: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    is_key = tl.program_id(1)
    size = tl.where(is_key == 1, k_size, q_size)
    columns = tl.arange(0, block)
    mask = columns < size
    columns += is_key * q_size
    if pdl:
        gdc_launch_dependents()
    weight = tl.load(gain + columns, mask=mask, other=0.0)
    if pdl:
        gdc_wait()
    place = qkv + token * row_size + columns
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / size + eps)
    tl.store(place, (x * scale * weight.to(tl.float32)).to(qkv.dtype.element_ty), mask=mask)


def qk_norm(qkv: torch.Tensor, gain: torch.Tensor, sizes: tuple[int, int], eps: float) -> None:
    """x / sqrt(mean(x^2) + eps) * gain, in place: of the first sizes[0] entries of each row, and of the next sizes[1].

    qkv: [n, row_size], contiguous; gain: [sizes[0] + sizes[1]]; each of any float dtype. Computed in float32 and
    rounded once. Method: Zhang, Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """
    (num_rows, row_size), (q_size, k_size) = qkv.shape, sizes
    assert qkv.is_contiguous(), "rows must be contiguous"
    assert gain.shape == (q_size + k_size,), (gain.shape, sizes)
    assert q_size + k_size <= row_size, (sizes, row_size)
    if not num_rows:
        return
    block = triton.next_power_of_2(max(sizes))
    pdl = supports_pdl(qkv.device)
    _qk_norm_kernel[(num_rows, 2)](
        qkv,
        gain,
        row_size,
        eps,
        q_size=q_size,
        k_size=k_size,
        block=block,
        pdl=pdl,
        num_warps=min(16, max(1, block // _ELEMENTS_PER_WARP)),
        **launch_options(pdl),
    )


def qk_norm_reference(qkv: torch.Tensor, gain: torch.Tensor, sizes: tuple[int, int], eps: float) -> None:
    """`qk_norm` in plain torch."""
    parts = torch.split_with_sizes(qkv[:, : sum(sizes)], sizes, 1)
    for part, weight in zip(parts, torch.split_with_sizes(gain, sizes), strict=True):
        x = part.float()
        part.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float())
