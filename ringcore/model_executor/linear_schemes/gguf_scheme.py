"""Matrices that stay in the blocks of their GGUF file: multiplied by C kernels, or expanded for each product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import GgufFormat
from ringcore.model_executor.linear_schemes.block_kernels import (
    BlockLayout,
    BlocksArrangement,
    KernelMatrix,
    block_kernels,
)
from ringcore.model_executor.linear_schemes.block_product import BlockProduct
from ringcore.model_executor.linear_schemes.dense import Dense, dense_product
from ringcore.model_executor.linear_schemes.expanding_product import ExpandingProduct
from ringcore.model_executor.linear_schemes.gguf_blocks import GgufMatrix, round_by_block
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived, Weight

__all__ = ["GgufScheme", "RowsOfBlocks", "in_blocks", "rows_of_blocks"]


class RowsOfBlocks(Protocol):
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """index: [n] int64 -> the numbers of these rows: [n, num_inputs] float32."""


def rows_of_blocks(table: torch.Tensor, form: GgufFormat) -> RowsOfBlocks:
    """table: [num_rows, bytes of a row] uint8, as `GgufScheme` declares it, loaded."""
    kernels = block_kernels() if table.device.type == "cpu" else None
    return GgufMatrix(table, form) if kernels is None else KernelMatrix(kernels, table, BlockLayout.of_file(form))


def in_blocks(dense: Weight, form: GgufFormat) -> Weight:
    """The rows of a weight as the file has them. dense: of whole blocks, [..., num_inputs]."""
    *outer, num_inputs = dense.shape
    parts = tuple(replace(part, blocks=form) for part in dense.parts)
    shape = *outer, form.row_bytes(num_inputs)
    return replace(dense, shape=shape, dtype=torch.uint8, parts=parts, arrangement=BlocksArrangement(form))


@dataclass(frozen=True, slots=True)
class GgufScheme(LinearScheme):
    """A rank's share of the inputs that is not of whole blocks is expanded when it is loaded."""

    format: GgufFormat

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        dense = Dense().weights(shard)
        if not self._is_whole(shard):
            return dense
        return {suffix: in_blocks(weight, self.format) for suffix, weight in dense.items()}

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        rows = tensors["weight"]
        if not self._is_whole(shard):
            return dense_product(rows, bias, updatable, shard.prefers_float32)
        kernels = block_kernels() if rows.device.type == "cpu" else None
        if kernels is not None:
            derived = Derived()
            floats = None if bias is None else derived.make(bias.float)
            layout = BlockLayout.of_file(self.format, shard.dtype)
            return BlockProduct(KernelMatrix(kernels, rows, layout, floats), shard.dtype, derived)
        rounding = round_by_block if self.format.rounds_inputs else None
        return ExpandingProduct(GgufMatrix(rows, self.format), bias, rounding=rounding)

    def _is_whole(self, shard: LinearShard) -> bool:
        numbers, _ = self.format.block
        return shard.inputs.start % numbers == 0 and shard.inputs.length % numbers == 0
