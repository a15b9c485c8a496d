"""Packed linears compute what plain ones do, and a build without the packing falls back."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes import cpu_packing
from ringcore.model_executor.linear_schemes.cpu_packing import pack


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 33), (64, 48), (130, 65)])
def test_every_number_of_rows(outputs, inputs, bias, dtype):
    weight = randn(outputs, inputs, seed=1).to(dtype)
    b = randn(outputs, seed=2).to(dtype) if bias else None
    linear = pack(weight, b)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    for rows in (1, 2, 7, 16, 63, 64, 65, 200):
        x = randn(rows, inputs, seed=rows).to(dtype)
        expected = F.linear(x.float(), weight.float(), None if b is None else b.float())
        torch.testing.assert_close(linear(x).float(), expected, atol=tolerance, rtol=tolerance)


def test_a_view_as_input():
    """Inputs may be slices of a wider tensor."""
    weight, x = randn(8, 16, seed=1), randn(5, 40, seed=2)[:, 8:24]
    torch.testing.assert_close(pack(weight, None)(x), x @ weight.T, atol=1e-5, rtol=0)


def test_no_rows():
    assert pack(randn(8, 16, seed=1), None)(torch.empty(0, 16)).shape == (0, 8)


def test_the_packed_form_does_not_need_the_original():
    """It is freed, or reused, once it is packed."""
    weight, x = randn(24, 40, seed=1), randn(3, 40, seed=2)
    expected = x @ weight.T
    linear = pack(weight, None)
    if isinstance(linear, functools.partial):
        pytest.skip("this build has no packing for float32")
    weight.fill_(float("nan"))
    torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=0)


def unavailable(weight, bias):
    raise RuntimeError("no such operator")


def wrong(weight, bias):
    return lambda x: ops.linear(x, weight, bias) + 1


@pytest.mark.parametrize("broken", [unavailable, wrong])
def test_a_packing_that_is_not_there_or_wrong_is_not_used(monkeypatch, broken):
    monkeypatch.setattr(cpu_packing, "_pack_mkl", broken)
    weight, x = randn(8, 16, seed=1), randn(5, 16, seed=2)
    assert torch.equal(pack(weight, None)(x), F.linear(x, weight))


@pytest.mark.parametrize("largest", [1e-6, 0.3, 1.0, 900.0, 1e30])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_of_a_bfloat16_checkpoint_are_exact_whatever_the_number_of_rows(largest, bias):
    """Compared with float64: a linear in 16 bits would be off by 1e-3."""
    weight = (randn(64, 96, seed=1) * largest).bfloat16().float()
    b = randn(64, seed=2) * largest if bias else None
    linear = pack(weight, b)
    for rows in (1, 5, 12, 13, 40):
        x = randn(rows, 96, seed=rows)
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert (linear(x) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (torch.tensor([[1.0, 2.0**-8 + 1]]), 1.0),
        (torch.tensor([[2.0**-20 * 255, 1.0]]), 1.0),
        (torch.tensor([[2.0**-28 * 255, 0.5]]), 2.0**14),
        (torch.tensor([[1.0, 1 + 2.0**-12]]), None),  # too many digits
        (torch.tensor([[2.0**-30 * 255, 2.0**8]]), None),  # too wide a span
        (torch.tensor([[0.0, 0.0]]), None),
        (torch.tensor([[1.0, float("inf")]]), None),
    ],
)
def test_which_weights_are_held_in_16_bits(weight, scale):
    assert cpu_packing._half_scale(weight) == scale


def test_weights_that_do_not_fit_16_bits_stay_as_they_are():
    weight = randn(64, 96, seed=1)
    linear, x = pack(weight, None), randn(3, 96, seed=2)
    expected = x.double() @ weight.double().T
    assert (linear(x) - expected).abs().max() < 1e-5 * expected.abs().max()
