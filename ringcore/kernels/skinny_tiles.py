"""The tiles of the kernels of a skinny linear."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Config", "DotConfig", "FmaConfig", "PackedFmaConfig"]


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


Config = FmaConfig | PackedFmaConfig | DotConfig
