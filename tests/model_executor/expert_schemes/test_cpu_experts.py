"""Products of packed experts by the C kernels, all experts in a call: those of the weights that the codes mean."""

from __future__ import annotations

import pytest
import torch

from ringcore.checkpoint.quantization import InputFormat
from ringcore.model_executor.expert_schemes.cpu_experts import cpu_experts
from ringcore.model_executor.expert_schemes.kernel_experts import KernelExperts
from ringcore.model_executor.expert_schemes.quantized_experts import QuantizedExperts
from ringcore.model_executor.linear_schemes.block_kernels import block_kernels
from ringcore.model_executor.linear_schemes.codes import ByteCodes, Codes, WordCodes
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding

pytestmark = [pytest.mark.sampled, pytest.mark.skipif(block_kernels() is None, reason="no C compiler")]

EXPERTS, INPUTS = 4, 384
BY_TOKEN = InputRounding(InputFormat("int8", "token", None))
# Rows of each expert: one row, one and none, few, all to one in more than are packed at a time.
LOADS = [(0, 0, 1, 0), (1, 0, 2, 2), (17, 3, 0, 70), (0, 600, 0, 0)]


def matrix(seed: int, kind: str, group: int, has_order: bool = False, num_outputs: int = 48) -> QuantizedMatrix:
    draw = torch.Generator().manual_seed(seed)

    def below(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=draw)

    scales = torch.rand(num_outputs, INPUTS // group, generator=draw) + 0.1
    order = (torch.randperm(INPUTS, generator=draw) // group).int() if has_order else None
    groups = Groups(group, index=order)
    if kind == "fp8":
        codes = torch.tensor(sorted({*range(256)} - {127, 255}))[below(254, num_outputs, INPUTS)].to(torch.uint8)
        return QuantizedMatrix(ByteCodes(codes.view(torch.float8_e4m3fn)), scales, groups)
    if kind == "int8":
        return QuantizedMatrix(ByteCodes((below(255, num_outputs, INPUTS) - 127).to(torch.int8)), scales, groups)
    bits = int(kind[1:])
    words = below(256, num_outputs, INPUTS * bits // 8).to(torch.uint8)
    zeros = below(1 << bits, num_outputs, INPUTS // group).to(torch.int16)
    return QuantizedMatrix(WordCodes(words, bits, INPUTS), scales, groups, zeros=zeros)


FORMATS = {
    "4 bits": ("w4", 128),
    "4 bits, act-order": ("w4", 32, True),
    "8 bits, act-order": ("w8", 64, True),
    "int8 by channel": ("int8", INPUTS),
    "fp8 in blocks": ("fp8", 128),
    "fp8 by channel": ("fp8", INPUTS),
}


def experts(name: str) -> list[QuantizedMatrix]:
    return [matrix(seed, *FORMATS[name]) for seed in range(EXPERTS)]


def routed(load: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows, the expert of each, where those of each expert end."""
    counts = torch.tensor(load)
    rows = torch.randn(sum(load), INPUTS, generator=torch.Generator().manual_seed(sum(load))).to(dtype)
    return rows, torch.arange(EXPERTS).repeat_interleave(counts), counts.cumsum(0).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_each_experts_weights(name, dtype):
    """Errors are relative to the sum of the products' absolute values, as a linear's."""
    matrices = experts(name)
    weight = cpu_experts(matrices, dtype, updatable=False, rounding=None)
    assert isinstance(weight, KernelExperts)
    numbers = torch.stack([one.expanded() for one in matrices])
    assert torch.equal(weight.numbers(torch.tensor([3, 0])), numbers[[3, 0]])
    for load in LOADS:
        rows, of_row, ends = routed(load, dtype)
        each = [(rows[of_row == one].double(), matrices[one], numbers[one].double()) for one in range(EXPERTS)]
        exact = torch.cat([x @ w.T for x, _, w in each])
        # Of 4 and 8 bits codes are up to 15 and 255 before their zero is subtracted.
        sums = torch.cat([x.abs() @ (w.abs() + 16 * one.scales.amax(1, keepdim=True)).T + 1 for x, one, w in each])
        error = (weight.product(rows, of_row, ends).double() - exact).abs()
        assert (error <= 2e-6 * sums + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all()


def test_rows_depend_neither_on_other_experts_rows_nor_on_how_many_there_are_from_two_on():
    weight = cpu_experts(experts("4 bits"), torch.float32, updatable=False, rounding=None)
    rows, of_row, ends = routed((17, 3, 0, 70), torch.float32)
    whole = weight.product(rows, of_row, ends)
    for one in (0, 1, 3):
        alone, is_here = torch.zeros(EXPERTS, dtype=torch.int32), of_row == one
        alone[one:] = int(is_here.sum())
        assert torch.equal(weight.product(rows[is_here], of_row[is_here], alone), whole[is_here])
    for count in (2, 3, 4, 5):
        few = slice(len(rows) - count, None)
        alone = torch.tensor([0, 0, 0, count], dtype=torch.int32)
        assert torch.equal(weight.product(rows[few], of_row[few], alone), whole[few])


def test_int8_rows_are_rounded_by_the_kernels_and_summed_as_integers():
    matrices = experts("int8 by channel")
    weight = cpu_experts(matrices, torch.float32, updatable=False, rounding=BY_TOKEN)
    rows, of_row, ends = routed((17, 3, 0, 70), torch.float32)
    assert weight.rounded(rows) is rows
    codes, scales = BY_TOKEN(rows)
    each = [(codes[of_row == e].double(), one, one.codes.numbers(0, 48).double()) for e, one in enumerate(matrices)]
    exact = torch.cat([(x @ numbers.T) * one.scales.double().T for x, one, numbers in each]) * scales.double()
    assert torch.allclose(weight.product(rows, of_row, ends).double(), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [(0, 48), (48, 144), (80, 304), (40, 8)])
@pytest.mark.parametrize("name", ["4 bits", "fp8 in blocks", "int8 by channel"])
def test_a_share_that_begins_or_ends_within_a_block_is_padded(name, share, dtype):
    """Groups of 128, which the shares cut: of one group, of two, and of four with two whole ones."""
    (kind, group), (start, length) = FORMATS[name], share
    matrices = [_share_of(matrix(seed, kind, group), start, length) for seed in range(EXPERTS)]
    rounding = BY_TOKEN if kind == "int8" else None
    weight = cpu_experts(matrices, dtype, updatable=False, rounding=rounding)
    assert not isinstance(weight, QuantizedExperts)
    numbers = torch.stack([one.expanded() for one in matrices])
    assert weight.shape == numbers.shape
    assert torch.equal(weight.numbers(torch.tensor([3, 0])), numbers[[3, 0]])
    for load in LOADS:
        rows, of_row, ends = routed(load, dtype)
        rows = rows[:, :length]
        seen = rows if rounding is None else rounding.rounded(rows.float())
        exact = torch.cat([seen[of_row == e].double() @ numbers[e].double().T for e in range(EXPERTS)])
        sums = torch.cat([seen[of_row == e].double().abs() @ numbers[e].double().abs().T for e in range(EXPERTS)])
        error = (weight.product(weight.rounded(rows), of_row, ends).double() - exact).abs()
        assert (error <= 1e-4 * sums + 1e-4 + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all()


def _share_of(whole: QuantizedMatrix, start: int, length: int) -> QuantizedMatrix:
    """Inputs `start` to `start + length`, with the scales of the groups that they are of."""
    group, codes = whole.groups.size, whole.codes
    if isinstance(codes, ByteCodes):
        own: Codes = ByteCodes(codes.tensor[:, start : start + length].contiguous())
    else:
        bytes_ = slice(start * codes.bits // 8, (start + length) * codes.bits // 8)
        own = WordCodes(codes.words[:, bytes_].contiguous(), codes.bits, length)
    groups = slice(start // group, -(-(start + length) // group))
    zeros = None if whole.zeros is None else whole.zeros[:, groups]
    return QuantizedMatrix(own, whole.scales[:, groups], Groups(group, offset=start % group), zeros=zeros)


@pytest.mark.parametrize("change", [{"updatable": True}, {"num_outputs": 40}, {"group": 16}])
def test_what_the_kernels_do_not_take_is_expanded(change):
    """Weights that are updated in place; outputs that are no whole runs; two scales in a block."""
    options = {"kind": "w4", "group": 32} | {key: value for key, value in change.items() if key != "updatable"}
    matrices = [matrix(seed, **options) for seed in range(EXPERTS)]
    weight = cpu_experts(matrices, torch.float32, updatable="updatable" in change, rounding=None)
    assert isinstance(weight, QuantizedExperts)
    rows, of_row, ends = routed((1, 0, 2, 2), torch.float32)
    exact = torch.cat([rows[of_row == e] @ one.expanded().T for e, one in enumerate(matrices)])
    torch.testing.assert_close(weight.product(rows, of_row, ends), exact, atol=1e-2, rtol=1e-4)
