"""Which products of few rows `tma_kernel` computes, and by which tiles: those of dense 16-bit weights on Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import triton

from ringcore.kernels.linears import skinny_configs
from ringcore.kernels.linears.packed_weight import BYTES_FP8, PackedWeight
from ringcore.kernels.linears.skinny_tiles import Config, TmaConfig, padded_rows
from ringcore.kernels.linears.skinny_times import NUM_SMS

__all__ = [
    "MAX_PROGRAMS",
    "MAX_TMA_ROWS",
    "choose_on_hopper",
    "choose_rounded_on_hopper",
    "chooser",
    "has_plain_rows",
    "has_wgmma",
    "rounded_chooser",
    "tma_config",
    "with_deepest_ring",
]

_FEW_ROWS, _SOME_ROWS, MAX_TMA_ROWS = 16, 32, 64
_TILE, _WIDE_TILE = 64, 128
_BLOCKS_OF_INPUTS = {2: (128, 64), 1: (128,)}  # by bytes of a number: 64 where 128 leaves too few stages, or splits
_FP8_INPUTS = _EVEN_INPUTS = _UNEVEN_INPUTS = 128
MAX_PROGRAMS = 3  # of an SM
_RING_BYTES = {1: 192 << 10, 2: 110 << 10, 3: 73 << 10}  # of a program, by programs of an SM
_MIN_STAGES, _MAX_STAGES = 3, 16  # the latter of one byte a number
_FILLED, _LESS_FILLED, _MIN_FILLED, _FP8_FILLED = 0.7, 0.6, 0.45, 1.4  # items for an SM
_EVEN = 0.9  # of the programs
_UNEVEN, _BLOCKS_OF_RANGE = 0.7, 16  # items for the multiprocessors' programs; blocks of a program
_ALIGNMENT = 16  # bytes, of what TMA reads


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Compute capability 9 alone has these instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def chooser(weight: torch.Tensor) -> Callable[..., Config | None]:
    """As `skinny_configs.choose`, for a dense weight on its device."""
    is_aligned = weight.data_ptr() % _ALIGNMENT == 0
    return choose_on_hopper if is_aligned and has_wgmma(weight.device) else skinny_configs.choose


def rounded_chooser(weight: PackedWeight, row_group: int) -> Callable[..., Config | None]:
    """As `skinny_configs.choose_rounded`, for an FP8 weight on its device and rows in groups of row_group inputs."""
    groups = (row_group, weight.shape[1]), (weight.group_size, weight.scales.shape[1] * weight.group_size)
    are_whole = all(group % _FP8_INPUTS == 0 or group >= num_inputs for group, num_inputs in groups)
    is_for_it = are_whole and has_plain_rows(weight) and has_wgmma(weight.device)
    return choose_rounded_on_hopper if is_for_it else skinny_configs.choose_rounded


def has_plain_rows(weight: PackedWeight) -> bool:
    """Whether its codes are an aligned matrix of FP8 numbers, whose groups begin at the first input."""
    has_rows = (weight.form, weight.row_stride, weight.group_offset) == (BYTES_FP8, weight.shape[1], 0)
    return has_rows and weight.scales.dtype == torch.float32 and weight.codes.data_ptr() % _ALIGNMENT == 0


@functools.cache
def choose_rounded_on_hopper(
    num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False, by_fma: bool = False
) -> Config | None:
    """As `skinny_configs.choose_rounded`."""
    config = None
    if 1 < num_rows <= MAX_TMA_ROWS:
        config = tma_config(num_outputs, num_inputs, num_rows, is_gated=is_gated, number_bytes=1)
    if config is not None:
        return config
    return skinny_configs.choose_rounded(num_outputs, num_inputs, num_rows, is_gated=is_gated, by_fma=by_fma)


@functools.cache
def choose_on_hopper(num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False) -> Config | None:
    """As `skinny_configs.choose`, of a dense weight."""
    config = tma_config(num_outputs, num_inputs, num_rows, is_gated=is_gated) if 1 < num_rows <= MAX_TMA_ROWS else None
    return config or skinny_configs.choose(num_outputs, num_inputs, num_rows, is_gated=is_gated)


def tma_config(
    num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False, number_bytes: int = 2
) -> TmaConfig | None:
    """number_bytes: 2, or 1 of FP8.

    None: no tiles divide the inputs, or the outputs of a gated weight; or in FP8 they are so many, but not many more,
    that some programs would have more of them than others.
    """
    if is_gated and num_outputs % 8:
        return None
    tile = _WIDE_TILE if number_bytes == 1 and is_gated and num_rows > _SOME_ROWS else _TILE
    tiles = triton.cdiv(num_outputs * (2 if is_gated else 1), tile)
    # Of what is added the next norm sums the splits, of others the last program of a tile.
    is_added = num_outputs <= num_inputs and not is_gated  # of the linears of decoders
    enough, most = NUM_SMS * (_FP8_FILLED if number_bytes == 1 else _MIN_FILLED), 1 if is_gated else 2
    if is_added:
        most = 4
        if number_bytes > 1:
            enough = NUM_SMS * (_FILLED if num_rows <= _FEW_ROWS else _LESS_FILLED)
    splits = {
        block: _splits(tiles, num_inputs // block, enough, most)
        for block in _BLOCKS_OF_INPUTS[number_bytes]
        if num_inputs % block == 0
    }
    if is_added and number_bytes > 1 and _is_better_even(tiles, num_inputs, splits):
        return with_deepest_ring(TmaConfig(tile, _EVEN_INPUTS, 0, is_even=True), num_rows, number_bytes)
    for block_inputs in sorted(splits, key=lambda block: min(tiles * splits[block], enough), reverse=True):
        config = laid_out(
            tiles * splits[block_inputs], num_rows, tile, block_inputs, splits[block_inputs], number_bytes
        )
        if config is not None:
            return config
    if number_bytes > 1 and _UNEVEN_INPUTS in splits:
        return with_deepest_ring(TmaConfig(tile, _UNEVEN_INPUTS, 0, programs_per_sm=2), num_rows, number_bytes)
    return None


def _is_better_even(tiles: int, num_inputs: int, splits: Mapping[int, int]) -> bool:
    """Whether splits leave many multiprocessors with less than others, and there are blocks enough for ranges: with the
    40 tiles of Qwen3-4B's down projection 160 items are one or two for each."""
    if _EVEN_INPUTS not in splits:
        return False
    items, blocks = tiles * splits[_EVEN_INPUTS], tiles * num_inputs // _EVEN_INPUTS
    return items < _UNEVEN * triton.cdiv(items, NUM_SMS) * NUM_SMS and blocks >= _BLOCKS_OF_RANGE * NUM_SMS


