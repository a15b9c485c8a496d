"""The gated activation of an MLP, activation(gate) * up, from one fused tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = [
    "activated",
    "gated",
    "gelu_tanh_and_mul",
    "gelu_tanh_and_mul_reference",
    "silu_and_mul",
    "silu_and_mul_reference",
]

_MAX_BLOCK = 1024
_ELEMENTS_PER_WARP = 256  # 8 per thread: one 16-byte load of 16-bit elements


@triton.jit
def activated(gate, is_gelu: tl.constexpr):
    """silu(gate), or the tanh form of gelu(gate), of float32 numbers."""
    if is_gelu:
        # (1 + tanh(z)) / 2 is sigmoid(2 z), without the cancellation; 2 * sqrt(2 / pi) = 1.5957691
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    return gate / (1.0 + tl.exp(-inner))


@triton.jit
def gated(gate, up, is_gelu: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr):
    """As `expert_matrices.ExpertGate`, of float32 numbers."""
    if limit is not None:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if is_gelu:
        product = activated(gate, True)
    else:
        product = gate / (1.0 + tl.exp(-alpha * gate))
    return product * (up + offset)


@triton.jit
def _activate_and_multiply_kernel(
    gate_up: tl.tensor,  # [n, 2 * size]
    out: tl.tensor,  # [n, size]
    size: tl.constexpr,
    block: tl.constexpr,
    is_gelu: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < size
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * (2 * size) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * size) + size + columns, mask=mask, other=0.0).to(tl.float32)
    product = activated(gate, is_gelu) * up
    tl.store(out + row * size + columns, product.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[n, 2 * size], gate then up, contiguous -> silu(gate) * up: [n, size], in `out` where given.

    Computed in float32 and rounded once. Method: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """
    return _launch(gate_up, out, is_gelu=False)


def gelu_tanh_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """As `silu_and_mul`, with the tanh form of gelu: Hendrycks, Gimpel, arXiv 1606.08415."""
    return _launch(gate_up, out, is_gelu=True)


def _launch(gate_up: torch.Tensor, out: torch.Tensor | None, *, is_gelu: bool) -> torch.Tensor:
    n, width = gate_up.shape
    size = width // 2
    if out is None:
        out = gate_up.new_empty(n, size)
    assert width % 2 == 0, width
    assert gate_up.is_contiguous(), "rows must be contiguous"
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == ((n, size), gate_up.dtype), (out.shape, out.dtype)
    if out.numel():
        block = min(_MAX_BLOCK, triton.next_power_of_2(size))
        pdl = supports_pdl(gate_up.device)
        _activate_and_multiply_kernel[(n, triton.cdiv(size, block))](
            gate_up,
            out,
            size=size,
            block=block,
            is_gelu=is_gelu,
            pdl=pdl,
            num_warps=max(1, block // _ELEMENTS_PER_WARP),
            **launch_options(pdl),
        )
    return out


def silu_and_mul_reference(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu_and_mul` in plain torch."""
    gate, up = gate_up.float().chunk(2, -1)
    return _rounded(torch.nn.functional.silu(gate) * up, gate_up, out)


def gelu_tanh_and_mul_reference(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`gelu_tanh_and_mul` in plain torch."""
    gate, up = gate_up.float().chunk(2, -1)
    return _rounded(torch.nn.functional.gelu(gate, approximate="tanh") * up, gate_up, out)


def _rounded(product: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return product.to(gate_up.dtype) if out is None else out.copy_(product)
