"""The product of quantized weights on a CPU: by torch's integer operators where they are fast, else expanded by blocks.

One linear of 2,048 x 2,048 in microseconds, on one core of a busy host with AVX-512, weights in the cache:

    |                                            | 1 row  | 4      | 16      |
    | float32, dense                             | 2,291  | 5,467  | 10,050  |
    | 8 bits by 8 bits, `_int_mm`                | 70     | 840    | 1,024   |
    | 4 bits, operator, bfloat16 inputs          | 228    | 526    | 1,646   |
    | 8 bits, operator, bfloat16 inputs          | 218    | 641    | 4,204   |
    | 4 bits, operator, float32 inputs           | 20,039 | 62,989 | 348,582 |

torch's 4- and 8-bit operators are vectorised for bfloat16 alone, and round their results to it: with float32 inputs
the weights are expanded.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.attention.context import TokenContext
from ringcore.model_executor.linear_schemes.codes import ByteCodes, HalvesCodes
from ringcore.model_executor.linear_schemes.cpu_packing import Multiply
from ringcore.model_executor.linear_schemes.dense import PlainProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.weight import Derived

__all__ = ["ExpandableMatrix", "ExpandingProduct", "cpu_product", "integer_product"]

_BLOCK = 1 << 18  # numbers that are expanded at a time: 1 MiB, which stays in a core's cache
_INT4_GROUPS = (256, 128, 64, 32)  # inputs of a group that the 4-bit operator takes
_INT4_OUTPUTS = 16  # it takes multiples of


def cpu_product(matrix: QuantizedMatrix, bias: torch.Tensor | None, dtype: torch.dtype, updatable: bool) -> Product:
    """dtype: of the inputs. The weights are expanded as a whole for their packing alone."""
    if updatable:
        return ExpandingProduct(matrix, bias)
    matrix, order = _sorted(matrix)
    if dtype == torch.bfloat16:
        multiply = _packed_int8(matrix) or _packed_int4(matrix)
        if multiply is not None:
            return PlainProduct(_of_sorted(_with_bias(multiply, bias), order))
    return ExpandingProduct(matrix, bias, order)


def integer_product(matrix: QuantizedMatrix) -> Product | None:
    """Of inputs that are INT8 numbers, in float32: exact sums of integers, where each output has one scale."""
    codes = matrix.codes
    if not isinstance(codes, ByteCodes) or codes.is_fp8 or matrix.scales.shape[1] > 1:
        return None
    numbers, scales = codes.tensor.t(), matrix.scales[:, 0]
    return PlainProduct(lambda x: torch._int_mm(x.to(torch.int8), numbers).float().mul_(scales))


class ExpandableMatrix(Protocol):
    """A matrix that is expanded by outputs."""

    @property
    def num_outputs(self) -> int: ...

    @property
    def num_inputs(self) -> int: ...

    @property
    def derived(self) -> Derived: ...

    def expanded(self, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Of outputs `first` to `end`: [n, num_inputs] float32."""


class ExpandingProduct(Product):
    """Some outputs at a time, from the tensors as they are."""

    def __init__(
        self,
        matrix: ExpandableMatrix,
        bias: torch.Tensor | None,
        order: torch.Tensor | None = None,
        rounding: Multiply | None = None,
    ) -> None:
        """order: in which the matrix has its inputs. rounding: of the inputs."""
        self._matrix, self._bias, self._order, self._rounding = matrix, bias, order, rounding
        self._block = max(1, _BLOCK // max(1, matrix.num_inputs))

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        matrix = self._matrix
        x = x if self._order is None else x.index_select(1, self._order)
        x = x if self._rounding is None else self._rounding(x)
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


def _of_sorted(multiply: Multiply, order: torch.Tensor | None) -> Multiply:
    return multiply if order is None else lambda x: multiply(x.index_select(1, order))


def _sorted(matrix: QuantizedMatrix) -> tuple[QuantizedMatrix, torch.Tensor | None]:
    """(the matrix with its inputs sorted by group, and codes that expand fast; the order of the inputs, if it is not
    their own)."""
    groups, order, size = matrix.groups, None, matrix.num_inputs
    if groups.index is not None:
        order = groups.index.argsort(stable=True)
        of_inputs = groups.index[order]
        groups = replace(groups, index=of_inputs)
        if torch.equal(of_inputs, torch.arange(size) // groups.size):
            groups = Groups(groups.size)
    codes = matrix.codes if isinstance(matrix.codes, ByteCodes) else HalvesCodes.of(matrix.codes, order)
    zeros = None if matrix.zeros is None else matrix.zeros.float().contiguous()
    return replace(matrix, codes=codes, groups=groups, scales=matrix.scales.contiguous(), zeros=zeros), order


def _packed_int8(matrix: QuantizedMatrix) -> Multiply | None:
    """8-bit integers with a scale for each output, and bfloat16 inputs."""
    codes = matrix.codes
    if not isinstance(codes, ByteCodes) or codes.is_fp8 or matrix.scales.shape[1] > 1:
        return None
    numbers, scales = codes.tensor.contiguous(), matrix.scales[:, 0].bfloat16()
    operator = torch.ops.aten._weight_int8pack_mm.default
    return lambda x: operator(x.contiguous(), numbers, scales)


def _packed_int4(matrix: QuantizedMatrix) -> Multiply | None:
    """4-bit integers in consecutive groups that the operator takes, and bfloat16 inputs."""
    if matrix.codes.bits != 4:
        return None
    num_inputs, groups = matrix.num_inputs, matrix.groups.of_inputs(matrix.num_inputs, torch.device("cpu"))
    size = _int4_group(groups, num_inputs)
    if size is None:
        return None
    of_group = groups[::size] if matrix.scales.shape[1] > 1 else torch.zeros(num_inputs // size, dtype=torch.int64)
    scales = matrix.scales.index_select(1, of_group)
    zeros = matrix.zero if matrix.zeros is None else matrix.zeros.index_select(1, of_group)
    padding = -matrix.num_outputs % _INT4_OUTPUTS
    numbers = F.pad(matrix.codes.numbers(0, matrix.num_outputs).int(), (0, 0, 0, padding))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    # The operator computes (code - 8) * scale + zero.
    parameters = F.pad(torch.stack((scales, (8 - zeros) * scales), -1), (0, 0, 0, 0, 0, padding))
    parameters = parameters.transpose(0, 1).bfloat16().contiguous()
    operator, num_outputs = torch.ops.aten._weight_int4pack_mm_for_cpu.default, matrix.num_outputs

    def multiply(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = operator(x.contiguous(), packed, size, parameters)
        return product if not padding else product[:, :num_outputs].contiguous()

    return multiply


def _int4_group(groups: torch.Tensor, num_inputs: int) -> int | None:
    """The largest size that the operator takes and that no group is cut by."""
    ends = (groups.diff().nonzero().flatten() + 1).tolist()
    common = math.gcd(num_inputs, *ends)
    return next((size for size in _INT4_GROUPS if common % size == 0), None)
