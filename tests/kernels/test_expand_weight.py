"""Quantized weights expanded for cuBLAS, against their expansion in plain torch."""

from __future__ import annotations

import pytest
import torch
from test_weight_tiles import FORMATS, packed, random

from ringcore.kernels.linears.expand_weight import expand_weight
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.residual import Residual


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("num_inputs", "start"), [(96, 0), (288, 0), (96, 48)])
def test_expansion(device, kind, num_inputs, start, monkeypatch):
    if start and ("awq" in kind or "block" in kind or "w8" in kind or kind == "gptq 8 order"):
        pytest.skip("a share of whole groups")
    length = num_inputs - start
    weight, expanded = packed(kind, random(40, num_inputs), device, monkeypatch, start=start, length=length)
    torch.testing.assert_close(expand_weight(weight), expanded, rtol=1e-6, atol=1e-6)


def test_many_rows_are_multiplied_by_the_expanded_weight(device, monkeypatch):
    weight, expanded = packed("awq", random(40, 96), device, monkeypatch)
    bias, x = random(40, seed=3).to(device), random(200, 96, seed=2).to(device)
    expected = torch.nn.functional.linear(x, expanded, bias)
    torch.testing.assert_close(KernelProduct(weight, bias)(x, None), expected, rtol=1e-4, atol=1e-4)
    hidden = Residual(torch.ones(200, 40, device=device))
    KernelProduct(weight, None).add_to(hidden, x, None)
    torch.testing.assert_close(hidden.rows, expected - bias + 1, rtol=1e-4, atol=1e-4)
