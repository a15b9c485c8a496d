"""One rank's share of quantized matrices: codes, scales, zeros and groups, and their expansion in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ringcore.model_executor.linear_schemes.codes import Codes
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Derived

__all__ = ["Groups", "QuantizedMatrix", "groups_of", "matrices_of_outputs", "places_of_outputs", "with_zero_bits"]

_ZERO_BITS = 31


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each input, whose numbers share a scale.

    size: inputs of a group; offset: of the first input in its group, where a rank's share begins within one. index:
    [num_inputs] int32, the groups themselves, in any order.
    """

    size: int
    offset: int = 0
    index: torch.Tensor | None = None

    def are_whole(self, num_inputs: int) -> bool:
        """Whether they are consecutive, and none is incomplete."""
        return self.index is None and self.offset == 0 and num_inputs % self.size == 0

    def of_inputs(self, num_inputs: int, device: torch.device) -> torch.Tensor:
        """[num_inputs] int64."""
        if self.index is not None:
            return self.index.long()
        return (torch.arange(num_inputs, device=device) + self.offset) // self.size


@dataclass(slots=True)
class QuantizedMatrix:
    """weight = (code - zero) * scale.

    scales: [num_outputs / scale_run, groups] float32, or float8_e8m0fnu, powers of 2; zeros: [num_outputs, groups]
    int16, or `zero` everywhere. Both of any strides. scale_run: consecutive outputs that share a row of the scales.
    has_zero_bits: the zeros are the five lowest bits of their scales' instead. least_zero: no zero is ever less.
    derived: what of these was computed from the tensors of the checkpoint.
    """

    codes: Codes
    scales: torch.Tensor
    groups: Groups
    zero: int = 0
    zeros: torch.Tensor | None = None
    scale_run: int = 1
    has_zero_bits: bool = False
    least_zero: int = 0
    derived: Derived = field(default_factory=Derived)

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1]

    def expanded(self, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Of outputs `first` to `end`: [n, num_inputs] float32."""
        end = self.num_outputs if end is None else end
        scales, zeros = self._scales_of(first, end), None if self.zeros is None else self.zeros[first:end]
        if self.has_zero_bits:
            zeros = self.scales[first:end].view(torch.int32) & _ZERO_BITS
        numbers = self.codes.numbers(first, end)
        if scales.shape[1] > 1 and self.groups.are_whole(self.num_inputs):
            grouped = numbers.view(len(numbers), -1, self.groups.size)
            if zeros is not None or self.zero:
                grouped.sub_(self.zero if zeros is None else zeros.unsqueeze(-1))
            return grouped.mul_(scales.unsqueeze(-1)).flatten(1)
        if scales.shape[1] > 1:
            groups = self.groups.of_inputs(self.num_inputs, scales.device)
            scales = scales.index_select(1, groups)
            zeros = None if zeros is None else zeros.index_select(1, groups)
        if zeros is not None:
            numbers -= zeros
        elif self.zero:
            numbers -= self.zero
        return numbers.mul_(scales)

    def _scales_of(self, first: int, end: int) -> torch.Tensor:
        if self.scale_run == 1:
            return self.scales[first:end].float()
        rows = torch.arange(first, end, device=self.scales.device) // self.scale_run
        return self.scales.index_select(0, rows).float()


def with_zero_bits(scales: torch.Tensor, zeros: Callable[[], torch.Tensor], derived: Derived) -> torch.Tensor:
    """scales: float32, of which the zeros, less than 32 and of its shape, become the lowest bits, in place, now and in
    `derived.refresh`. A scale of 16 bits has none there; any other is changed by 4e-6 of itself at most."""

    def marked() -> torch.Tensor:
        scales.view(torch.int32).bitwise_and_(~_ZERO_BITS).bitwise_or_(zeros())
        return scales

    return derived.make(marked)


def groups_of(shard: LinearShard, size: int | None, index: torch.Tensor | None = None) -> Groups:
    """size: of a group; None: one of all inputs. index: of act-order, as in `Groups`; None: consecutive inputs."""
    inputs = shard.inputs
    if size is None:
        return Groups(inputs.num_inputs)
    return Groups(size, inputs.start % size) if index is None else Groups(size, index=index)


def _rows_of_outputs(shard: LinearShard) -> list[torch.Tensor]:
    """For each slice, the row of the checkpoint's matrix of each output: [length] int64."""
    rows = []
    for outputs in shard.outputs:
        index = torch.arange(outputs.length)
        if outputs.order is not None:
            run = len(outputs.order)
            index = index - index % run + torch.tensor(outputs.order)[index % run]
        rows.append(outputs.start + index)
    return rows


def matrices_of_outputs(shard: LinearShard) -> torch.Tensor:
    """[num_outputs] int64: of which slice each output is; those of padding are of the last."""
    lengths = [outputs.length for outputs in shard.outputs]
    lengths[-1] += shard.num_padded_outputs
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def places_of_outputs(shard: LinearShard, per_entry: int) -> torch.Tensor:
    """[num_outputs] int64: where each output is in this rank's tensor that has an entry for every `per_entry` outputs:
    its entry times per_entry, and its place there."""
    places, start = [], 0
    for outputs, rows in zip(shard.outputs, _rows_of_outputs(shard), strict=True):
        first = outputs.start // per_entry
        places.append((start - first) * per_entry + rows)
        start += -(-(outputs.start + outputs.length) // per_entry) - first
    return torch.cat([*places, start * per_entry + torch.arange(shard.num_padded_outputs)])
