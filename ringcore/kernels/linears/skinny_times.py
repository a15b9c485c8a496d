"""How long `dot_kernel` takes, by a model of bytes, programs, waves and boundaries.

    seconds = (memory^p + multiprocessor^p)^(1/p) + boundary + splits > 1: split + num_splits * partial

memory: all weights at the memory's rate. multiprocessor: the weights of the programs of the busiest multiprocessor, at
the rate at which its loads in flight (the stages but one of each resident program) arrive after the memory's latency.
The sum of powers is a maximum that is rounded off where both are about the same.

The constants are fitted to 24 linears of five published models with 8 rows on an H200 (`python -m benchmarks
gpu_linears` fits others): the tile that the model chooses takes 1.04 times as long as the fastest of all that were
measured, on average (so do linears left out of the fit), and 1.21 times at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcore.kernels.linears.skinny_tiles import DotConfig

__all__ = [
    "BYTE_NUMBERS",
    "DENSE_NUMBERS",
    "E2M1_NUMBERS",
    "FP8_NUMBERS",
    "H200",
    "NIBBLE_NUMBERS",
    "NUM_SMS",
    "DotTimes",
    "Numbers",
    "fastest_dot",
]

NUM_SMS = 132  # multiprocessors of an H100 or H200
_SHARED_BYTES, _MAX_WARPS, _NUM_REGISTERS = 227 << 10, 64, 65536  # of a multiprocessor
_BYTES = 2  # of a number of x
_PREFETCHED_INPUTS, _PREFETCHED_CODES = 512, 2048  # 1 KiB of a row; of 4-bit codes
_INSTRUCTIONS_PER_S = 4 * 1.75e9  # of a warp, on a multiprocessor
_STEP_INSTRUCTIONS = 130  # of a warp in a block of inputs, whatever its size


@dataclass(frozen=True, slots=True)
class Numbers:
    """How weights are stored. instructions: to expand one, of a thread; as the compiler makes them for an H200."""

    bytes: float
    instructions: float = 0.0


DENSE_NUMBERS = Numbers(2.0)
BYTE_NUMBERS = Numbers(1.0, 2.5)
FP8_NUMBERS = Numbers(1.0)  # which are multiplied as they are
NIBBLE_NUMBERS = Numbers(0.5 + 4 / 128, 1.4)  # with a scale of float32 for 128
E2M1_NUMBERS = Numbers(0.5 + 1 / 32, 2.4)


@dataclass(frozen=True, slots=True)
class DotTimes:
    """The constants of the model for one kind of GPU."""

    memory_bytes_per_s: float
    latency_s: float
    boundary_s: float
    split_s: float
    partial_s: float
    power: float

    def seconds(
        self,
        config: DotConfig,
        num_weights: int,
        num_inputs: int,
        num_rows: int,
        numbers: Numbers = DENSE_NUMBERS,
    ) -> float:
        """Of one launch among others in a CUDA graph. Of quantized weights nothing was measured: their bytes are less,
        and the instructions that expand them are a third of what may be the slowest."""
        block_rows = max(16, 1 << (min(num_rows, config.block_rows) - 1).bit_length())
        programs = -(-num_weights // config.block_weights) * config.splits * -(-num_rows // block_rows)
        busiest = -(-programs // NUM_SMS)
        blocks = -(-num_inputs // config.block_inputs)
        block_numbers = config.block_weights * config.block_inputs
        block_bytes = config.block_weights * config.block_inputs * numbers.bytes
        program_bytes = block_bytes * -(-blocks // config.splits)
        in_flight = block_bytes * (config.num_stages - 1) * min(busiest, _resident(config, block_rows, numbers))
        memory_s = num_weights * num_inputs * numbers.bytes / self.memory_bytes_per_s
        multiprocessor_s = busiest * program_bytes / in_flight * self.latency_s
        split_s = self.split_s + config.splits * self.partial_s if config.splits > 1 else 0.0
        expansion_s = 0.0
        if numbers.instructions:
            per_warp = _STEP_INSTRUCTIONS + numbers.instructions * block_numbers / (32 * config.num_warps)
            expansion_s = busiest * -(-blocks // config.splits) * config.num_warps * per_warp / _INSTRUCTIONS_PER_S
        terms = (memory_s, multiprocessor_s, expansion_s)
        read_s: float = sum(term**self.power for term in terms) ** (1 / self.power)
        return read_s + self.boundary_s + split_s


H200 = DotTimes(4.72e12, 0.74e-6, 2.3e-6, 0.93e-6, 0.36e-6, 1.69)

_TILES = (
    DotConfig(64, 256, 4, 3, 1),
    DotConfig(64, 128, 4, 4, 1),
    DotConfig(64, 128, 4, 3, 1),
    DotConfig(128, 128, 8, 4, 1),
    DotConfig(128, 128, 8, 3, 1),
)
# Of e2m1: tiles of 256 inputs took ten times as long.
_E2M1_TILES = (DotConfig(128, 128, 4, 6, 1), DotConfig(128, 128, 4, 3, 1))
_SPLITS = (1, 2, 3, 4, 6, 8)


def fastest_dot(
    num_weights: int,
    num_inputs: int,
    num_rows: int,
    all_splits: Sequence[int] = _SPLITS,
    numbers: Numbers = DENSE_NUMBERS,
) -> DotConfig:
    """By `H200`, of a weight of num_weights rows. Weights are prefetched where all programs run at once: when a
    later wave starts, the kernel before has long ended."""
    candidates = [
        _with_splits(tile, splits, num_weights, numbers)
        for tile in (_E2M1_TILES if numbers == E2M1_NUMBERS else _TILES)
        for splits in all_splits
        if splits == 1 or 2 * splits * tile.block_inputs <= num_inputs
    ]
    return min(candidates, key=lambda config: H200.seconds(config, num_weights, num_inputs, num_rows, numbers))


def _with_splits(tile: DotConfig, splits: int, num_weights: int, numbers: Numbers) -> DotConfig:
    resident, prefetched = (1, _PREFETCHED_INPUTS) if numbers.bytes >= 1 else (2, _PREFETCHED_CODES)
    is_one_wave = -(-num_weights // tile.block_weights) * splits <= resident * NUM_SMS
    return DotConfig(
        tile.block_weights,
        tile.block_inputs,
        tile.num_warps,
        tile.num_stages,
        splits,
        prefetched_inputs=prefetched if is_one_wave else 0,
    )


def _resident(config: DotConfig, block_rows: int, numbers: Numbers) -> int:
    """Programs that a multiprocessor holds at once."""
    input_bytes = config.block_weights * numbers.bytes + block_rows * _BYTES
    shared = int(input_bytes * config.block_inputs * config.num_stages) + 1024
    threads = 32 * config.num_warps
    registers = 64 + config.block_weights * block_rows // threads  # of a thread: the accumulator, and the rest
    return max(1, min(_SHARED_BYTES // shared, _MAX_WARPS // config.num_warps, _NUM_REGISTERS // (threads * registers)))
