"""Products of rounded inputs: on adversarial rows, and by torch's scaled product, which a CPU has too."""

from __future__ import annotations

import pytest
import torch
from quantized_checkpoints import rounded_inputs, store

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.checkpoint.quantization import InputFormat
from ringcore.model_executor.linear_schemes.codes import ByteCodes
from ringcore.model_executor.linear_schemes.dense import PlainProduct
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding, RoundedInputs
from ringcore.model_executor.linear_schemes.scaled_product import ScaledProduct

BY_TOKEN = InputFormat("fp8", "token")


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adversarial():
    """Rows of zeros, with one spike, of the largest floats, of tiny ones, and random ones."""
    rows = random(6, 80)
    rows[0], rows[1], rows[2], rows[3] = 0, 0, 3e38, 1e-30
    rows[1, 7] = -1e4
    return rows


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("fp8 channel", BY_TOKEN),
        ("int8", InputFormat("int8", "token")),
        ("fp8 block", InputFormat("fp8", "group", 16)),
        ("fp8 tensor static", InputFormat("fp8", "tensor")),
    ],
)
def test_codes_and_scales(kind, form):
    rows, scale = adversarial(), torch.tensor([0.02])
    codes, scales = InputRounding(form, scale=scale)(rows)
    assert torch.isfinite(codes).all()
    torch.testing.assert_close(codes * scales, rounded_inputs(kind, rows, scale), rtol=1e-6, atol=0)


def test_a_share_that_begins_within_a_group():
    form, rows = InputFormat("fp8", "group", 16), adversarial()
    codes, scales = InputRounding(form, offset=8)(rows[:, 8:])
    whole = rounded_inputs("fp8 block", rows, None)
    torch.testing.assert_close((codes * scales)[:, 8:], whole[:, 16:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", ["token", "tensor"])
def test_many_rows_by_the_scaled_product(scale):
    stored = store("fp8 channel", random(48, 32))
    matrix = QuantizedMatrix(ByteCodes(stored.tensors["weight"]), stored.tensors["weight_scale"], Groups(32))
    scaled = ScaledProduct(matrix.codes.tensor, matrix.scales)
    inner = PlainProduct(lambda x: torch.full((len(x), 48), float("nan")))
    rounding = InputRounding(InputFormat("fp8", scale), scale=torch.tensor([0.02]))
    product, x = RoundedInputs(inner, rounding, random(48, seed=3), scaled), random(80, 32, seed=2)
    codes, scales = rounding(x)
    expected = (codes * scales) @ stored.expanded.T + random(48, seed=3)
    torch.testing.assert_close(product(x, NO_TOKEN_CONTEXT), expected, rtol=1e-5, atol=1e-5)
    assert product(x[:32], NO_TOKEN_CONTEXT).isnan().all()  # few rows are the inner product's
    assert ScaledProduct.of(matrix, torch.bfloat16, None) is None  # no such tensor cores here
