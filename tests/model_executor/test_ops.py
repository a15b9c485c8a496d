"""The shared functions against their definitions in float64."""

from __future__ import annotations

import pytest
import torch

from ringcore.model_executor import ops
from ringcore.model_executor.layers.norm import bind_rms_norm


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_by_definition(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 4, 16)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(shape, dtype, eps):
    x, weight = randn(*shape).to(dtype), (1 + 0.3 * randn(*shape[1:], seed=1)).to(dtype)
    before = x.clone()
    ours = bind_rms_norm(weight, eps)(x)
    assert torch.equal(x, before)  # the residual stream goes on
    assert ours.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), norm_by_definition(x, weight, eps), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-4, 1e15])
def test_rms_norm_of_extreme_rows(scale):
    """eps decides for tiny rows, and none gives a NaN."""
    x, weight = randn(2, 32) * scale, torch.ones(32)
    torch.testing.assert_close(
        bind_rms_norm(weight, 1e-5)(x).double(), norm_by_definition(x, weight, 1e-5), atol=1e-12, rtol=1e-5
    )


def test_both_forms_of_rms_norm_agree():
    x, weight = randn(7, 48), 1 + 0.3 * randn(48, seed=1)
    gain, floor = ops.rms_norm_gain(weight), ops.rms_norm_floor(weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm_by_gain(x, gain, floor), ops.rms_norm(x, weight, 1e-5), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 256)])
def test_rms_norm_by_one_plus_the_weight(shape, dtype):
    """Rounded once, from float32: 1 + 2^-10 is 1 in bfloat16, and that would be some thousandths of a sum."""
    x = randn(*shape).to(dtype)
    weight = (0.3 * randn(*shape[1:], seed=1)).to(dtype)
    weight[..., ::2] = 2.0**-10
    ours = bind_rms_norm(weight, 1e-6, plus_one=True)(x)
    assert ours.dtype == dtype
    exact = norm_by_definition(x, 1 + weight.double(), 1e-6)
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert (ours == exact.to(dtype)).double().mean() > (0.99 if dtype != torch.float32 else 0)


def test_gelu_and_mul():
    x = randn(3, 10)
    gate, up = x.double()[:, :5], x.double()[:, 5:]
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(ops.gelu_tanh_and_mul(x).double(), gate / 2 * (1 + inner.tanh()) * up, atol=1e-6, rtol=0)


def test_silu_and_mul():
    x = randn(3, 10)
    gate, up = x.double()[:, :5], x.double()[:, 5:]
    torch.testing.assert_close(ops.silu_and_mul(x).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=0)
