"""How codes lie on a device with kernels: an output's along its inputs, those of 4 bits as the kernels expand them.

A checkpoint's tensor is rearranged in its own memory once it is loaded, and back before an update writes to it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch

from ringcore.kernels.linears.packed_weight import MAX_E2M1_EXPONENT, TILE_OUTPUTS, TILE_WORDS
from ringcore.model_executor.linear_schemes.codes import (
    AwqCodes,
    CodePlaces,
    E2m1QuadCodes,
    WordCodes,
    awq_columns,
    from_e2m1,
    from_quads,
    from_tiles,
    to_e2m1,
    to_quads,
    to_tiles,
    unpacked,
)
from ringcore.model_executor.linear_schemes.quantized import places_of_outputs
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Arrangement

__all__ = [
    "AwqArrangement",
    "ByGroup",
    "ColumnsArrangement",
    "E2m1Blocks",
    "ExponentsByGroup",
    "NibbleRows",
    "Transposed",
    "run_of",
]

_PIECE = 1 << 24  # numbers that are rearranged at a time
_RUNS = (32, 16, 8, 4, 2)


def run_of(num_inputs: int, *groups: int) -> int:
    """The run of a row of 4-bit codes (`kernels.weight_tiles`): the longest, up to 32, of which the inputs, and the
    lengths given besides, are whole spans. 1, the order in the checkpoint, always is."""
    common = math.gcd(num_inputs, *groups)
    return next((run for run in _RUNS if common % (4 * run) == 0), 1)


def _to_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """[n, inputs] uint8 of 4 bits -> two a byte, the lower first."""
    return numbers[:, ::2] | numbers[:, 1::2] << 4


@dataclass(frozen=True, slots=True)
class NibbleRows(Arrangement):
    """Of rows of 4-bit codes in the order of the inputs: [..., bytes] in any dtype, from the first byte on."""

    num_inputs: int
    run: int

    def arrange(self, tensor: torch.Tensor) -> None:
        for codes in self._pieces(tensor):
            codes.copy_(to_quads(unpacked(codes, 4), self.run).view(torch.uint8))

    def restore(self, tensor: torch.Tensor) -> None:
        for codes in self._pieces(tensor):
            codes.copy_(_to_bytes(from_quads(codes, self.run)))

    def _pieces(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.run == 1:  # is the order of the inputs
            return ()
        rows = tensor.view(torch.uint8).flatten(0, -2)[:, : self.num_inputs // 2]
        return torch.split(rows, max(1, _PIECE // self.num_inputs))


class ColumnsArrangement(Arrangement):
    """Of [inputs, outputs] in words: the outputs become rows."""

    bits: int
    num_inputs: int
    num_outputs: int
    run: int

    @abstractmethod
    def numbers(self, words: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Of outputs `first` to `end`: [n, num_inputs] uint8."""

    @abstractmethod
    def places(self, words: torch.Tensor) -> CodePlaces:
        """Of all outputs."""

    @abstractmethod
    def words(self, numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse, of all outputs, in the shape of `like`."""

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of a rearranged tensor: [num_outputs, num_inputs / 4] int16, or of 8 bits [num_outputs,
        num_inputs] uint8."""
        dtype, per_entry = (torch.int16, 4) if self.bits == 4 else (torch.uint8, 1)
        size = self.num_outputs * (self.num_inputs // per_entry)
        return tensor.view(-1).view(dtype)[:size].view(self.num_outputs, -1)

    def arrange(self, tensor: torch.Tensor) -> None:
        words, rows = tensor.clone(), self.rows(tensor)
        step = max(1, _PIECE // self.num_inputs)
        for first in range(0, self.num_outputs, step):
            end = min(first + step, self.num_outputs)
            numbers = self.numbers(words, first, end).contiguous()
            rows[first:end].copy_(to_quads(numbers, self.run) if self.bits == 4 else numbers)

    def restore(self, tensor: torch.Tensor) -> None:
        rows = self.rows(tensor)
        tensor.copy_(self.words(from_quads(rows, self.run) if self.bits == 4 else rows.clone(), tensor))


@dataclass(frozen=True, slots=True)
class Transposed(ColumnsArrangement):
    """GPTQ: [words, num_outputs] int32, of codes along the inputs."""

    bits: int
    num_inputs: int
    num_outputs: int
    run: int

    def numbers(self, words: torch.Tensor, first: int, end: int) -> torch.Tensor:
        columns = words[:, first:end].t().contiguous()
        return unpacked(columns.view(torch.uint8), self.bits)[:, : self.num_inputs]

    def places(self, words: torch.Tensor) -> CodePlaces:
        return WordCodes(words.t(), self.bits, self.num_inputs).places()

    def words(self, numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        numbers = torch.nn.functional.pad(numbers, (0, len(like) * 32 // self.bits - self.num_inputs))
        return (_to_bytes(numbers) if self.bits == 4 else numbers).contiguous().view(torch.int32).t()


@dataclass(frozen=True, slots=True)
class ByGroup(Arrangement):
    """Of scales [..., outputs, groups]: [groups, all outputs], so that a load has those of neighbouring outputs."""

    def scales(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of a rearranged tensor: [outputs, groups]."""
        return tensor.view(tensor.shape[-1], -1).t()

    def arrange(self, tensor: torch.Tensor) -> None:
        self.scales(tensor).copy_(tensor.flatten(0, -2).clone())

    def restore(self, tensor: torch.Tensor) -> None:
        tensor.flatten(0, -2).copy_(self.scales(tensor).clone())


@dataclass(frozen=True, slots=True)
class ExponentsByGroup(ByGroup):
    """Of the exponents of powers of 2, none too large for the kernels."""

    def arrange(self, tensor: torch.Tensor) -> None:
        tensor.clamp_(max=MAX_E2M1_EXPONENT)
        ByGroup.arrange(self, tensor)


@dataclass(frozen=True, slots=True)
class E2m1Blocks(Arrangement):
    """Of MXFP4's blocks [..., outputs, groups, 16] uint8: words, in tiles where outputs and inputs are whole ones."""

    run: int

    def codes(self, tensor: torch.Tensor) -> E2m1QuadCodes:
        """The memory of a rearranged tensor."""
        outputs, groups, size = tensor.shape[-3:]
        is_tiled = outputs % TILE_OUTPUTS == 0 and groups * size % (2 * TILE_WORDS) == 0
        return E2m1QuadCodes(tensor.flatten(0, -3).flatten(1).view(torch.int16), self.run, is_tiled)

    def arrange(self, tensor: torch.Tensor) -> None:
        is_tiled = self.codes(tensor).is_tiled
        for words in self._pieces(tensor):
            moved = to_e2m1(to_quads(unpacked(words.view(torch.uint8), 4), self.run))
            words.copy_(to_tiles(moved) if is_tiled else moved)

    def restore(self, tensor: torch.Tensor) -> None:
        is_tiled = self.codes(tensor).is_tiled
        for words in self._pieces(tensor):
            quads = from_e2m1(from_tiles(words) if is_tiled else words)
            words.copy_(_to_bytes(from_quads(quads, self.run)).view(torch.int16))

    def _pieces(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = self.codes(tensor)
        num_tiles = max(1, _PIECE // (TILE_OUTPUTS * codes.shape[1]))
        return torch.split(codes.words, num_tiles * TILE_OUTPUTS)


@dataclass(frozen=True, slots=True)
class AwqArrangement(ColumnsArrangement):
    """AWQ: [num_inputs, words] int32, of codes along the outputs, interleaved."""

    shard: LinearShard
    run: int
    bits: int = 4

    @property
    def num_inputs(self) -> int:  # type: ignore[override]
        return self.shard.inputs.length

    @property
    def num_outputs(self) -> int:  # type: ignore[override]
        return sum(outputs.length for outputs in self.shard.outputs) + self.shard.num_padded_outputs

    def _columns(self, device: torch.device) -> torch.Tensor:
        return awq_columns(places_of_outputs(self.shard, 8)).to(device)

    def numbers(self, words: torch.Tensor, first: int, end: int) -> torch.Tensor:
        columns = self._columns(words.device)[first:end]
        found = words.view(torch.uint8).index_select(1, columns // 2)
        return (found >> (columns % 2 * 4).to(torch.uint8)).bitwise_and_(15).t()

    def places(self, words: torch.Tensor) -> CodePlaces:
        return AwqCodes(words, self._columns(words.device)).places()

    def words(self, numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        every = numbers.new_zeros(len(like), 8 * like.shape[1])
        every[:, self._columns(like.device).long()] = numbers.t()
        return _to_bytes(every).contiguous().view(torch.int32)
