"""QK norm over all heads, against its definition in float64. Tolerance: see test_rms_norm.py."""

from __future__ import annotations

import pytest
import torch
from rounding import rounding

from ringcore.kernels.attention.qk_norm import qk_norm, qk_norm_reference

pytestmark = pytest.mark.sampled

EPS = 1e-5


def rows_and_gain(num_rows, sizes, extra, dtype, device):
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(num_rows, sum(sizes) + extra, generator=generator, device=device).mul_(3).to(dtype)
    return qkv, torch.rand(sum(sizes), generator=generator, device=device) + 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "sizes", "extra"), [(1, (64, 32), 32), (5, (96, 96), 96), (3, (100, 20), 7), (2, (4096, 1024), 0)]
)
def test_q_and_k_are_normalised_each_by_itself(num_rows, sizes, extra, dtype, device):
    qkv, gain = rows_and_gain(num_rows, sizes, extra, dtype, device)
    before = qkv.clone()
    qk_norm(qkv, gain, sizes, EPS)
    parts = (rows[:, : sum(sizes)].split(sizes, 1) for rows in (qkv, before))
    for ours, x, weight in zip(*parts, gain.split(sizes), strict=True):
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=rounding(dtype, device) + 4e-6)
    assert torch.equal(qkv[:, sum(sizes) :], before[:, sum(sizes) :])


def test_the_reference_is_the_same(device):
    qkv, gain = rows_and_gain(4, (64, 16), 16, torch.float32, device)
    expected = qkv.clone()
    qk_norm_reference(expected, gain, (64, 16), EPS)
    qk_norm(qkv, gain, (64, 16), EPS)
    torch.testing.assert_close(qkv, expected, atol=1e-6, rtol=1e-5)


def test_no_rows(device):
    qk_norm(torch.empty(0, 12, device=device), torch.ones(8, device=device), (4, 4), EPS)
