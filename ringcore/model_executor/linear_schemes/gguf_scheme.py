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
from ringcore.model_executor.linear_schemes.dense import Dense
from ringcore.model_executor.linear_schemes.expanding_product import ExpandingProduct
from ringcore.model_executor.linear_schemes.gguf_blocks import GgufMatrix, round_by_block
from ringcore.model_executor.linear_schemes.padded_product import padded_product
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard
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
    """A rank's share of the inputs that cuts a block has the whole of it."""

    format: GgufFormat

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        dense = Dense().weights(replace(shard, inputs=self._whole_blocks(shard.inputs)))
        return {suffix: in_blocks(weight, self.format) for suffix, weight in dense.items()}

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        rows, own, held = tensors["weight"], shard.inputs, self._whole_blocks(shard.inputs)
        padding = own.start - held.start, held.start + held.length - own.start - own.length
        return padded_product(self._product(rows, shard.dtype, bias), padding)

    def _product(self, rows: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None) -> Product:
        kernels = block_kernels() if rows.device.type == "cpu" else None
        if kernels is not None:
            derived = Derived()
            floats = None if bias is None else derived.make(bias.float)
            layout = BlockLayout.of_file(self.format, dtype)
            return BlockProduct(KernelMatrix(kernels, rows, layout, floats), dtype, derived)
        rounding = round_by_block if self.format.rounds_inputs else None
        return ExpandingProduct(GgufMatrix(rows, self.format), bias, rounding=rounding)

    def _whole_blocks(self, inputs: InputSlice) -> InputSlice:
        numbers, _ = self.format.block
        start, end = inputs.start // numbers * numbers, -(-(inputs.start + inputs.length) // numbers) * numbers
        return replace(inputs, start=start, length=end - start)
