"""One rank's share of a linear layer, and how the tensors of its matrices are sliced for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

import torch

from ringcore.checkpoint.matrix_tensors import AllInputs, Axis, Fixed, Inputs, MatrixTensor, Outputs
from ringcore.errors import ModelLoadError
from ringcore.model_executor.weight import CHECKPOINT_DTYPES, Uniform, Weight, WeightPart

__all__ = ["InputSlice", "LinearShard", "Maxima", "OutputSlice"]


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """The outputs of one checkpoint matrix that one rank computes: rows `start` to `start + length` of its weight.

    order: see `WeightPart`.
    """

    checkpoint_name: str  # of the matrix: without ".weight" or ".bias"
    num_outputs: int  # of the whole matrix
    start: int
    length: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class InputSlice:
    """The inputs `start` to `start + length` of `num_inputs`."""

    num_inputs: int
    start: int
    length: int

    @classmethod
    def whole(cls, num_inputs: int) -> InputSlice:
        return cls(num_inputs, 0, num_inputs)


Maxima = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinearShard:
    """What one rank multiplies by: slices of one or several matrices of the same inputs, concatenated by outputs.

    A layer is split by its outputs or by its inputs: where `inputs` is not whole, the matrices have all outputs.
    """

    name: str  # of the layer in the model
    outputs: tuple[OutputSlice, ...]
    inputs: InputSlice
    dtype: torch.dtype  # of the inputs and the product
    has_bias: bool = False
    num_padded_outputs: int = 0  # of zeros after the slices (vocabulary padding)
    prefers_float32: bool = False  # the product, where that costs nothing
    max_over_ranks: Maxima | None = None  # where the inputs are split: of [n, 1], the largest of all ranks

    def __post_init__(self) -> None:
        (_, *others), inputs = self.outputs, self.inputs
        are_whole = all(outputs.length == outputs.num_outputs for outputs in self.outputs)
        assert inputs.length == inputs.num_inputs or are_whole, self
        assert not (self.num_padded_outputs and others), self

    def of_outputs(self, index: int, outputs: tuple[OutputSlice, ...]) -> LinearShard:
        """Run `index` of the outputs as a shard of its own."""
        assert not self.num_padded_outputs, self
        return replace(self, name=f"{self.name}.{index}", outputs=outputs)

    def weight(self, tensor: MatrixTensor) -> Weight:
        """This rank's `tensor` of all matrices: sliced as the layer is, and concatenated along the outputs. A tensor
        without the dimension along which the layer is split is whole on every rank, and concatenated along its first.

        Raises `ModelLoadError` where the layer is split within an entry.
        """
        dim = self._split_dim(tensor)
        # Of several matrices whose inputs are split, the slices are rows of the final tensor, one after the other.
        are_rows = dim > 0 and isinstance(tensor.axes[dim], Inputs) and len(self.outputs) > 1
        parts: list[WeightPart] = []
        offset = 0
        for outputs in self.outputs:
            shape = tensor.shape(outputs.num_outputs, self.inputs.num_inputs)
            name = f"{outputs.checkpoint_name}.{tensor.suffix}"
            start, length, order = _entries(name, tensor.axes[dim], shape[dim], outputs, self.inputs)
            if are_rows:
                parts.append(WeightPart(name, shape, dim, start, length, order=order, row=offset))
            else:
                parts.append(WeightPart(name, shape, dim, start, length, offset, order))
            offset += shape[0] if are_rows else length
        final = [*shape]
        final[0 if are_rows else dim] = offset + _num_padded(tensor.axes[dim], self.num_padded_outputs)
        if are_rows:
            final[dim] = length
        dtype = self.dtype if tensor.dtype is None else CHECKPOINT_DTYPES[tensor.dtype]
        init = Uniform.of_fan_in(self.inputs.num_inputs) if tensor.dummy is None else Uniform(*tensor.dummy)
        return Weight(f"{self.name}.{tensor.suffix}", tuple(final), dtype, tuple(parts), init)

    def _split_dim(self, tensor: MatrixTensor) -> int:
        """The dimension of a checkpoint's tensor along which its slices are taken and concatenated."""
        split = Outputs if self.inputs.length == self.inputs.num_inputs else Inputs
        return next((dim for dim, axis in enumerate(tensor.axes) if isinstance(axis, split)), 0)


def _entries(
    name: str, axis: Axis, size: int, outputs: OutputSlice, inputs: InputSlice
) -> tuple[int, int, tuple[int, ...] | None]:
    """(start, length, order) of a rank's entries along `axis` of a checkpoint's tensor, which has `size` of them.

    order: None also where several outputs share an entry: an order among them is left to the scheme.
    """
    match axis:
        case Outputs(per_entry):
            order = outputs.order if per_entry == 1 else None
            return *_range(name, outputs.start, outputs.length, outputs.num_outputs, axis), order
        case Inputs():
            return *_range(name, inputs.start, inputs.length, inputs.num_inputs, axis), None
        case AllInputs() | Fixed():
            return 0, size, None
        case _:
            assert_never(axis)


def _range(name: str, start: int, length: int, total: int, axis: Outputs | Inputs) -> tuple[int, int]:
    """(first entry, number of entries) of `start` to `start + length`; the last entry of all may be incomplete."""
    end, per_entry = start + length, axis.per_entry
    if not axis.is_shared and (start % per_entry or (end % per_entry and end != total)):
        raise ModelLoadError(
            f"tensor {name!r}: a rank's share, {start} to {end} of {total}, is not of whole groups of {per_entry}; "
            "lower tensor_parallel_size",
            tensor=name,
        )
    return start // per_entry, -(-end // per_entry) - start // per_entry


def _num_padded(axis: Axis, num_outputs: int) -> int:
    """The entries of `num_outputs` outputs of padding."""
    return -(-num_outputs // axis.per_entry) if isinstance(axis, Outputs) else 0
