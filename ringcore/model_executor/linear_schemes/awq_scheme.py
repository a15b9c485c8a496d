"""AWQ: 4-bit integers packed along the outputs, interleaved, inputs first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import AwqFormat
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.arrangements import AwqArrangement, run_of
from ringcore.model_executor.linear_schemes.block_arrangements import (
    ColumnBlocks,
    ForDevice,
    are_in_blocks,
    has_whole_blocks,
)
from ringcore.model_executor.linear_schemes.codes import AwqCodes, Codes, QuadCodes, awq_columns, unpacked
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import (
    QuantizedMatrix,
    groups_of,
    places_of_outputs,
    with_zero_bits,
)
from ringcore.model_executor.linear_schemes.quantized_product import quantized_product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived, Weight

__all__ = ["AwqScheme"]


@dataclass(frozen=True, slots=True)
class AwqScheme(LinearScheme):
    format: AwqFormat

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        return quantized_product(self.quantized_matrix(shard, tensors), shard, bias, updatable)

    def quantized_matrix(self, shard: LinearShard, tensors: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
        """Of the bound tensors."""
        derived, stored, scales = Derived(), tensors["qzeros"], tensors["scales"].t()
        columns = awq_columns(places_of_outputs(shard, 8)).to(stored.device)
        groups = groups_of(shard, self.format.group)

        def zeros() -> torch.Tensor:
            return unpacked(stored, 4).index_select(1, columns).t().to(torch.int16)

        if ops.has_kernels(stored.device):
            arrangement = self._arrangement(shard)
            quads = QuadCodes(arrangement.rows(tensors["qweight"]), arrangement.run, shard.inputs.length)
            scales = with_zero_bits(scales, zeros, derived)
            return QuantizedMatrix(quads, scales, groups, has_zero_bits=True, derived=derived)
        blocks, words = self._blocks(shard) if are_in_blocks(stored.device) else None, tensors["qweight"]
        codes: Codes = AwqCodes(words, columns) if blocks is None else blocks.codes(words)
        return QuantizedMatrix(codes, scales, groups, zeros=derived.make(zeros), derived=derived)

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        weights = LinearScheme.weights(self, shard)
        arrangement = ForDevice(self._arrangement(shard), self._blocks(shard))
        return weights | {"qweight": replace(weights["qweight"], arrangement=arrangement)}

    def _arrangement(self, shard: LinearShard) -> AwqArrangement:
        groups = groups_of(shard, self.format.group)
        return AwqArrangement(shard, run_of(shard.inputs.length, groups.size, groups.offset))

    def _blocks(self, shard: LinearShard) -> ColumnBlocks | None:
        is_whole = has_whole_blocks(shard.inputs.length, groups_of(shard, self.format.group))
        return ColumnBlocks(self._arrangement(shard)) if is_whole else None
