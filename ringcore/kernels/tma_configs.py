"""Which products of few rows `tma_kernel` computes, and by which tiles: those of dense 16-bit weights on Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton

from ringcore.kernels import skinny_configs
from ringcore.kernels.skinny_tiles import Config, TmaConfig, padded_rows
from ringcore.kernels.skinny_times import NUM_SMS

__all__ = ["choose_on_hopper", "chooser", "has_wgmma", "tma_config"]

_FEW_ROWS, _MAX_ROWS = 16, 64
_TILE = 64
_BLOCKS_OF_INPUTS = (128, 64)  # the second where the first leaves too few stages, or splits
_MAX_PROGRAMS = 3  # of an SM
_RING_BYTES = {1: 192 << 10, 2: 110 << 10, 3: 73 << 10}  # of a program, by programs of an SM
_MIN_STAGES, _MAX_STAGES = 3, 8
_FILLED, _LESS_FILLED, _MIN_FILLED = 0.7, 0.6, 0.45  # of the SMs
_EVEN = 0.9  # of the programs
_BYTES = 2
_ALIGNMENT = 16  # bytes, of what TMA reads


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Compute capability 9 alone has these instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def chooser(weight: torch.Tensor) -> Callable[..., Config | None]:
    """As `skinny_configs.choose`, for a dense weight on its device."""
    is_aligned = weight.data_ptr() % _ALIGNMENT == 0
    return choose_on_hopper if is_aligned and has_wgmma(weight.device) else skinny_configs.choose


@functools.cache
def choose_on_hopper(num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False) -> Config | None:
    """As `skinny_configs.choose`, of a dense weight."""
    config = tma_config(num_outputs, num_inputs, num_rows, is_gated=is_gated) if 1 < num_rows <= _MAX_ROWS else None
    return config or skinny_configs.choose(num_outputs, num_inputs, num_rows, is_gated=is_gated)


def tma_config(num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False) -> TmaConfig | None:
    """None: no tiles divide the inputs, or the outputs of a gated weight; or they are so many, but not many more, that
    some programs would have more of them than others."""
    if is_gated and num_outputs % 8:
        return None
    tiles = triton.cdiv(num_outputs * (2 if is_gated else 1), _TILE)
    # Of what is added the next norm sums the splits, of others the last program of a tile.
    is_added = num_outputs <= num_inputs and not is_gated  # of the linears of decoders
    filled = (_FILLED if num_rows <= _FEW_ROWS else _LESS_FILLED) if is_added else _MIN_FILLED
    enough, most = filled * NUM_SMS, 4 if is_added else 2
    splits = {
        block: _splits(tiles, num_inputs // block, enough, most)
        for block in _BLOCKS_OF_INPUTS
        if num_inputs % block == 0
    }
    for block_inputs in sorted(splits, key=lambda block: min(tiles * splits[block], enough), reverse=True):
        programs = _programs_per_sm(tiles * splits[block_inputs])
        if programs is None:
            return None
        stage_bytes = block_inputs * _BYTES * (_TILE + padded_rows(num_rows))
        num_stages = min(_MAX_STAGES, _RING_BYTES[programs] // stage_bytes)
        if num_stages >= _MIN_STAGES:
            return TmaConfig(_TILE, block_inputs, num_stages, splits[block_inputs], programs)
    return None


def _splits(tiles: int, blocks: int, enough: float, most: int) -> int:
    """The fewest that make `enough` items, else the most of those that divide the blocks of inputs."""
    counts = [n for n in range(1, most + 1) if blocks % n == 0]
    return next((n for n in counts if tiles * n >= enough), counts[-1])


def _programs_per_sm(items: int) -> int | None:
    """One item for each program, or about as many for each."""
    if items <= _MAX_PROGRAMS * NUM_SMS:
        return triton.cdiv(items, NUM_SMS)
    for programs in range(_MAX_PROGRAMS, 0, -1):
        if items >= _EVEN * triton.cdiv(items, programs * NUM_SMS) * programs * NUM_SMS:
            return programs
    return None
