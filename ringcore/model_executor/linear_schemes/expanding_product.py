"""The product of quantized weights on a CPU: by torch's 4- and 8-bit operators, else expanded block by block."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.attention.context import TokenContext
from ringcore.model_executor.linear_schemes.codes import ByteCodes
from ringcore.model_executor.linear_schemes.cpu_packing import Multiply
from ringcore.model_executor.linear_schemes.dense import PlainProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix

__all__ = ["ExpandingProduct", "cpu_product"]

_BLOCK = 1 << 18  # numbers that are expanded at a time: 1 MiB, which stays in a core's cache
_INT4_GROUPS = (256, 128, 64, 32)  # inputs of a group that the 4-bit operator takes
_INT4_OUTPUTS = 16  # it takes multiples of


def cpu_product(matrix: QuantizedMatrix, bias: torch.Tensor | None, updatable: bool) -> Product:
    """The weights are expanded as a whole for their packing alone. Sums are in float32."""
    if not updatable:
        multiply = _packed_int8(matrix) or _packed_int4(matrix)
        if multiply is not None:
            return PlainProduct(_with_bias(multiply, bias))
    return ExpandingProduct(matrix, bias)


class ExpandingProduct(Product):
    """Some outputs at a time, from the tensors as they are."""

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> None:
        self._matrix, self._bias = matrix, bias
        self._block = max(1, _BLOCK // max(1, matrix.num_inputs))

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        matrix = self._matrix
        product = x.new_empty(len(x), matrix.num_outputs)
        for first in range(0, matrix.num_outputs, self._block):
            end = min(first + self._block, matrix.num_outputs)
            bias = None if self._bias is None else self._bias[first:end]
            product[:, first:end] = F.linear(x, matrix.expanded(first, end).to(x.dtype), bias)
        return product if out is None else out.copy_(product)

    def refresh(self) -> None:
        self._matrix.derived.refresh()


def _with_bias(multiply: Multiply, bias: torch.Tensor | None) -> Multiply:
    return multiply if bias is None else lambda x: multiply(x) + bias


def _packed_int8(matrix: QuantizedMatrix) -> Multiply | None:
    """8-bit integers with a scale for each output."""
    codes = matrix.codes
    if not isinstance(codes, ByteCodes) or codes.is_fp8 or matrix.scales.shape[1] > 1:
        return None
    numbers, scales = codes.tensor.contiguous(), matrix.scales[:, 0].contiguous()
    operator = torch.ops.aten._weight_int8pack_mm.default
    return lambda x: operator(x.float(), numbers, scales).to(x.dtype)


def _packed_int4(matrix: QuantizedMatrix) -> Multiply | None:
    """4-bit integers in consecutive groups that the operator takes; act-order by sorting the inputs."""
    if matrix.codes.bits != 4:
        return None
    num_inputs, groups = matrix.num_inputs, matrix.groups.of_inputs(matrix.num_inputs, torch.device("cpu"))
    order = None
    if matrix.groups.index is not None:
        order = groups.argsort(stable=True)
        groups = groups[order]
    size = _int4_group(groups, num_inputs)
    if size is None:
        return None
    of_group = groups[::size] if matrix.scales.shape[1] > 1 else torch.zeros(num_inputs // size, dtype=torch.int64)
    scales = matrix.scales.index_select(1, of_group)
    zeros = matrix.zero if matrix.zeros is None else matrix.zeros.index_select(1, of_group)
    padding = -matrix.num_outputs % _INT4_OUTPUTS
    numbers = matrix.codes.numbers(0, matrix.num_outputs).int()
    numbers = numbers if order is None else numbers.index_select(1, order)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(F.pad(numbers, (0, 0, 0, padding)), 1)
    # The operator computes (code - 8) * scale + zero.
    parameters = F.pad(torch.stack((scales, (8 - zeros) * scales), -1), (0, 0, 0, 0, 0, padding))
    parameters = parameters.transpose(0, 1).contiguous()
    operator, num_outputs = torch.ops.aten._weight_int4pack_mm_for_cpu.default, matrix.num_outputs

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x.float().contiguous() if order is None else x.float().index_select(1, order)
        product: torch.Tensor = operator(rows, packed, size, parameters)[:, :num_outputs]
        return product.to(x.dtype).contiguous()

    return multiply


def _int4_group(groups: torch.Tensor, num_inputs: int) -> int | None:
    """The largest size that the operator takes and that no group is cut by."""
    ends = (groups.diff().nonzero().flatten() + 1).tolist()
    common = math.gcd(num_inputs, *ends)
    return next((size for size in _INT4_GROUPS if common % size == 0), None)
