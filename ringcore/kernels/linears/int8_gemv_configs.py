"""Which 4-bit products of one row `int8_gemv` computes, on Hopper."""

from __future__ import annotations

import functools

import torch

from ringcore.kernels.launch.nvrtc import nvrtc_version
from ringcore.kernels.linears.packed_weight import NIBBLES, PackedWeight
from ringcore.kernels.linears.skinny_tiles import Int8GemvConfig
from ringcore.kernels.linears.skinny_times import NUM_SMS
from ringcore.kernels.linears.tma_configs import has_wgmma

__all__ = ["choose_int8_gemv", "fits_int8_gemv", "int8_gemv_config"]

_MAX_SHARED_BYTES = (228 << 10) // 2 - 1024  # of a program: two kernels' are on an SM, and 1 KiB of each is reserved
_ALIGNMENT = 16  # bytes, of what TMA reads
_GROUP, _RUN, _TILE_ROWS = 128, 32, 16
_MIN_INPUTS, _FILLED = 2048, 0.9  # the latter of the programs' tiles, if all had as many as the one with the most


def int8_gemv_config(weight: PackedWeight) -> Int8GemvConfig | None:
    """For one row and this weight, on its device; None: the kernel cannot multiply it, or another is faster."""
    if not (has_wgmma(weight.device) and nvrtc_version() is not None and fits_int8_gemv(weight)):
        return None
    return choose_int8_gemv(*weight.shape)


def fits_int8_gemv(weight: PackedWeight) -> bool:
    """Whether the kernel can multiply it: 4 bits in consecutive groups of 128, and scales whose zeros are in their
    lowest bits or one number for all; rows and scales as TMA reads them."""
    scales, num_inputs = weight.scales, weight.shape[1]
    are_groups = (weight.form, weight.group_size, weight.group_offset, weight.run) == (NIBBLES, _GROUP, 0, _RUN)
    are_plain = weight.zeros is None and weight.index is None and not weight.is_tiled and weight.scale_run == 1
    are_rows = weight.row_stride == num_inputs // 4 and num_inputs % (4 * _GROUP) == 0
    are_scales = scales.is_contiguous() or (scales.t().is_contiguous() and len(scales) % 8 == 0)
    are_aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in (weight.codes, scales))
    is_16_bit = weight.dtype != torch.float32 and scales.dtype == torch.float32
    return are_groups and are_plain and are_rows and are_scales and are_aligned and is_16_bit


@functools.cache
def choose_int8_gemv(num_weights: int, num_inputs: int) -> Int8GemvConfig | None:
    """num_weights: rows of the weight, gated or not. Measured of Qwen3-8B."""
    tiles, config = -(-num_weights // _TILE_ROWS), Int8GemvConfig()
    most = -(-tiles // NUM_SMS)
    is_even = tiles >= _FILLED * NUM_SMS * most
    has_room = config.shared_bytes(num_inputs, most) <= _MAX_SHARED_BYTES
    return config if num_inputs >= _MIN_INPUTS and is_even and has_room else None