def laid_out(
    items: int, num_rows: int, tile: int, block_inputs: int, splits: int, number_bytes: int = 2
) -> TmaConfig | None:
    """With as many programs an SM as items are for, and the ring that fits then; None: see `tma_config`, or the ring
    would be too short."""
    programs = _programs_per_sm(items)
    if programs is None:
        return None
    return with_deepest_ring(TmaConfig(tile, block_inputs, 0, splits, programs), num_rows, number_bytes)


def with_deepest_ring(config: TmaConfig, num_rows: int, number_bytes: int = 2) -> TmaConfig | None:
    """None: it would be too short."""
    stage_bytes = config.block_inputs * number_bytes * (config.block_weights + padded_rows(num_rows))
    num_stages = min(_MAX_STAGES // number_bytes, _RING_BYTES[config.programs_per_sm] // stage_bytes)
    return replace(config, num_stages=num_stages) if num_stages >= _MIN_STAGES else None


def _splits(tiles: int, blocks: int, enough: float, most: int) -> int:
    """The fewest that make `enough` items, else the most of those that divide the blocks of inputs."""
    counts = [n for n in range(1, most + 1) if blocks % n == 0]
    return next((n for n in counts if tiles * n >= enough), counts[-1])


def _programs_per_sm(items: int) -> int | None:
    """One item for each program, or about as many for each."""
    if items <= MAX_PROGRAMS * NUM_SMS:
        return triton.cdiv(items, NUM_SMS)
    for programs in range(MAX_PROGRAMS, 0, -1):
        if items >= _EVEN * triton.cdiv(items, programs * NUM_SMS) * programs * NUM_SMS:
            return programs
    return None
