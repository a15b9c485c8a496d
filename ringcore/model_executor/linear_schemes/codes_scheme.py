"""FP8 and INT8 matrices, a byte a number, with scales of the matrix, of outputs, of groups or of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import CodesFormat
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.block_arrangements import (
    ForDevice,
    RowBlocks,
    are_in_blocks,
    has_whole_blocks,
)
from ringcore.model_executor.linear_schemes.codes import ByteCodes
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import (
    Groups,
    QuantizedMatrix,
    groups_of,
    matrices_of_outputs,
    places_of_outputs,
)
from ringcore.model_executor.linear_schemes.quantized_product import quantized_product
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding
from ringcore.model_executor.linear_schemes.scaled_blocks import MOST_INTEGERS
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived, Weight

__all__ = ["CodesScheme"]


@dataclass(frozen=True, slots=True)
class CodesScheme(LinearScheme):
    """matrix: of a matrix whose inputs have a scale of its own, which share no product; otherwise None."""

    format: CodesFormat
    matrix: str | None = None

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        return quantized_product(
            self.quantized_matrix(shard, tensors), shard, bias, updatable, self.rounding(shard, tensors)
        )

    def quantized_matrix(self, shard: LinearShard, tensors: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
        """Of the bound tensors."""
        derived, stored = Derived(), tensors[self.format.scale_name]
        blocks = self._blocks(shard) if are_in_blocks(stored.device) else None
        has_blocks = ops.has_kernels(stored.device) and stored.dtype == torch.float32 and self._has_whole_blocks(shard)
        return QuantizedMatrix(
            ByteCodes(tensors["weight"]) if blocks is None else blocks.codes(tensors["weight"]),
            stored if has_blocks else self._scales(shard, stored, derived),
            self._groups(shard),
            scale_run=self.format.block[0] if has_blocks else 1,
            derived=derived,
        )

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        weights = LinearScheme.weights(self, shard)
        arrangement = ForDevice(None, self._blocks(shard))
        return weights | {"weight": replace(weights["weight"], arrangement=arrangement)}

    def rounding(self, shard: LinearShard, tensors: Mapping[str, torch.Tensor]) -> InputRounding | None:
        """Of the inputs, before the product."""
        if self.format.inputs is None:
            return None
        return InputRounding.of(self.format.inputs, shard, tensors.get("input_scale"))

    def _groups(self, shard: LinearShard) -> Groups:
        return groups_of(shard, self.format.block[1] if self.format.scale in ("group", "block") else None)

    def _blocks(self, shard: LinearShard) -> RowBlocks | None:
        num_inputs = shard.inputs.length
        if not has_whole_blocks(num_inputs, self._groups(shard)) or self._multiplies_bytes(shard):
            return None
        return RowBlocks(8, num_inputs, self.format.number)

    def _multiplies_bytes(self, shard: LinearShard) -> bool:
        """Whether a CPU multiplies INT8 rows, rounded before the product, by the bytes as the checkpoint has them."""
        inputs = self.format.inputs
        if self.format.number != "int8" or self.format.scale not in ("tensor", "channel"):
            return False
        if inputs is None or inputs.number != "int8" or inputs.scale == "group":
            return False
        return inputs.scale != "token" or shard.max_over_ranks is not None or shard.inputs.length > MOST_INTEGERS

    def _has_whole_blocks(self, shard: LinearShard) -> bool:
        """Of 128 x 128, in the order of the outputs, which may be in another order within a block (rotary halves)."""
        if self.format.scale != "block" or self.format.block != (128, 128):
            return False
        blocks = places_of_outputs(shard, 128) // 128
        return shard.inputs.start % 128 == 0 and torch.equal(blocks, torch.arange(len(blocks)) // 128)

    def _scales(self, shard: LinearShard, stored: torch.Tensor, derived: Derived) -> torch.Tensor:
        """[num_outputs, groups]."""
        per_entry = self.format.block[0]
        match self.format.scale:
            case "channel" | "group":
                return stored
            case "tensor":
                entries, stored = matrices_of_outputs(shard), stored.unsqueeze(1)
            case "block":
                entries = places_of_outputs(shard, per_entry) // per_entry
        entries = entries.to(stored.device)
        return derived.make(lambda: stored.index_select(0, entries))
