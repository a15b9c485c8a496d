"""A quantized weight as the kernels read it: its codes where they lie, and their scales. Imports no kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcore.kernels.skinny_configs import choose_packed
from ringcore.kernels.skinny_tiles import Config

__all__ = [
    "BYTES_FP8",
    "BYTES_INT8",
    "BYTES_UINT8",
    "COLUMNS",
    "DENSE",
    "NIBBLES",
    "NIBBLES_E2M1",
    "PackedWeight",
]

DENSE, BYTES_FP8, BYTES_INT8, BYTES_UINT8, NIBBLES, COLUMNS, NIBBLES_E2M1 = range(7)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Stands where the launches of a skinny linear take a weight [num_outputs, num_inputs].

    codes: uint8. row_bytes: from output to output; of COLUMNS from input to input. word_bytes: from word to word of 4
    bytes along the inputs. columns: [num_outputs] int32, of COLUMNS the nibble of each output in a row. index:
    [num_inputs] int32, the group of each input, where they are not consecutive.
    """

    codes: torch.Tensor
    scales: torch.Tensor  # [num_outputs, groups] of any strides: float32, or uint8, the exponents of powers of 2 + 127
    shape: tuple[int, int]
    dtype: torch.dtype  # of the inputs and the product
    form: int
    row_bytes: int
    word_bytes: int = 4
    group_size: int = 1
    group_offset: int = 0  # of the first input in its group
    zero: int = 0
    zeros: torch.Tensor | None = None  # [num_outputs, groups] int16, of any strides
    columns: torch.Tensor | None = None
    index: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        return self.scales.device

    def choose(self, num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False) -> Config | None:
        """As `skinny_configs.choose`. Where neighbours in memory are of other outputs, a tile has many outputs."""
        along_inputs = self.form != COLUMNS and self.word_bytes == 4
        return choose_packed(num_outputs, num_inputs, num_rows, is_gated=is_gated, along_inputs=along_inputs)
