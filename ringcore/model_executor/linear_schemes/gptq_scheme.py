"""GPTQ: 4- and 8-bit integers packed along the inputs, inputs first; zeros along the outputs, stored less one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import GptqFormat
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.arrangements import Transposed, run_of
from ringcore.model_executor.linear_schemes.block_arrangements import (
    ColumnBlocks,
    ForDevice,
    are_in_blocks,
    has_whole_blocks,
)
from ringcore.model_executor.linear_schemes.codes import Codes, QuadCodes, WordCodes, unpacked
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

__all__ = ["GptqScheme"]


@dataclass(frozen=True, slots=True)
class GptqScheme(LinearScheme):
    """matrix: of a matrix in act-order, whose groups are its own, so that it shares no product; otherwise None."""

    format: GptqFormat
    matrix: str | None = None

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        return quantized_product(self.quantized_matrix(shard, tensors), shard, bias, updatable)

    def quantized_matrix(self, shard: LinearShard, tensors: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
        """Of the bound tensors."""
        bits, derived, stored = self.format.bits, Derived(), tensors["qzeros"]
        places = places_of_outputs(shard, 32 // bits).to(stored.device)
        order = tensors["g_idx"] if self.format.has_order else None

        def zeros() -> torch.Tensor:
            return (unpacked(stored, bits).index_select(1, places).t() + 1).to(torch.int16)

        scales, groups = tensors["scales"].t(), groups_of(shard, self.format.group, order)
        words, num_inputs, arrangement = tensors["qweight"].t(), shard.inputs.length, self._arrangement(shard)
        has_kernels = ops.has_kernels(stored.device)
        words = arrangement.rows(tensors["qweight"]) if has_kernels else words
        if has_kernels and bits == 4:
            quads, scales = QuadCodes(words, arrangement.run, num_inputs), with_zero_bits(scales, zeros, derived)
            return QuantizedMatrix(quads, scales, groups, has_zero_bits=True, derived=derived)
        blocks = self._blocks(shard) if are_in_blocks(stored.device) else None
        codes: Codes = WordCodes(words, bits, num_inputs) if blocks is None else blocks.codes(tensors["qweight"])
        return QuantizedMatrix(codes, scales, groups, zeros=derived.make(zeros), least_zero=1, derived=derived)

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        weights = LinearScheme.weights(self, shard)
        arrangement = ForDevice(self._arrangement(shard), self._blocks(shard))
        return weights | {"qweight": replace(weights["qweight"], arrangement=arrangement)}

    def _arrangement(self, shard: LinearShard) -> Transposed:
        num_inputs, groups = shard.inputs.length, groups_of(shard, self.format.group)
        num_outputs = sum(outputs.length for outputs in shard.outputs) + shard.num_padded_outputs
        return Transposed(self.format.bits, num_inputs, num_outputs, run_of(num_inputs, groups.size, groups.offset))

    def _blocks(self, shard: LinearShard) -> ColumnBlocks | None:
        is_whole = has_whole_blocks(shard.inputs.length, groups_of(shard, self.format.group))
        return ColumnBlocks(self._arrangement(shard)) if is_whole and not self.format.has_order else None
