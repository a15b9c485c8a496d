"""Packed products compute what plain ones do, and a build without the packing falls back."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from ringcore.model_executor import ops, packing


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 33), (64, 48), (130, 65)])
def test_every_number_of_rows(outputs, inputs, bias, dtype):
    weight = randn(outputs, inputs, seed=1).to(dtype)
    b = randn(outputs, seed=2).to(dtype) if bias else None
    product = packing.pack_linear(weight, b)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    for rows in (1, 2, 7, 16, 63, 64, 65, 200):
        x = randn(rows, inputs, seed=rows).to(dtype)
        expected = F.linear(x.float(), weight.float(), None if b is None else b.float())
        torch.testing.assert_close(product(x).float(), expected, atol=tolerance, rtol=tolerance)


def test_a_view_as_input():
    """Inputs may be slices of a wider tensor."""
    weight, x = randn(8, 16, seed=1), randn(5, 40, seed=2)[:, 8:24]
    torch.testing.assert_close(packing.pack_linear(weight, None)(x), x @ weight.T, atol=1e-5, rtol=0)


def test_no_rows():
    assert packing.pack_linear(randn(8, 16, seed=1), None)(torch.empty(0, 16)).shape == (0, 8)


def test_the_packed_form_does_not_need_the_original():
    """It is freed, or reused, once it is packed."""
    weight, x = randn(24, 40, seed=1), randn(3, 40, seed=2)
    expected = x @ weight.T
    product = packing.pack_linear(weight, None)
    if isinstance(product, functools.partial):
        pytest.skip("this build has no packing for float32")
    weight.fill_(float("nan"))
    torch.testing.assert_close(product(x), expected, atol=1e-5, rtol=0)


def unavailable(weight, bias):
    raise RuntimeError("no such operator")


def wrong(weight, bias):
    return lambda x: ops.linear(x, weight, bias) + 1


@pytest.mark.parametrize("broken", [unavailable, wrong])
def test_a_packing_that_is_not_there_or_wrong_is_not_used(monkeypatch, broken):
    monkeypatch.setattr(packing, "_pack_mkl", broken)
    weight, x = randn(8, 16, seed=1), randn(5, 16, seed=2)
    assert torch.equal(packing.pack_linear(weight, None)(x), F.linear(x, weight))
