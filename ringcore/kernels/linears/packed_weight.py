"""A quantized weight as the kernels read it: its codes where they lie, and their scales. Imports no kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ringcore.kernels.linears.skinny_configs import choose_packed
from ringcore.kernels.linears.skinny_tiles import Config, DotConfig
from ringcore.kernels.linears.skinny_times import BYTE_NUMBERS, DENSE_NUMBERS, E2M1_NUMBERS, NIBBLE_NUMBERS, Numbers

__all__ = [
    "BLOCK",
    "BYTES_FP8",
    "BYTES_INT8",
    "BYTES_UINT8",
    "BYTE_CHUNK",
    "DENSE",
    "E2M1_BITS",
    "MAX_E2M1_EXPONENT",
    "NIBBLES",
    "NIBBLES_E2M1",
    "NIBBLE_CHUNK",
    "TILE_OUTPUTS",
    "TILE_WORDS",
    "Fp8Blocks",
    "PackedWeight",
    "stored_as",
]

BYTE_CHUNK, NIBBLE_CHUNK = 16, 32  # inputs of 16 bytes of codes
TILE_OUTPUTS, TILE_WORDS = 64, 16  # of a tile of nibbles
# Where the bits of four e2m1 numbers lie in a word of 16: of each its sign, two of exponent, mantissa.
E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (10, 14, 13, 11))
MAX_E2M1_EXPONENT = 191  # of a scale, biased: 2^64, the largest of which the product with 2^63 is a bfloat16
BLOCK = 128  # outputs, and inputs, that share a scale
DENSE, BYTES_FP8, BYTES_INT8, BYTES_UINT8, NIBBLES, NIBBLES_E2M1 = range(6)


class Fp8Blocks(NamedTuple):
    """A weight of whole blocks, each with a scale; both tensors are contiguous."""

    codes: torch.Tensor  # [num_outputs, num_inputs] uint8, of float8_e4m3fn
    scales: torch.Tensor  # [num_outputs / BLOCK, num_inputs / BLOCK] float32
    dtype: torch.dtype  # of the inputs and the product


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Stands where the launches of a skinny linear take a weight [num_outputs, num_inputs].

    codes: uint8, or int16 of nibbles (e2m1: `E2M1_BITS`), of an output along the inputs. row_stride: in entries, from
    output to output.
    index: [num_inputs] int32, the group of each input, where they are not consecutive. run, is_tiled: of nibbles, see
    `weight_tiles`. has_zero_bits: the five lowest bits of a scale are the zero, of which there is no other tensor.
    scale_run: outputs that share a row of the scales, from each multiple of it on; without zeros where it is not 1.
    """

    codes: torch.Tensor
    scales: torch.Tensor  # [num_outputs / scale_run, groups] of any strides: float32, or uint8: 2^(n - 127)
    shape: tuple[int, int]
    dtype: torch.dtype  # of the inputs and the product
    form: int
    row_stride: int
    group_size: int = 1
    group_offset: int = 0  # of the first input in its group
    zero: int = 0
    zeros: torch.Tensor | None = None  # [num_outputs, groups] int16, of any strides
    index: torch.Tensor | None = None
    run: int = 1
    is_tiled: bool = False
    has_zero_bits: bool = False
    scale_run: int = 1

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        return self.scales.device

    @property
    def numbers(self) -> Numbers:
        return {NIBBLES: NIBBLE_NUMBERS, NIBBLES_E2M1: E2M1_NUMBERS}.get(self.form, BYTE_NUMBERS)

    @property
    def storage(self) -> str:
        """On what tiles depend beside its shape, in words."""
        names = {BYTES_FP8: "fp8", BYTES_INT8: "int8", BYTES_UINT8: "uint8", NIBBLES: "int4", NIBBLES_E2M1: "e2m1"}
        groups = "" if self.scales.shape[1] == 1 else f" in groups of {self.group_size}"
        zeros = " with zeros" if self.has_zeros else ""
        order = "" if self.index is None else " in any order"
        return f"{names[self.form]}{groups}{zeros}{order} for {_name(self.dtype)}"

    @property
    def has_zeros(self) -> bool:
        """Whether each group has its own zero; else it is `zero`."""
        return self.zeros is not None or self.has_zero_bits

    @property
    def has_chunks(self) -> bool:
        """Whether `packed_fma_kernel` multiplies it: words of 32 bits at int32 places, each chunk in one group."""
        is_nibbles = self.form == NIBBLES
        chunk = NIBBLE_CHUNK if is_nibbles else BYTE_CHUNK
        row_bytes = self.row_stride * self.codes.element_size()
        are_words = self.shape[1] % (8 if is_nibbles else 4) == 0 and row_bytes % 4 == 0
        in_groups = self.scales.shape[1] == 1 or (self.group_size % chunk == 0 and self.group_offset % chunk == 0)
        has_places = self.codes.data_ptr() % 4 == 0 and self.codes.nbytes < 4 << 31
        return self.form != NIBBLES_E2M1 and self.index is None and are_words and has_places and in_groups

    @property
    def fp8_blocks(self) -> Fp8Blocks | None:
        """None: it is stored otherwise."""
        in_blocks = self.form == BYTES_FP8 and self.group_size == self.scale_run == BLOCK and self.group_offset == 0
        of_blocks = tuple(size // BLOCK for size in self.shape)
        are_whole = all(size % BLOCK == 0 for size in self.shape) and tuple(self.scales.shape) == of_blocks
        are_plain = self.index is None and not self.has_zeros and self.scales.dtype == torch.float32
        if not in_blocks or not are_whole or not are_plain:
            return None
        are_contiguous = self.codes.is_contiguous() and self.scales.is_contiguous()
        return Fp8Blocks(self.codes, self.scales, self.dtype) if are_contiguous else None

    def shared_scale_bytes(self, num_outputs: int) -> int:
        """Of the row of scales that so many outputs share, from a multiple on; 0 where they have several, or where a
        bulk copy, of aligned 16 bytes, does not take it."""
        scales = self.scales
        row_bytes = scales.shape[1] * scales.element_size()
        is_aligned = scales.is_contiguous() and scales.data_ptr() % 16 == 0 and row_bytes % 16 == 0
        return row_bytes if is_aligned and self.scale_run % num_outputs == 0 else 0

    def has_whole_runs(self, block_inputs: int) -> bool:
        """Whether a block of so many inputs is of whole words, each with its four numbers."""
        return block_inputs % (4 * self.run) == 0

    def as_words(self) -> PackedWeight:
        """Of words of 32 bits, where it `has_chunks`."""
        each = 4 // self.codes.element_size()
        return replace(self, codes=self.codes.view(torch.int32), row_stride=self.row_stride // each)

    def choose(self, num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False) -> Config | None:
        """As `skinny_configs.choose`."""
        by_fma = num_rows == 1 and self.has_chunks
        options = {"is_gated": is_gated, "by_fma": by_fma, "has_zeros": self.has_zeros, "run": self.run}
        config = choose_packed(num_outputs, num_inputs, num_rows, self.numbers, **options)
        return self.narrowed(config) if isinstance(config, DotConfig) else config

    def narrowed(self, tile: DotConfig) -> DotConfig:
        """A smaller tile where x is float32, which takes twice the shared memory."""
        if self.dtype != torch.float32:
            return tile
        return replace(tile, block_weights=64, block_inputs=max(64, 4 * self.run), num_warps=4, num_stages=2)


def stored_as(weight: torch.Tensor | PackedWeight) -> tuple[str, str, Numbers]:
    """(the kind of the kernels that multiply it, the weight in words, how its numbers are stored): on what tiles depend
    beside its shape."""
    if isinstance(weight, PackedWeight):
        return "packed", weight.storage, weight.numbers
    return "dense", _name(weight.dtype), DENSE_NUMBERS


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
