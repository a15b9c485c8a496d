"""The product of quantized weights that are expanded, some outputs at a time: where there are no kernels for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.attention.context import TokenContext
from ringcore.model_executor.linear_schemes.codes import ByteCodes, HalvesCodes
from ringcore.model_executor.linear_schemes.cpu_packing import Multiply
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.weight import Derived

__all__ = ["ExpandableMatrix", "ExpandingProduct", "sorted_by_group"]

_BLOCK = 1 << 18  # numbers that are expanded at a time: 1 MiB, which stays in a core's cache


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


def sorted_by_group(
    matrix: QuantizedMatrix, bias: torch.Tensor | None
) -> tuple[QuantizedMatrix, torch.Tensor | None, torch.Tensor | None]:
    """The arguments of `ExpandingProduct`: the matrix with its inputs sorted by group, and codes that expand fast; the
    bias; the order of the inputs, if it is not their own."""
    groups, order, size = matrix.groups, None, matrix.num_inputs
    if groups.index is not None:
        order = groups.index.argsort(stable=True)
        of_inputs = groups.index[order]
        groups = replace(groups, index=of_inputs)
        if torch.equal(of_inputs, torch.arange(size) // groups.size):
            groups = Groups(groups.size)
    codes = matrix.codes if isinstance(matrix.codes, ByteCodes) else HalvesCodes.of(matrix.codes, order)
    zeros = None if matrix.zeros is None else matrix.zeros.float().contiguous()
    return replace(matrix, codes=codes, groups=groups, scales=matrix.scales.contiguous(), zeros=zeros), bias, order
