"""The codes of a quantized matrix as they lie in memory, and their expansion: the reference of each packing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from ringcore.kernels.linears.packed_weight import E2M1_BITS, TILE_OUTPUTS, TILE_WORDS

__all__ = [
    "E2M1_MAGNITUDES",
    "AwqCodes",
    "ByteCodes",
    "CodePlaces",
    "Codes",
    "E2m1Codes",
    "E2m1QuadCodes",
    "HalvesCodes",
    "QuadCodes",
    "WordCodes",
    "awq_columns",
    "fp8_numbers",
    "from_e2m1",
    "from_quads",
    "from_tiles",
    "to_e2m1",
    "to_quads",
    "to_tiles",
    "unpacked",
]

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class CodePlaces(NamedTuple):
    """The integer of output o and input i is number out_at[o] + in_at[i], of the codes' bits, from the first byte of
    `storage` on, the lowest bits first. out_at: [num_outputs], in_at: [num_inputs] int64."""

    storage: torch.Tensor
    out_at: torch.Tensor
    in_at: torch.Tensor


class Codes(ABC):
    """Of [num_outputs, num_inputs] numbers."""

    shape: tuple[int, int]
    bits: int

    @abstractmethod
    def numbers(self, first: int, end: int) -> torch.Tensor:
        """Of outputs `first` to `end`, all inputs: [n, num_inputs] float32, before zeros and scales."""


class ByteCodes(Codes):
    """A byte a number: [num_outputs, num_inputs] float8_e4m3fn or int8."""

    bits = 8

    def __init__(self, codes: torch.Tensor) -> None:
        self.tensor = codes
        self.shape = (codes.shape[0], codes.shape[1])
        self.is_fp8 = codes.dtype == torch.float8_e4m3fn

    def numbers(self, first: int, end: int) -> torch.Tensor:
        codes = self.tensor[first:end]
        return fp8_numbers(codes) if self.is_fp8 else codes.float()


def fp8_numbers(codes: torch.Tensor) -> torch.Tensor:
    """[...] float8_e4m3fn -> float32, by vectorised operations: torch's own conversion on a CPU is 10 times as slow.

    The bits are those of a float16 with a smaller exponent: sign, a zero, exponent and mantissa. NaN is not kept.
    """
    if codes.device.type != "cpu":
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)  # the sign in bits 7 to 15
    return (bits << 7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(256.0)


class WordCodes(Codes):
    """Numbers of `bits` packed along the inputs from the lowest: words [num_outputs, words] int32, or uint8, of any
    strides."""

    def __init__(self, words: torch.Tensor, bits: int, num_inputs: int) -> None:
        self.words, self.bits = words, bits
        self.shape = (len(words), num_inputs)

    def numbers(self, first: int, end: int) -> torch.Tensor:
        return unpacked(self.words[first:end], self.bits)[:, : self.shape[1]].float()

    def places(self) -> CodePlaces:
        per_word, inputs = 8 * self.words.itemsize // self.bits, torch.arange(self.shape[1])
        in_at = inputs // per_word * per_word * self.words.stride(1) + inputs % per_word
        return CodePlaces(self.words, torch.arange(self.shape[0]) * per_word * self.words.stride(0), in_at)


class E2m1Codes(Codes):
    """4-bit floats, two a byte along the inputs, the lower nibble first: [num_outputs, num_inputs / 2] uint8.

    A sign, two bits of exponent and one of mantissa: OCP, "Microscaling Formats (MX) Specification" 1.0."""

    bits = 4

    def __init__(self, codes: torch.Tensor) -> None:
        self.tensor = codes
        self.shape = (codes.shape[0], 2 * codes.shape[1])
        numbers = torch.tensor([*E2M1_MAGNITUDES, *(-number for number in E2M1_MAGNITUDES)], device=codes.device)
        every_byte = torch.arange(256, device=codes.device)
        # The two numbers of each byte, float32, as one of 8 bytes: looked up twice as fast.
        self._pairs = torch.stack((numbers[every_byte & 15], numbers[every_byte >> 4]), 1).view(torch.int64).view(-1)

    def numbers(self, first: int, end: int) -> torch.Tensor:
        codes = self.tensor[first:end].reshape(-1).int()
        return self._pairs.index_select(0, codes).view(torch.float32).view(-1, self.shape[1])


class HalvesCodes(Codes):
    """As a CPU expands them fastest: of 4 bits a byte has a number of the first half of the inputs in its lower nibble,
    and one of the second half in the other; of 8 bits a byte a number. [num_outputs, bytes] uint8."""

    def __init__(self, packed: torch.Tensor, bits: int, num_inputs: int) -> None:
        self._packed, self.bits = packed, bits
        self.shape = (len(packed), num_inputs)

    @classmethod
    def of(cls, codes: Codes, order: torch.Tensor | None) -> Self:
        """order: of the inputs, where it is not their own."""
        numbers = codes.numbers(0, codes.shape[0]).to(torch.uint8)
        numbers = numbers if order is None else numbers.index_select(1, order)
        if codes.bits == 4:
            first, second = torch.nn.functional.pad(numbers, (0, codes.shape[1] % 2)).chunk(2, 1)
            numbers = first | second << 4
        return cls(numbers, codes.bits, codes.shape[1])

    def numbers(self, first: int, end: int) -> torch.Tensor:
        packed = self._packed[first:end]
        if self.bits == 8:
            return packed.float()
        return torch.cat((packed & 15, packed >> 4), 1)[:, : self.shape[1]].float()


class QuadCodes(Codes):
    """4-bit numbers as kernels expand them (`kernels.weight_tiles`): words [num_outputs, num_inputs / 4] int16."""

    bits = 4

    def __init__(self, words: torch.Tensor, run: int, num_inputs: int) -> None:
        self.words, self.run = words, run
        self.shape = (len(words), num_inputs)

    def numbers(self, first: int, end: int) -> torch.Tensor:
        return from_quads(self.words[first:end], self.run)[:, : self.shape[1]].float()


class E2m1QuadCodes(Codes):
    """e2m1 as kernels expand them: words [num_outputs, num_inputs / 4] int16 of `E2M1_BITS`, perhaps in tiles."""

    bits = 4

    def __init__(self, words: torch.Tensor, run: int, is_tiled: bool) -> None:
        self.words, self.run, self.is_tiled = words, run, is_tiled
        self.shape = (len(words), 4 * words.shape[1])

    def numbers(self, first: int, end: int) -> torch.Tensor:
        begin = first // TILE_OUTPUTS * TILE_OUTPUTS  # of whole tiles
        words = self.words[begin : -(-end // TILE_OUTPUTS) * TILE_OUTPUTS]
        words = from_tiles(words) if self.is_tiled else words
        numbers = from_quads(from_e2m1(words[first - begin : end - begin]), self.run)
        every = torch.tensor([*E2M1_MAGNITUDES, *(-number for number in E2M1_MAGNITUDES)], device=numbers.device)
        return every[numbers.int()]


def to_quads(numbers: torch.Tensor, run: int) -> torch.Tensor:
    """numbers: [n, inputs] uint8 of 4 bits, a multiple of 4 * run of them -> [n, inputs / 4] int16."""
    quads = numbers.view(len(numbers), -1, 4, run)
    low, high = quads[:, :, 0] | quads[:, :, 1] << 4, quads[:, :, 2] | quads[:, :, 3] << 4
    return torch.stack((low, high), -1).flatten(1).view(torch.int16)


def from_quads(words: torch.Tensor, run: int) -> torch.Tensor:
    """The inverse of `to_quads`."""
    two = words.contiguous().view(torch.uint8).view(len(words), -1, run, 2)
    low, high = two[..., 0], two[..., 1]
    return torch.stack((low & 15, low >> 4, high & 15, high >> 4), 2).flatten(1)


def to_e2m1(words: torch.Tensor) -> torch.Tensor:
    """Words of four nibbles, int16 -> those whose bits lie as `E2M1_BITS`."""
    return _moved(words, tuple(range(15, -1, -1)), _E2M1_PLACES)


def from_e2m1(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_e2m1`."""
    return _moved(words, _E2M1_PLACES, tuple(range(15, -1, -1)))


