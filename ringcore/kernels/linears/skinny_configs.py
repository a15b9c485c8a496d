"""Kernel choice and launch configuration of a skinny linear: what was measured of its shape, else by rule and model.

One row takes 2 to 4 KiB of weights per warp, and a few outputs per program. 2 to 32 rows take 64 or 128 weight rows as
the M side of the tensor cores, with the tile and split-K that a model of their time finds fastest (`skinny_times`). 2
to 4 rows are like one where the weight is small, else like more. 33 to 64 rows are multiplied here where the weight has
rows for most SMs and nothing is added; the others, and more rows, by cuBLAS, with split-K where `choose_split_k` says
so. The kernels of cuBLAS start only when the one before has ended: for Qwen3-0.6B they take as long to start as to read
the weights, and with qkv and gate_up by `dot_kernel` whole passes of 40 to 256 rows took 1.4 to 6% less. On Hopper
`tma_configs` is asked first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ringcore.kernels.linears.skinny_measured import MEASURED
from ringcore.kernels.linears.skinny_tiles import Config, DotConfig, FmaConfig, PackedFmaConfig
from ringcore.kernels.linears.skinny_times import (
    BYTE_NUMBERS,
    E2M1_NUMBERS,
    FP8_NUMBERS,
    NIBBLE_NUMBERS,
    NUM_SMS,
    Numbers,
    fastest_dot,
)

__all__ = [
    "MAX_ROWS",
    "choose",
    "choose_packed",
    "choose_rounded",
    "choose_split_k",
    "last_of_range",
    "many_packed",
]

# Ends of the ranges of rows that share a configuration: 1, 2 to 4, 5 to 16 and so on. Within a range, a row's result is
# independent of the number of rows.
_RANGES = (1, 4, 16, 32, 64, 128, 192, 256)
MAX_ROWS = _RANGES[-1]
_MAX_FMA_ROWS, _MAX_DOT_ROWS = 4, 32
_SMALL_WEIGHT = 1 << 22  # numbers
_MAX_SPLIT_K_ROWS = 256  # more rows were not measured in whole passes, where the norm reduces the partials
_MANY_WEIGHTS = 12288  # rows of a weight
_MANY_ROWS = DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0)  # of 33 to 64 rows

_ROUNDED_ROWS = 64  # few rows of FP8 times FP8
_ROUNDED_TILES = DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0, block_rows=128)  # of many
_FILLED = 0.9  # of the programs that the SM with the most of them would allow
_FMA_BLOCK = 4096  # inputs
_LONG_ROUNDED_FMA = PackedFmaConfig(2, _FMA_BLOCK, 8, 2 * NUM_SMS)
_WARP_BLOCK = 1024  # of which a warp has whole outputs
_WARP_INPUTS = 5120  # of a row that each warp of eight can have
_PACKED_FMA_INPUTS = 16384  # a row of more does not fit in registers
_MAX_PACKED_ROWS, _MAX_LONG_RUN_ROWS = 128, 256
_LONG_RUN = 16
_NIBBLE_PROGRAMS = 2 * NUM_SMS

_MANY_PACKED = DotConfig(128, 64, 8, 3, 1, prefetched_inputs=0, block_rows=128)  # of many rows, quantized weights
_MANY_NIBBLES = DotConfig(128, 128, 8, 3, 1, prefetched_inputs=0, block_rows=128)
_MANY_E2M1 = DotConfig(128, 64, 8, 4, 1, prefetched_inputs=0, block_rows=64)  # with 4 warps: see `experts_measured`


def last_of_range(num_rows: int) -> int | None:
    """The most rows that have the configuration of num_rows rows; None: there are none, or too many."""
    return next((end for end in _RANGES if num_rows <= end), None) if num_rows > 0 else None


@functools.cache
def choose(num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False) -> Config | None:
    """The configuration of x [num_rows, num_inputs] times a weight of num_outputs rows (gated: of twice as many).

    None: cuBLAS is faster, or there are no rows or too many.
    """
    end = last_of_range(num_rows)
    if end is None:
        return None
    measured = MEASURED.get((num_outputs, num_inputs, is_gated), {})
    largest = next((largest for largest in measured if end <= largest), None)
    return _by_rule(num_outputs, num_inputs, is_gated, end) if largest is None else measured[largest]


@functools.cache
def choose_packed(
    num_outputs: int,
    num_inputs: int,
    num_rows: int,
    numbers: Numbers = BYTE_NUMBERS,
    *,
    is_gated: bool = False,
    by_fma: bool = False,
    has_zeros: bool = False,
    run: int = 1,
) -> Config | None:
    """As `choose`, of a quantized weight; None: none, or so many that the weight is to be expanded for cuBLAS. by_fma:
    one row, of a weight that `packed_fma_kernel` multiplies. has_zeros: each group its own. run: of 4 bits, see
    `weight_tiles`.

    Microseconds on an H200, 4-bit weights in groups of 128: one row by FMA with the norm and zeros of groups, others by
    tensor cores:

        | outputs x inputs  | bytes | 1 row | 8    | 32   | 64   | 128  | 256  |
        | 6,144 x 4,096     | 2.8   | 6.0   | 9.4  | 10.0 | 14.2 | 21.3 | 30.6 |
        | 4,096 x 4,096     | 1.9   | 4.6   | 8.3  | 8.2  | 10.1 | 14.6 | 21.1 |
        | 2 x 12,288, gated | 11.4  | 16.8  | 22.6 | 26.7 | 36.0 | 56.0 | 93.0 |
        | 4,096 x 12,288    | 5.7   | 9.3   | 16.8 | 16.6 | 19.9 | 29.7 | 50.3 |

    cuBLAS takes 16.3, 52.0 and 31.1 for 64 rows of the first, third and fourth in 16 bits, 21.6, 73.3 and 41.7 for 256,
    and for 2,048 rows 130, 512 and 249, where tiles of packed weights take 299, 1,245 and 689; an expansion writes and
    reads four times the bytes of 4 bits. In groups of 32, of which x is read in half sectors, 64 rows take 23.9, 78.8
    and 35.3.

    Tiles of bytes and of e2m1 for tensor cores were not measured: they are those of the model of times.
    """
    if not 1 <= num_rows <= (_MAX_LONG_RUN_ROWS if run >= _LONG_RUN else _MAX_PACKED_ROWS):
        return None
    if by_fma and num_inputs <= _PACKED_FMA_INPUTS:
        return _packed_fma(num_outputs, num_inputs, numbers, is_gated, has_zeros)
    num_weights = num_outputs * (2 if is_gated else 1)
    if numbers == NIBBLE_NUMBERS:
        of_runs = _long_run_dot if run >= _LONG_RUN else _nibble_dot
        return of_runs(num_weights, num_inputs, num_rows)
    if num_rows > _MAX_DOT_ROWS:
        return many_packed(numbers)
    return fastest_dot(num_weights, num_inputs, _MAX_DOT_ROWS // 2, numbers=numbers)


def _packed_fma(
    num_outputs: int, num_inputs: int, numbers: Numbers, is_gated: bool, has_zeros: bool
) -> PackedFmaConfig:
    """In 4 bits as measured for 1,024 to 17,920 inputs; of others what needs no more registers than there are.

    Where warps have whole outputs, programs of 16 outputs and eight warps, one on an SM, are the fastest of those tried
    for more than 1,024 inputs. Microseconds on an H200 of the four products of a layer in a CUDA graph, by four warps
    that share outputs, two programs on an SM, and so: Qwen3-8B by AWQ 38.7 and 33.9. Products changed one by one gain
    8.3 of 30.4 for Qwen3-4B in symmetric groups, 21.1 of 77.7 for Phi-4, 3.7 of 15.3 for Qwen3-0.6B. Two tiles ahead in
    place of one gain 0.9 for QKV and the output projection of the first, and nothing with these tiles.
    """
    block_inputs = min(_FMA_BLOCK, 1 << (num_inputs - 1).bit_length())
    if numbers != NIBBLE_NUMBERS:
        if num_inputs <= 12288:
            return PackedFmaConfig(4 if num_inputs <= _FMA_BLOCK else 2, block_inputs, 4, 2 * NUM_SMS)
        return PackedFmaConfig(4, block_inputs, 8, 2 * NUM_SMS)
    if num_inputs > _WARP_INPUTS:
        num_warps, programs = (4, 2) if num_inputs <= 12288 else (8, 1)
        return PackedFmaConfig(4, block_inputs, num_warps, programs * NUM_SMS)
    if is_gated:
        # Two programs of four warps for one of eight: 0.2 us less with AWQ's zeros, 1.4 in symmetric groups. Of 4,096
        # inputs with zeros tiles of 4 outputs take 0.4 us less than those of 8; of others 2.5 to 3.5 more.
        if not 2048 < num_inputs <= _FMA_BLOCK:
            return _gated_fma(num_inputs)
        return PackedFmaConfig(4 if has_zeros and num_inputs > 2560 else 8, _WARP_BLOCK, 4, 2 * NUM_SMS)
    if num_inputs <= _WARP_BLOCK:
        return PackedFmaConfig(_tile_outputs(num_outputs), block_inputs, 4, 2 * NUM_SMS)
    return PackedFmaConfig(16 if num_outputs >= _FILLED * NUM_SMS * 16 else 8, _WARP_BLOCK, 8, NUM_SMS)


def _gated_fma(num_inputs: int) -> PackedFmaConfig:
    """As many programs on an SM as have the registers for a row."""
    programs = 1 if num_inputs > 2048 else 2
    return PackedFmaConfig(8, min(_WARP_BLOCK, 1 << (num_inputs - 1).bit_length()), 8, programs * NUM_SMS)


def _tile_outputs(num_outputs: int) -> int:
    """Of one row by FMA: eight, or as few as it takes for a tile for about every program, of two on an SM."""
    return next((n for n in (8, 4) if num_outputs >= _FILLED * 2 * NUM_SMS * n), 2)


def _nibble_dot(num_weights: int, num_inputs: int, num_rows: int) -> DotConfig:
    """As measured: for up to 32 rows tiles of 256 inputs, but for more than 16 of a weight that has many."""
    tiles = -(-num_weights // 128)
    if num_rows > _MAX_DOT_ROWS:
        if num_weights >= _MANY_WEIGHTS:
            return DotConfig(256, 64, 8, 3, 1, prefetched_inputs=0)
        splits = min(4 if num_rows <= 64 else 2, max(1, num_inputs // 128))
        return DotConfig(128, 64, 8, 4, splits, prefetched_inputs=0)
    has_few = num_rows <= 16 or tiles <= 32
    block_inputs, num_stages = (256, 4) if has_few else (128, 3)
    least = NUM_SMS - 4 if num_rows > 16 and has_few else _NIBBLE_PROGRAMS
    most = max(1, num_inputs // (2 * block_inputs))
    splits = min(most, next((n for n in (1, 2, 3, 4) if tiles * n >= least), 6))
    prefetched = 2048 if tiles * splits <= 2 * NUM_SMS else 0
    return DotConfig(128, block_inputs, 8, num_stages, splits, prefetched_inputs=prefetched)


def _long_run_dot(num_weights: int, num_inputs: int, num_rows: int) -> DotConfig:
    """As measured: tiles of 64 outputs, in one wave of as many splits as there are programs for."""
    is_few = num_rows <= _MAX_DOT_ROWS
    block_inputs, block_rows = 256 if is_few else 128, 64 if num_rows <= 64 else 128
    tiles = -(-num_weights // 64) * -(-num_rows // block_rows)
    if not is_few and num_rows <= 128 and tiles > 2 * NUM_SMS:
        shape = (128, 128, 4, 4) if num_rows <= 64 else (128, 128, 8, 3)
        return DotConfig(*shape, 1, prefetched_inputs=0, block_rows=block_rows)
    wave = (3 if is_few else 2) * NUM_SMS
    splits = max(1, min(4, wave // tiles, num_inputs // (2 * block_inputs)))
    has_three = tiles * splits > 2 * NUM_SMS  # programs on an SM
    num_stages = 3 if num_rows > 64 or (num_rows > 16 and has_three) else 4
    return DotConfig(64, block_inputs, 4, num_stages, splits, prefetched_inputs=0, block_rows=block_rows)


def many_packed(numbers: Numbers) -> DotConfig:
    """The tiles of many rows."""
    tiles = {NIBBLE_NUMBERS: _MANY_NIBBLES, E2M1_NUMBERS: _MANY_E2M1, FP8_NUMBERS: _ROUNDED_TILES}
    return tiles.get(numbers, _MANY_PACKED)


@functools.cache
def choose_rounded(
    num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False, by_fma: bool = False
) -> DotConfig | PackedFmaConfig | None:
    """As `choose_packed`, of FP8 inputs and FP8 weights.

    Microseconds on an H200, weights of 128 x 128 blocks: rows by tensor cores without the norm and the rounding before
    them, some 3 more, and one row by FMA with both in the kernel:

        | outputs x inputs  | bytes | FMA, 1 row | tensor cores, 8 rows | 32   |
        | 6,144 x 4,096     | 5.4   | 8.1        | 11.1                 | 13.0 |
        | 4,096 x 4,096     | 3.6   | 5.4        | 8.9                  | 10.1 |
        | 2 x 12,288, gated | 21.5  | 25.4       | 26.6                 | 28.7 |
        | 4,096 x 12,288    | 10.7  | 14.1       | 18.1                 | 20.1 |
    """
    if num_rows < 1:
        return None
    if by_fma and num_inputs <= _PACKED_FMA_INPUTS:
        if num_inputs > _FMA_BLOCK:
            return _LONG_ROUNDED_FMA
        if is_gated:
            return _gated_fma(num_inputs)
        return PackedFmaConfig(_tile_outputs(num_outputs), 1 << (num_inputs - 1).bit_length(), 8, 2 * NUM_SMS)
    if num_rows > _ROUNDED_ROWS:
        return _ROUNDED_TILES
    tiles = -(-num_outputs * (2 if is_gated else 1) // 64)
    most = max(1, num_inputs // 256)
    splits = _even_splits(tiles, [n for n in (1, 2, 3, 4, 6, 8) if n <= most])
    return DotConfig(64, 128, 4, 6, splits, prefetched_inputs=512 if tiles * splits <= NUM_SMS else 0)


def _even_splits(tiles: int, candidates: Sequence[int]) -> int:
    """The fewest splits with three programs for two SMs or more, and with about as many programs on each SM."""
    enough = [n for n in candidates if 2 * tiles * n >= 3 * NUM_SMS] or [candidates[-1]]
    return next((n for n in enough if -(-tiles * n // NUM_SMS) * NUM_SMS * _FILLED <= tiles * n), enough[0])


@functools.cache
def choose_split_k(num_outputs: int, num_inputs: int, num_rows: int) -> int:
    """The number of split-K splits, equal in size, of a cuBLAS product whose partials the next norm reduces.

    By itself cuBLAS computes few outputs in one pass over all inputs on few SMs, or with split-K and a reduction
    kernel. Microseconds on H200s of a product that is added to float32 rows, without splits, in 2 and in 4:

        | outputs x inputs | 128 rows         | 256              | 512              | 1,024               |
        | 4,096 x 12,288   | 34.3, 29.4, 31.3 | 44.3, 38.0, 39.8 | 68.9, 68.6, 72.0 | 132.0, 133.2, 140.7 |
        | 4,096 x 4,096    | 14.7, 13.1, 14.5 | 19.8, 18.0, 20.3 | 28.7, 28.7, 32.9 | 49.7, 50.5, 58.9    |
        | 2,048 x 8,192    | 16.9, 14.0, 12.0 | 22.6, 17.3, 15.9 | 31.5, 25.2, 27.1 | 46.7, 46.5, 49.8    |
        | 1,024 x 3,072    | 8.0, 6.1, 5.1    | 8.0, 6.2, 6.1    | 8.5, 8.0, 8.6    | 12.2, 12.1, 13.9    |
    """
    tiles = -(-num_rows // 128) * -(-num_outputs // 128)
    if num_rows > _MAX_SPLIT_K_ROWS or tiles > 64:
        return 1
    wanted = 4 if tiles <= 16 else 2
    return next((n for n in (wanted, 2) if num_inputs % (8 * n) == 0), 1)  # rows that begin at 16 bytes


def _by_rule(num_outputs: int, num_inputs: int, is_gated: bool, end: int) -> Config | None:
    num_weights = num_outputs * (2 if is_gated else 1)
    if end == 1 or (end == _MAX_FMA_ROWS and num_weights * num_inputs < _SMALL_WEIGHT):
        return _fma_by_rule(num_outputs, num_inputs, is_gated, end)
    if end <= _MAX_DOT_ROWS:
        return fastest_dot(num_weights, num_inputs, _MAX_DOT_ROWS // 2)
    is_added = num_outputs <= num_inputs and not is_gated  # of the linears of decoders
    return None if end > 64 or is_added or num_weights < _MANY_WEIGHTS else _MANY_ROWS


def _fma_by_rule(num_outputs: int, num_inputs: int, is_gated: bool, end: int) -> FmaConfig:
    """Of one row and more than 2,048 inputs, on an H200 against the fastest of all tiles measured: gated linears of
    five models take 1.01 times as long, LM heads 1.03, others 1.07."""
    if end == 1 and num_inputs > 2048:
        if is_gated:
            return FmaConfig(1, 4096, 4)
        return FmaConfig(4, 2048, 8) if num_inputs == 4096 else FmaConfig(2, 2048, 4)
    width = 1 << (num_inputs - 1).bit_length()
    if width > 4096:  # more than fits in registers: a loop over blocks
        width = 4096 if end == 1 else 2048
    num_warps = min(8, max(1, width // 512))
    has_many = num_outputs >= 4096
    wide = end == 1 or width <= 2048
    block_outputs = 4 if has_many and wide and not (is_gated and num_inputs > 1024) else 2
    is_large = num_outputs * num_inputs * (2 if is_gated else 1) >= 1 << 23
    return FmaConfig(block_outputs, width, num_warps, trigger_late=is_large)
