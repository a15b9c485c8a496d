"""The tiles of the kernels of a skinny linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Config", "DotConfig", "FmaConfig", "Int8GemvConfig", "PackedFmaConfig", "TmaConfig", "padded_rows"]


@dataclass(frozen=True, slots=True)
class FmaConfig:
    """Of `fma_kernel`, for up to 4 rows."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    trigger_late: bool = False  # issues its weight loads before the next kernel may start


@dataclass(frozen=True, slots=True)
class PackedFmaConfig:
    """Of `packed_fma_kernel`, for one or two rows."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    num_programs: int  # at most


@dataclass(frozen=True, slots=True)
class DotConfig:
    """Of `dot_kernel`."""

    block_weights: int
    block_inputs: int
    num_warps: int
    num_stages: int
    splits: int
    prefetched_inputs: int = 512  # inputs of each weight row that are prefetched to L2 before the wait
    block_rows: int = 64  # rows of one program at most
    least_rows: int = 16  # and at least, of which some may be padding
    segments: int = 1  # of the inputs, which one program sums as so many splits would; without splits

    def __post_init__(self) -> None:
        assert 1 in (self.splits, self.segments), self


@dataclass(frozen=True, slots=True)
class TmaConfig:
    """Of `tma_kernel`, for 16-bit weights on Hopper and up to 256 rows."""

    block_weights: int  # rows of the weight per tile, 64 or more; gated: of gate and up
    block_inputs: int  # 64 or 128: times splits, it divides the inputs
    num_stages: int
    splits: int = 1
    programs_per_sm: int = 1
    num_warps: int = 4
    is_even: bool = False  # a program has an equal range of the blocks of all tiles, and no whole tiles or splits


@dataclass(frozen=True, slots=True)
class Int8GemvConfig:
    """Of `int8_gemv`, for one row and 4-bit weights on Hopper."""

    num_warps: ClassVar[int] = 9

    num_stages: int = 8  # of 1,024 inputs of 16 rows of the weight
    window: int = 6  # stages that are on their way at a time
    early_window: int = 2  # and before the row is there

    def shared_bytes(self, num_inputs: int, max_tiles: int) -> int:
        """Of a program, which computes so many tiles at most: the ring, three digits of the row, factors of groups,
        sums of warps, barriers."""
        stages_of_tile = -(-num_inputs // 1024)
        row = 3 * (1024 * stages_of_tile + 64) + 64 + 128 * stages_of_tile
        return self.num_stages * (8192 + 512 + 16) + row + 512 * max_tiles + 40


Config = FmaConfig | PackedFmaConfig | DotConfig | TmaConfig | Int8GemvConfig


def padded_rows(num_rows: int) -> int:
    """The N side of a product by a `TmaConfig`."""
    return max(8, 1 << (num_rows - 1).bit_length())
