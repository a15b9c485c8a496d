"""Gated activations against their definitions in float64.

Tolerance: float32 throughout, with the GPU's approximate exponential and division (some 1e-6), and one rounding.
"""

from __future__ import annotations

import math

import pytest
import torch
from rounding import rounding

from ringcore.kernels.activation import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)

pytestmark = pytest.mark.sampled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

large = pytest.mark.skipif(not torch.cuda.is_available(), reason="large shapes take the interpreter minutes")
SHAPES = [
    (1, 1),
    (3, 80),
    (1, 1024),
    (2, 1025),
    (1, 3072),
    pytest.param((4096, 12288), marks=large),
    pytest.param((1, 28672), marks=large),
    pytest.param((90_000, 12288), marks=[large, pytest.mark.timeout(300)]),  # more than 2^31 numbers
]


def silu(gate):
    return gate / (1 + (-gate).exp())


def gelu_tanh(gate):
    return gate / 2 * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())


KINDS = {
    "silu": (silu_and_mul, silu_and_mul_reference, silu),
    "gelu": (gelu_tanh_and_mul, gelu_tanh_and_mul_reference, gelu_tanh),
}


def gates(n, size, dtype, device):
    generator = torch.Generator(device).manual_seed(n)
    return (2 * torch.randn(n, 2 * size, generator=generator, device=device)).to(dtype)


def assert_gated(ours, x, activation):
    size = x.shape[1] // 2
    rows = max(1, (1 << 24) // size)
    for ours_now, x_now in zip(ours.split(rows), x.split(rows), strict=True):
        exact = activation(x_now[:, :size].double()) * x_now[:, size:].double()
        # Where gelu is nearly 0 its argument's exponential is large, and so is its relative error: hence 4e-6.
        rtol = rounding(x.dtype, x.device) + 4e-6
        atol = 1e-6 if x.dtype != torch.float16 else 1e-6 + 2.0**-25  # half of its smallest number
        torch.testing.assert_close(ours_now.double(), exact, atol=atol, rtol=rtol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(device, shape, dtype, kind):
    if math.prod(shape) > 1 << 30 and (dtype, kind) != (torch.bfloat16, "silu"):
        pytest.skip("one form is enough of what is for the offsets alone")
    kernel, _, activation = KINDS[kind]
    x = gates(*shape, dtype, device)
    buffer = torch.full((shape[0] + 3, shape[1]), float("nan"), dtype=dtype, device=device)
    out = buffer[: shape[0]]
    assert kernel(x, out=out) is out
    assert_gated(out, x, activation)
    assert buffer[shape[0] :].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_reference_agree(device, dtype, kind):
    kernel, reference, activation = KINDS[kind]
    x = gates(6, 300, dtype, device)
    expected = reference(x)
    assert_gated(expected, x, activation)
    assert torch.equal(reference(x, out=torch.empty_like(expected)), expected)
    # Where float32 numbers fall on the two sides of a rounding, one unit apart.
    rtol = 1e-5 + 2 * rounding(dtype, x.device) * (dtype != torch.float32)
    torch.testing.assert_close(kernel(x), expected, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("kind", KINDS)
def test_far_from_zero(device, kind):
    """Nothing overflows on the way to a result that is a number."""
    gate = torch.tensor([-1e4, -200.0, -90.0, -30.0, 0.0, 30.0, 90.0, 200.0, 1e4], device=device)
    x = torch.cat((gate, torch.full_like(gate, 2.0)))[None]
    ours = KINDS[kind][0](x)
    assert ours.isfinite().all()
    torch.testing.assert_close(ours[0, 4:], 2 * gate[4:], atol=0, rtol=1e-6)
    torch.testing.assert_close(ours[0, :4], torch.zeros(4, device=device), atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(device, kind):
    assert KINDS[kind][0](torch.empty(0, 12, device=device)).shape == (0, 6)
