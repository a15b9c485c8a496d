"""Products of the C kernels on codes whose scales are beside them: those of the weights that the codes mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.checkpoint.quantization import InputFormat
from ringcore.model_executor.linear_schemes.block_kernels import block_kernels
from ringcore.model_executor.linear_schemes.block_product import BlockProduct
from ringcore.model_executor.linear_schemes.codes import ByteCodes, WordCodes
from ringcore.model_executor.linear_schemes.cpu_product import cpu_product
from ringcore.model_executor.linear_schemes.expanding_product import ExpandingProduct
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding
from ringcore.model_executor.linear_schemes.scaled_blocks import scaled_blocks
from ringcore.model_executor.residual import Residual

pytestmark = pytest.mark.skipif(block_kernels() is None, reason="no C compiler")

OUTPUTS, INPUTS = 53, 384  # three runs of 16, and five more; a chunk of 256, and a half
BY_TOKEN = InputRounding(InputFormat("int8", "token", None))


def made(kind, group, has_zeros=False, order=False):
    generator = torch.Generator().manual_seed(group)

    def below(most, *shape):
        return torch.randint(0, most, shape, generator=generator)

    scales = torch.rand(OUTPUTS, INPUTS // group, generator=generator) + 0.1
    groups = Groups(group)
    if order:
        groups = Groups(group, index=(torch.randperm(INPUTS, generator=generator) // group).int())
    if kind == "fp8":
        codes = torch.tensor(sorted({*range(256)} - {127, 255}))[below(254, OUTPUTS, INPUTS)].to(torch.uint8)
        return QuantizedMatrix(ByteCodes(codes.view(torch.float8_e4m3fn)), scales, groups)
    if kind == "int8":
        return QuantizedMatrix(ByteCodes((below(255, OUTPUTS, INPUTS) - 127).to(torch.int8)), scales, groups)
    bits = int(kind[1:])
    words = below(256, OUTPUTS, INPUTS * bits // 8).to(torch.uint8)
    zeros = below((1 << bits) + (bits == 4), OUTPUTS, INPUTS // group).to(torch.int16) if has_zeros else None
    return QuantizedMatrix(WordCodes(words, bits, INPUTS), scales, groups, zero=1 << (bits - 1), zeros=zeros)


MATRICES = {
    "4 bits": made("w4", 32),
    "4 bits, zeros": made("w4", 128, has_zeros=True),
    "4 bits, zeros, act-order": made("w4", 64, has_zeros=True, order=True),
    "4 bits by channel": made("w4", INPUTS),
    "8 bits, zeros": made("w8", 96, has_zeros=True),
    "int8 by channel": made("int8", INPUTS),
    "fp8": made("fp8", 128),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATRICES)
def test_products_are_those_of_the_expanded_weights(name, dtype):
    """Errors are relative to the sum of the products' absolute values: sums are float32, rounded once to `dtype`."""
    matrix, bias = MATRICES[name], torch.randn(OUTPUTS)
    product = cpu_product(matrix, bias, dtype, updatable=False, rounding=None)
    assert isinstance(product, BlockProduct)
    weights = matrix.expanded().double()
    for num_rows in (1, 2, 5, 16, 30, 67):
        x = torch.randn(num_rows, INPUTS, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        exact = x.double() @ weights.T + bias
        found = product(x, NO_TOKEN_CONTEXT)
        assert found.dtype == dtype
        # Of 4 bits codes are up to 15 before their zero is subtracted.
        error = 2e-6 * (x.double().abs() @ (weights.abs() + 16 * matrix.scales.amax(1, keepdim=True)).T + 1)
        assert ((found - exact).abs() <= error + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all()
        wide = torch.empty(num_rows, OUTPUTS)
        assert ((product(x, NO_TOKEN_CONTEXT, wide) - exact).abs() <= error).all()


@pytest.mark.parametrize("name", ["4 bits, zeros", "8 bits, zeros", "int8 by channel", "fp8"])
def test_the_codes_mean_the_same_numbers(name):
    matrix = MATRICES[name]
    found = scaled_blocks(block_kernels(), [matrix], [None], None, torch.float32)
    index = torch.tensor([52, 0, 17, 17])
    assert torch.equal(found.rows(index), matrix.expanded()[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_integers_are_exact(dtype):
    """INT8 by INT8: to the rounding of the two scales, and of the result to `dtype`."""
    matrix = MATRICES["int8 by channel"]
    product = cpu_product(matrix, None, dtype, updatable=False, rounding=BY_TOKEN)
    assert isinstance(product, BlockProduct)
    for num_rows in (1, 3, 16, 70):
        x = torch.randn(num_rows, INPUTS, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        x[0, 5] = 1e4
        x[-1] *= 0 if num_rows > 1 else 1
        codes, scales = BY_TOKEN(x)
        exact = (codes.double() @ matrix.codes.tensor.double().T) * matrix.scales.double().T * scales.double()
        error = 1e-6 if dtype == torch.float32 else 2**-8
        assert torch.allclose(product(x, NO_TOKEN_CONTEXT).double(), exact, rtol=error)


@pytest.mark.parametrize(("start", "length"), [(0, 48), (48, 56), (104, 280), (344, 40)])
@pytest.mark.parametrize("name", ["4 bits, zeros", "4 bits by channel", "int8 by channel", "fp8"])
def test_a_share_that_cuts_blocks_is_of_whole_ones_with_inputs_that_are_0(name, start, length):
    """As a rank has it: groups of 128 inputs are cut within 32."""
    whole, end = MATRICES[name], start + length
    size, codes = whole.groups.size, whole.codes
    if isinstance(codes, WordCodes):
        own = WordCodes(
            codes.words[:, start * codes.bits // 8 : end * codes.bits // 8].contiguous(), codes.bits, length
        )
    else:
        own = ByteCodes(codes.tensor[:, start:end].contiguous())
    of_share = slice(start // size, -(-end // size))
    zeros = None if whole.zeros is None else whole.zeros[:, of_share]
    matrix = replace(whole, codes=own, scales=whole.scales[:, of_share], groups=Groups(size, start % size), zeros=zeros)
    weights, bias = whole.expanded()[:, start:end], torch.randn(OUTPUTS)
    assert torch.equal(matrix.expanded(), weights)
    product = cpu_product(matrix, bias, torch.float32, updatable=False, rounding=None)
    assert not isinstance(product, ExpandingProduct)
    for num_rows in (1, 3, 20):
        x = torch.randn(num_rows, length, generator=torch.Generator().manual_seed(num_rows))
        expected = x @ weights.T + bias
        close = {"atol": 1e-5 * float(expected.abs().max()), "rtol": 1e-5}
        torch.testing.assert_close(product(x, NO_TOKEN_CONTEXT), expected, **close)
        hidden = Residual(torch.ones(num_rows, OUTPUTS))
        product.add_to(hidden, x, NO_TOKEN_CONTEXT)
        torch.testing.assert_close(hidden.rows, expected + 1, **close)


@pytest.mark.parametrize(
    "matrix",
    [
        made("w4", 16),  # two scales in a block
        replace(made("w8", 32), zeros=torch.full((OUTPUTS, INPUTS // 32), 256, dtype=torch.int16)),
    ],
)
def test_what_the_kernels_do_not_take_is_expanded(matrix):
    product = cpu_product(matrix, None, torch.float32, updatable=False, rounding=None)
    assert isinstance(product, ExpandingProduct)
    x = torch.randn(3, matrix.num_inputs)
    torch.testing.assert_close(product(x, NO_TOKEN_CONTEXT), x @ matrix.expanded().T, atol=1e-2, rtol=1e-4)