_E2M1_PLACES = tuple(place for number in reversed(E2M1_BITS) for place in number)  # of the bits of nibbles from bit 15


def _moved(words: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> torch.Tensor:
    """Each bit of `words` at its target; those that go as far are moved together."""
    wide, moved = words.int(), torch.zeros_like(words, dtype=torch.int32)
    masks: dict[int, int] = {}
    for source, target in zip(sources, targets, strict=True):
        masks[target - source] = masks.get(target - source, 0) | 1 << source
    for by, mask in masks.items():
        moved |= (wide & mask) << by if by > 0 else (wide & mask) >> -by
    return moved.to(torch.int16)


def to_tiles(words: torch.Tensor) -> torch.Tensor:
    """[n, words], multiples of a tile of `kernels.weight_tiles` -> as many, tile by tile."""
    tiles = words.reshape(len(words) // TILE_OUTPUTS, TILE_OUTPUTS, -1, TILE_WORDS)
    return tiles.transpose(1, 2).reshape(words.shape)


def from_tiles(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_tiles`."""
    tiles = words.reshape(len(words) // TILE_OUTPUTS, -1, TILE_OUTPUTS, TILE_WORDS)
    return tiles.transpose(1, 2).reshape(words.shape)


class AwqCodes(Codes):
    """4-bit numbers packed along the outputs: words [num_inputs, columns / 8] int32.

    columns: [num_outputs] int32, of each output: a word's column times 8, and the nibble in it.
    """

    bits = 4

    def __init__(self, words: torch.Tensor, columns: torch.Tensor) -> None:
        self.words, self.columns = words, columns
        self.shape = (len(columns), len(words))

    def numbers(self, first: int, end: int) -> torch.Tensor:
        columns = self.columns[first:end]
        words = self.words.index_select(1, columns // 8)
        return (words >> columns % 8 * 4).bitwise_and_(15).t().float()

    def places(self) -> CodePlaces:
        assert self.words.stride(1) == 1
        return CodePlaces(self.words, self.columns.long(), torch.arange(self.shape[1]) * 8 * self.words.stride(0))


def awq_columns(outputs: torch.Tensor) -> torch.Tensor:
    """[n] int32: where each of `outputs` of a packed tensor lies: outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight are the
    nibbles of a word, from the lowest."""
    place = outputs % 8
    return (outputs - place + place // 2 + place % 2 * 4).int()


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, words] int32 or uint8 -> [n, numbers] of the same dtype, unsigned, from the lowest bits."""
    shifts = torch.arange(0, 8 * words.itemsize, bits, dtype=words.dtype, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)
